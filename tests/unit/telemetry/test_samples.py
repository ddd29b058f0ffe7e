"""What was counted is in its slot, slots without the daemon are missing, and nothing grows."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxferd.errors import Code
from kvxferd.ids import Endpoint, EngineId, TransferId
from kvxferd.records import PHASES, PullRecord, ReleaseRecord
from kvxferd.telemetry.samples import (
    MAX_KEYS,
    MIN_QUANTILE_PULLS,
    RING_S,
    SLOT_S,
    SampleReport,
    Samples,
    SlotRow,
)
from tests.support.node_samples import SINK, pull_record

WALL = 1_700_000_000.0


class Node:
    """Samples with a clock to be set."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.samples = Samples(lambda: self.now, lambda: WALL + self.now)

    def run(self, seconds: float) -> None:
        """Tick each half second, as the daemon does."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 0.5, until)
            self.samples.tick()

    def slots(self) -> list[SlotRow]:
        return [slot for slot in self.samples.report().slots if slot is not None]


def record(**changes: object) -> PullRecord:
    return msgspec.structs.replace(pull_record(), **changes)


def failed(code: Code = Code.DEADLINE, **changes: object) -> PullRecord:
    return record(outcome="failed", code=code, **changes)


def test_a_slot_holds_what_was_counted_in_it() -> None:
    node = Node()
    samples = node.samples
    samples.add(record(bytes=100, phases_s={"queue": 0.5, "wire": 1.5}))
    samples.add(failed(phases_s={"queue": 0.25}))
    samples.add(record(outcome="cancelled", code=Code.CANCELLED))
    samples.add(ReleaseRecord(transfer_id=TransferId("t"), engine_id=SINK, why=Code.COMPLETED, held_s=3.0))
    samples.add_served(70)
    node.run(14)
    samples.add(record(bytes=7))
    first, second = node.slots()
    assert (first.at, first.span_s, second.at, second.span_s) == (WALL + 10, 9.5, WALL + 14, 4.0)
    assert [(one.delivered, one.failed) for one in (first, second)] == [(1, 1), (1, 0)]
    assert (first.pulled_bytes, first.served_bytes, second.pulled_bytes) == (100, 70, 7)
    assert (first.failures, second.failures) == ({"deadline": 1}, {})
    assert (first.phases_s["queue"], first.phases_s["wire"]) == (0.751, 1.51)
    assert set(first.phases_s) == set(PHASES)


def test_a_daemon_that_did_not_run_leaves_a_gap() -> None:
    node = Node(100.0)
    node.run(5)
    node.now += 22  # it is stopped
    node.run(1)
    node.samples.add(failed())
    slots = node.samples.report().slots
    assert [None if slot is None else (slot.span_s, slot.failed) for slot in slots] == [
        (5.0, 0),
        None,
        (8.0, 1),
    ]


def test_the_last_minute_counts_what_is_no_older_than_70_seconds() -> None:
    node = Node()
    for second in range(119):
        if second < 50:
            node.samples.add(failed(Code.BUSY))
        else:
            node.samples.add(record(bytes=1000))
            node.samples.add_served(500)
        if second >= 109:
            node.samples.add(failed(Code.DEADLINE))
        node.run(1)
    found = node.samples.last_minute()
    assert (found.seconds, found.delivered, found.failed) == (69.0, 69, 10)
    assert found.failure_share == 10 / 79
    assert found.failures == {"deadline": 10}
    assert found.pulled_bytes_per_s == pytest.approx(1000.0)
    assert found.served_bytes_per_s == pytest.approx(500.0)


def test_the_first_minute_is_shorter_and_few_pulls_have_no_quantile() -> None:
    node = Node(7.0)
    assert node.samples.last_minute().pulled_bytes_per_s == 0.0
    for _ in range(MIN_QUANTILE_PULLS - 1):
        node.samples.add(record(total_s=0.5, bytes=100))
    node.run(2)
    minute, (pair,) = node.samples.last_minute(), node.samples.report().pairs
    assert (minute.seconds, minute.pulled_bytes_per_s) == (2.0, 950.0)
    assert (minute.p99_s, pair.p99_s, pair.mean_s) == (None, None, 0.5)


def test_names_that_change_make_no_more_rows_of_a_slot_or_of_all() -> None:
    node = Node()
    for number in range(20 * MAX_KEYS):
        node.samples.add(failed(source=EngineId(f"e{number}"), peer=Endpoint(f"tcp://p{number}:1")))
        node.run(SLOT_S / MAX_KEYS / 2)
    assert max(len(slot.pairs) for slot in node.samples._slots) == MAX_KEYS + 1
    report = node.samples.report()
    assert (len(report.pairs), len(report.peers)) == (MAX_KEYS + 1, MAX_KEYS + 1)
    assert sum(row.failed for row in report.pairs) == sum(row.failed for row in report.peers)
    assert sum(row.failed for row in report.pairs) == sum(slot.failed for slot in node.slots())


def test_pulls_are_counted_by_their_peer() -> None:
    node = Node()
    for peer in ("tcp://a:1", "tcp://b:1", "tcp://b:1"):
        node.samples.add(failed(Code.TRANSPORT, peer=Endpoint(peer), ended_at=WALL + 1))
        node.samples.add(record(peer=Endpoint("tcp://a:1"), bytes=10))
    first, second = node.samples.report().peers
    assert (first.peer, first.failed, first.delivered, first.last_code) == ("tcp://b:1", 2, 0, "transport")
    assert (second.peer, second.failed, second.delivered, second.pulled_bytes) == ("tcp://a:1", 1, 3, 30)
    assert first.last_failed_at == WALL + 1


def test_the_worst_peer_is_one_with_the_worst_code() -> None:
    """The remedy joins both: a command about a peer that failed otherwise would lead astray."""
    node = Node()
    for peer, code, count in (("a", Code.DEADLINE, 2), ("b", Code.DEADLINE, 3), ("c", Code.NOT_ALLOWED, 4)):
        for _ in range(count):
            node.samples.add(failed(code, peer=Endpoint(f"tcp://{peer}:1")))
    found = node.samples.last_minute()
    assert (found.worst_code, found.worst_peer) == (Code.DEADLINE, "tcp://b:1")
    node.samples.add(
        failed(Code.NOT_ALLOWED, peer=Endpoint("tcp://d:1"))
    )  # as common as the other, and later
    found = node.samples.last_minute()
    assert (found.worst_code, found.worst_peer) == (Code.NOT_ALLOWED, "tcp://c:1")


def test_absurd_numbers_are_no_error() -> None:
    node = Node()
    for _ in range(RING_S // SLOT_S):
        for num_bytes in (1 << 63, -5, 1 << 80):
            node.samples.add(record(bytes=num_bytes))
            node.samples.add_served(num_bytes)
        node.run(SLOT_S)
    found = node.samples.report()
    assert min(slot.pulled_bytes for slot in node.slots()[:-1]) > 0
    assert msgspec.json.decode(msgspec.json.encode(found), type=SampleReport) == found


@pytest.mark.parametrize("share", [0.5, 0.99])
@given(st.lists(st.floats(1e-6, 200.0), min_size=MIN_QUANTILE_PULLS, max_size=200))
def test_quantiles_are_close(share: float, times_s: list[float]) -> None:
    node = Node()
    for total_s in times_s:
        node.samples.add(record(total_s=total_s))
    found = node.samples.last_minute()
    value = found.p50_s if share == 0.5 else found.p99_s
    assert value is not None
    truth = sorted(times_s)[math.ceil(share * len(times_s)) - 1]
    assert truth / 1.2 - 100e-6 <= value <= truth * 1.2 + 100e-6


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_no_pull_is_lost_or_counted_twice(steps: list[tuple[int, int, int]]) -> None:
    node, delivered, bad = Node(), Counter[int](), Counter[int]()
    for pause, num_delivered, num_failed in steps:
        for _ in range(num_delivered):
            node.samples.add(record())
        for _ in range(num_failed):
            node.samples.add(failed())
        number = int(node.now // SLOT_S)
        delivered[number] += num_delivered
        bad[number] += num_failed
        node.now += pause
        node.samples.tick()
    last = int(node.now // SLOT_S)
    kept = [number for number in sorted(delivered | bad) if number > last - RING_S // SLOT_S]
    assert sum(slot.delivered for slot in node.slots()) == sum(delivered[number] for number in kept)
    assert sum(slot.failed for slot in node.slots()) == sum(bad[number] for number in kept)
    assert sum(slot.span_s for slot in node.slots()) <= min(node.now, RING_S)


def test_the_slowest_pulls_of_each_slot_are_kept() -> None:
    node = Node()
    for second in range(1200):
        node.samples.add(record(total_s=second / 1000))
        node.samples.add(failed(total_s=100.0))
        node.run(1)
    slowest = [pull.total_s for pull in node.samples.slowest_pulls()]
    assert slowest[:5] == [1.199, 1.198, 1.189, 1.188, 1.179]
    assert RING_S // SLOT_S * 2 - 2 <= len(slowest) <= RING_S // SLOT_S * 2
