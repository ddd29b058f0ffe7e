"""The history: bounded, in order, and the same again after JSON."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import TransferId
from kvxferd.records import PullRecord, Record, ReleaseRecord
from kvxferd.telemetry.history import History, HistoryQuery, record_from_json, record_to_json, stamped
from tests.support.node_samples import SOURCE, pull_record, records


@pytest.mark.parametrize("record", records())
def test_a_record_of_each_kind_gets_its_time_and_survives_json(record: Record) -> None:
    record = stamped(record, 1_800_000_000.0)
    assert record.ended_at == 1_800_000_000.0
    assert record_from_json(json.loads(json.dumps(record_to_json(record)))) == record


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
    assert history.search(HistoryQuery(failed=True)).records == [failed, expired]
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
    page = history.search(query)
    assert len(page.records) == found
    assert (page.dropped, page.is_complete) == (0, True)


@given(
    batches=st.lists(st.integers(0, 12), max_size=8),
    limit=st.integers(1, 5),
    every=st.integers(1, 4),
    capacity=st.integers(1, 8),
)
def test_a_follower_sees_each_record_once_or_as_dropped(
    batches: list[int], limit: int, every: int, capacity: int
) -> None:
    """Some records fail and stay longer; whatever the follower does not get is counted."""
    history = History(max_records=capacity, boot="b-1")
    cursor, seen, dropped, number = history.search(HistoryQuery()).cursor, [], 0, 0
    for batch in batches:
        for _ in range(batch):
            number += 1
            how = ("failed", Code.DEADLINE) if number % every == 0 else ("delivered", None)
            history.add(msgspec.structs.replace(pull_record(*how), runs=number))
        while True:
            page = history.search(HistoryQuery(after=cursor, limit=limit))
            cursor, dropped = page.cursor, dropped + page.dropped
            seen += [record.runs for record in page.records if isinstance(record, PullRecord)]
            assert not page.restarted
            if page.is_complete:
                break
    assert seen == sorted(set(seen))
    assert len(seen) + dropped == number


@pytest.mark.parametrize("cursor", ["old-17", "new--1"])  # the second: of the boot "new-"
def test_a_cursor_of_an_earlier_start_begins_anew(cursor: str) -> None:
    history = History(boot="new")
    history.add(pull_record())
    page = history.search(HistoryQuery(after=cursor))
    assert (page.restarted, page.records, page.dropped) == (True, [pull_record()], 0)


@pytest.mark.parametrize("cursor", ["x", "new-", "new-1x", "new-" + "9" * 30, "new-\u0661"])
def test_odd_cursors_are_refused(cursor: str) -> None:
    with pytest.raises(KvxferdError) as refused:
        History(boot="new").search(HistoryQuery(after=cursor))
    assert refused.value.code is Code.BAD_REQUEST
