"""Series of engines and peers: few, clean, and their sums complete."""

from __future__ import annotations

import itertools
import re

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from kvxferd.errors import Code
from kvxferd.ids import Endpoint, EngineId, TransferId
from kvxferd.records import ServedRecord
from kvxferd.telemetry.bounded_series import (
    IDLE_S,
    MAX_LABEL_CHARS,
    MAX_SERIES,
    OTHER,
    BoundedRows,
    EngineAndPeerCollector,
    clean_label,
)
from kvxferd.telemetry.history import MAX_BYTES, MAX_FAILED, MAX_RECORDS, MAX_SLOW, History
from kvxferd.telemetry.samples import MAX_KEYS, MAX_SLOWEST_A_MINUTE, RING_S, SLOT_S, Samples
from tests.support.node_samples import pull_record


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.text(max_size=300))
def test_a_label_is_short_and_of_few_characters(text: str) -> None:
    label = clean_label(text)
    assert re.fullmatch(r"[A-Za-z0-9._:/\[\]-]+", label)
    assert len(label) <= MAX_LABEL_CHARS


@given(st.lists(st.tuples(st.integers(0, 150), st.floats(0, 300)), max_size=400))
def test_rows_are_bounded_and_nothing_is_lost_while_all_are_in_use(uses: list[tuple[int, float]]) -> None:
    clock = Clock()
    rows = BoundedRows(1, clock)
    for number, _ in uses:
        rows.row_of(f"engine-{number}").served_pulls += 1
    assert len(rows.rows) <= MAX_SERIES + 1
    assert sum(row.served_pulls for row in rows.rows.values()) == len(uses)
    for number, elapsed_s in uses:
        clock.now += elapsed_s
        rows.row_of(f"engine-{number}")
        assert len(rows.rows) <= MAX_SERIES + 1


def test_a_place_that_is_idle_goes_to_a_newcomer_and_one_in_use_does_not() -> None:
    clock = Clock()
    rows = BoundedRows(1, clock)
    for number in range(MAX_SERIES):
        rows.row_of(f"engine-{number}")
    rows.row_of("late")
    assert ("late",) not in rows.rows
    assert (OTHER,) in rows.rows
    clock.now = IDLE_S + 1
    rows.row_of("engine-1")
    rows.row_of("later")
    assert ("later",) in rows.rows
    assert ("engine-1",) in rows.rows
    assert ("engine-0",) not in rows.rows


def test_names_that_are_invented_take_no_row_of_a_name_in_use_and_make_few_rows() -> None:
    clock = Clock()
    rows = BoundedRows(1, clock)
    invented = (f"engine-{number}" for number in itertools.count())
    honest = [f"honest-{number}" for number in range(4)]
    num_uses, seen = 0, set[tuple[str, ...]]()
    for second in range(0, int(IDLE_S), 4):
        clock.now = float(second)
        for name in (*honest, *(next(invented) for _ in range(40))):
            rows.row_of(name).served_pulls += 1
            num_uses += 1
        seen |= set(rows.rows)
    assert all((name,) in rows.rows for name in honest)
    assert len(seen) == MAX_SERIES + 1  # of 6,000 names
    assert sum(row.served_pulls for row in rows.rows.values()) == num_uses


def test_pulls_and_acknowledgements_are_counted_by_pair_and_by_peer() -> None:
    collector = EngineAndPeerCollector(by_engine=True, by_peer=True)
    registry = CollectorRegistry()
    registry.register(collector)
    evil = msgspec.structs.replace(pull_record(), source=EngineId('a"}\n1 <b>\x1b[31m'))
    collector.record_pull(evil)
    served = ServedRecord(
        source=EngineId("p"), sink=EngineId("d"), peer=Endpoint("tcp://10.0.0.9:1"), bytes=7
    )
    collector.record_served(served)
    text = generate_latest(registry).decode()
    assert 'source="a___1__b__[31m"' in text
    assert 'kvxferd_engine_served_bytes_total{sink="d",source="p"} 7.0' in text
    assert 'kvxferd_peer_served_pulls_total{peer="10.0.0.9:1"} 1.0' in text


def test_nothing_is_counted_where_it_is_off() -> None:
    collector = EngineAndPeerCollector(by_engine=False, by_peer=False)
    assert not collector.is_on
    collector.record_pull(pull_record())
    assert not list(collector.collect())


# --- what the daemon remembers of pulls stays within its bounds, however many engines there are


NUM_ENGINES = 10_000


def test_ten_thousand_engines_and_peers_take_no_more_than_the_bounds() -> None:
    number = 0
    history, samples = History(), Samples(clock=lambda: number / 100)
    series = EngineAndPeerCollector(by_engine=True, by_peer=True, clock=lambda: float(number))
    for number in range(NUM_ENGINES):
        now = number / 100
        has_failed = number % 3 == 0
        record = msgspec.structs.replace(
            pull_record(),
            transfer_id=TransferId(f"request-{number}"),
            source=EngineId(f"{number:0>256}"),
            peer=Endpoint(f"tcp://10.1.{number >> 8}.{number & 255}:1"),
            ended_at=now,
            outcome="failed" if has_failed else "delivered",
            code=Code.TRANSPORT if has_failed else None,
            message="x" * 2_000 if has_failed else "",
            bytes=4 << 20,
        )
        history.add(record)
        samples.add(record)
        series.record_pull(record)
        series.record_served(ServedRecord(source=record.source, sink=record.sink, peer=record.peer, bytes=1))
        if number % 100 == 0:
            samples.tick()
    assert len(history.records()) <= MAX_RECORDS + MAX_FAILED + MAX_SLOW
    rings = (history._recent, history._failed, history._slow)
    assert sum(ring.num_bytes for ring in rings) <= MAX_BYTES * 3 // 2
    assert len(samples._slots) <= RING_S // SLOT_S
    assert all(len(slot.failed_from) <= MAX_KEYS for slot in samples._slots)
    for minute in samples._minutes:
        assert len(minute.pairs) == len(minute.peers) == MAX_KEYS + 1
        assert len(minute.slowest) == MAX_SLOWEST_A_MINUTE
    for rows in (series._pairs, series._peers):
        assert rows is not None
        assert len(rows.rows) <= MAX_SERIES + 1
