"""The history: bounded, in order, and the same again after JSON."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.errors import Code
from kvxferd.ids import TransferId
from kvxferd.records import PullRecord, Record, ReleaseRecord
from kvxferd.telemetry.history import History, HistoryQuery, record_from_json, stamped
from tests.support.node_samples import SOURCE, pull_record, records


@pytest.mark.parametrize("record", records())
def test_a_record_of_each_kind_gets_its_time_and_survives_json(record: Record) -> None:
    record = stamped(record, 1_800_000_000.0)
    assert record.ended_at == 1_800_000_000.0
    assert record_from_json(msgspec.json.decode(msgspec.json.encode(record))) == record


@given(ended_at=st.floats(0, 4e9), took_s=st.floats(0, 1e5))
def test_a_record_never_starts_after_its_end(ended_at: float, took_s: float) -> None:
    record = stamped(msgspec.structs.replace(pull_record(), total_s=took_s), ended_at)
    assert isinstance(record, PullRecord)
    assert record.started_at <= record.ended_at == ended_at


def test_a_failure_stays_longer_than_the_records_around_it() -> None:
    history = History(max_records=4)
    failed = pull_record("failed", Code.DEADLINE)
    expired = ReleaseRecord(transfer_id=TransferId("t"), engine_id=SOURCE, why=Code.LEASE_EXPIRED, held_s=1.0)
    for record in (failed, expired):
        history.add(record)
    for _ in range(100):
        history.add(pull_record())
    assert history.records() == [failed, expired, *[pull_record()] * 4]
    assert history.search(HistoryQuery(failed=True)) == [failed, expired]
    assert history.failed_pulls() == [failed]
    assert history.expired_leases() == [expired]


def test_long_records_are_fewer() -> None:
    history = History(max_bytes=1 << 16)
    for _ in range(1000):
        history.add(msgspec.structs.replace(pull_record("failed", Code.DEADLINE), message="x" * 2000))
    assert 10 < len(history.records()) < 40


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (HistoryQuery(), 6),
        (HistoryQuery(failed=True), 1),
        (HistoryQuery(slower=0.01), 2),
        (HistoryQuery(slower=0.1), 0),
        (HistoryQuery(transfer="req-5"), 1),
        (HistoryQuery(engine=SOURCE), 4),
        (HistoryQuery(engine=SOURCE, kind="pull"), 2),
        (HistoryQuery(kind="pull,release"), 3),
        (HistoryQuery(limit=2), 2),
    ],
)
def test_a_query_finds_what_passes_every_filter(query: HistoryQuery, found: int) -> None:
    history = History()
    for record in records():
        history.add(record)
    assert len(history.search(query)) == found
