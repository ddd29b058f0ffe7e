"""The ring of samples: what was counted is there, missed seconds are gaps, and nothing grows."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxferd.errors import Code
from kvxferd.ids import Endpoint, EngineId, TransferId
from kvxferd.records import PHASES, PullRecord, ReleaseRecord
from kvxferd.telemetry.sample_report import OTHERS, SampleReport
from kvxferd.telemetry.sampler import Sampler
from kvxferd.telemetry.samples import MAX_KEYS, RING_S, Gauges, Samples
from tests.support.node_samples import PEER, SINK, pull_record
from tests.support.virtual_time import VirtualTimeLoop

WALL = 1_700_000_000.0


def started(now: float = 0.0) -> Samples:
    samples = Samples()
    samples.start(now)
    return samples


def finish(samples: Samples, now: float, gauges: Gauges | None = None) -> None:
    samples.finish_second(now, WALL + now, gauges or Gauges())


def record(**changes: object) -> PullRecord:
    return msgspec.structs.replace(pull_record(), **changes)


def failed(code: Code = Code.DEADLINE, **changes: object) -> PullRecord:
    return record(outcome="failed", code=code, **changes)


def test_a_second_holds_what_was_counted_in_it() -> None:
    samples = started()
    samples.add(record(bytes=100, phases_s={"queue": 0.5, "wire": 1.5}))
    samples.add(failed(phases_s={"queue": 0.25}))
    samples.add(record(outcome="cancelled", code=Code.CANCELLED))
    samples.add(
        ReleaseRecord(transfer_id=TransferId("t"), engine_id=SINK, why=Code.LEASE_EXPIRED, held_s=30.0)
    )
    samples.add(ReleaseRecord(transfer_id=TransferId("t"), engine_id=SINK, why=Code.COMPLETED, held_s=3.0))
    samples.add_served(70)
    finish(samples, 1.0, Gauges(running_pulls=3, oldest_pull_s=4.5, warnings=2))
    samples.add(record(bytes=7))
    finish(samples, 2.0)
    found = samples.report(900)
    columns = found.columns
    assert found.seconds == 2
    assert columns.at == [WALL + 1, WALL + 2]
    assert columns.span_s == [1, 1]
    assert (columns.delivered, columns.failed, columns.cancelled) == ([1, 1], [1, 0], [1, 0])
    assert (columns.pulled_bytes, columns.served_bytes) == ([100, 7], [70, 0])
    assert (columns.served_transfers, columns.expired_leases) == ([1, 0], [1, 0])
    assert (columns.running_pulls, columns.oldest_pull_s, columns.warnings) == ([3, 0], [4.5, 0.0], [2, 0])
    assert found.failures == {"deadline": [1, 0]}
    assert found.phases_s["queue"] == [0.75 + 0.001, 0.001]
    assert found.phases_s["wire"] == [1.5 + 0.01, 0.01]
    assert set(found.phases_s) == set(PHASES)


def test_missed_seconds_are_gaps() -> None:
    samples = started(10.0)
    finish(samples, 11.0)
    samples.add(record())
    samples.add(failed())
    finish(samples, 15.0)
    found = samples.report(900)
    assert found.columns.span_s == [1, None, None, None, 4]
    assert found.columns.delivered == [0, None, None, None, 1]
    assert found.columns.p99_s[1:4] == [None] * 3
    assert found.failures == {"deadline": [0, None, None, None, 1]}
    assert found.columns.at == [WALL + 11 + index for index in range(5)]


def test_a_stop_of_an_hour_leaves_one_sample() -> None:
    samples = started()
    for second in range(1, 100):
        samples.add(failed())
        finish(samples, second)
    samples.add(record())
    finish(samples, 99 + 3600)
    found = samples.report(900)
    assert found.seconds == RING_S
    assert found.columns.delivered == [*[None] * (RING_S - 1), 1]
    assert found.failures == {}
    assert [(row.delivered, row.failed) for row in found.pairs] == [(1, 0)]
    assert found.last_minute.failed == 0


def test_timers_that_fire_a_little_early_or_twice_make_no_second_sample() -> None:
    samples = started(7.02)
    for now in (7.4, 8.0, 8.3, 8.999, 9.49, 10.0):
        samples.add(record())
        finish(samples, now)
    assert samples.report(900).columns.delivered == [2, 2, 2]
    assert samples.report(900).columns.span_s == [1, 1, 1]


def test_the_last_minute_names_the_commonest_code() -> None:
    samples = started()
    for second in range(1, 121):
        if second <= 60:
            samples.add(failed(Code.BUSY))
        else:
            samples.add(record(bytes=1000))
            samples.add_served(500)
        if second > 110:
            samples.add(failed(Code.DEADLINE))
        if second > 117:
            samples.add(failed(Code.TRANSPORT))
        finish(samples, second)
    found = samples.last_minute()
    assert (found.seconds, found.delivered, found.failed) == (60.0, 60, 13)
    assert found.failure_share == 13 / 73
    assert found.failures == {"deadline": 10, "transport": 3}
    assert found.worst_code == "deadline"
    assert found.worst_peer == PEER
    assert found.pulled_bytes_per_s == 1000.0
    assert found.served_bytes_per_s == 500.0


def test_the_first_minute_is_shorter() -> None:
    samples = started()
    samples.add(record(bytes=500))
    finish(samples, 1)
    finish(samples, 2)
    assert samples.last_minute().seconds == 2.0
    assert samples.last_minute().pulled_bytes_per_s == 250.0
    assert started().last_minute().pulled_bytes_per_s == 0.0
    assert started().report(900).columns.at == []


def test_pairs_beyond_the_table_are_counted_together() -> None:
    samples = started()
    for number in range(MAX_KEYS + 30):
        samples.add(failed(source=EngineId(f"e{number}")))
    samples.add(failed(source=EngineId("e0")))
    finish(samples, 1)
    rows = {row.source: row.failed for row in samples.report(60).pairs}
    assert len(rows) == MAX_KEYS + 1
    assert rows[OTHERS] == 30
    assert rows["e0"] == 2


def test_pulls_are_counted_by_their_peer() -> None:
    samples = started()
    for peer in ("tcp://a:1", "tcp://b:1", "tcp://b:1"):
        samples.add(failed(Code.TRANSPORT, peer=Endpoint(peer)))
        samples.add(record(peer=Endpoint("tcp://a:1"), bytes=10))
    finish(samples, 1)
    first, second = samples.report(60).peers
    assert (first.peer, first.failed, first.delivered, first.last_code) == ("tcp://b:1", 2, 0, "transport")
    assert (second.peer, second.failed, second.delivered, second.pulled_bytes) == ("tcp://a:1", 1, 3, 30)
    assert first.last_failed_at == WALL + 1
    assert samples.last_minute().worst_peer == "tcp://b:1"


def test_the_worst_peer_is_one_with_the_worst_code() -> None:
    """The remedy joins both: a command about a peer that failed otherwise would lead astray."""
    samples = started()
    for peer, code, count in (("a", Code.DEADLINE, 2), ("b", Code.DEADLINE, 3), ("c", Code.NOT_ALLOWED, 4)):
        for _ in range(count):
            samples.add(failed(code, peer=Endpoint(f"tcp://{peer}:1")))
    finish(samples, 1)
    found = samples.last_minute()
    assert (found.worst_code, found.worst_peer) == (Code.DEADLINE, "tcp://b:1")


def test_a_row_is_free_again_after_a_quarter_of_an_hour() -> None:
    samples = started()
    for number in range(MAX_KEYS):
        samples.add(failed(source=EngineId(f"e{number}")))
    finish(samples, 1)
    finish(samples, 1 + RING_S + 20)
    samples.add(record(source=EngineId("new")))
    finish(samples, 2 + RING_S + 20)
    (row,) = samples.report(900).pairs
    assert (row.source, row.delivered, row.failed, row.last_code) == ("new", 1, 0, "")


def test_absurd_sizes_are_no_error() -> None:
    samples = started()
    for second in range(1, RING_S + 1):
        for num_bytes in (1 << 63, -5, 1 << 80):
            samples.add(record(bytes=num_bytes))
            samples.add_served(num_bytes)
        finish(samples, second)
    found = samples.report(900)
    assert min(value for value in found.columns.pulled_bytes if value is not None) > 0
    assert msgspec.convert(msgspec.to_builtins(found), SampleReport) == found


@pytest.mark.parametrize("share", [0.5, 0.99])
@given(st.lists(st.floats(1e-6, 200.0), min_size=1, max_size=200))
def test_percentiles_are_close(share: float, times_s: list[float]) -> None:
    samples = started()
    for total_s in times_s:
        samples.add(record(total_s=total_s))
    finish(samples, 1)
    found = samples.last_minute()
    value = found.p50_s if share == 0.5 else found.p99_s
    assert value is not None
    truth = sorted(times_s)[math.ceil(share * len(times_s)) - 1]
    assert truth / 1.2 - 100e-6 <= value <= truth * 1.2 + 100e-6


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_no_pull_is_lost_or_counted_twice(steps: list[tuple[int, int, int]]) -> None:
    samples, now, delivered, bad = started(), 0, Counter[int](), Counter[int]()
    for pause, num_delivered, num_failed in steps:
        for _ in range(num_delivered):
            samples.add(record())
        for _ in range(num_failed):
            samples.add(failed())
        now += pause
        if pause:
            finish(samples, now)
            delivered[now], bad[now] = num_delivered + delivered[-1], num_failed + bad[-1]
            delivered[-1] = bad[-1] = 0
        else:
            delivered[-1] += num_delivered
            bad[-1] += num_failed
    found = samples.report(900)
    first = max(now - RING_S, 0)
    assert [value or 0 for value in found.columns.delivered] == [
        delivered[second] for second in range(first + 1, now + 1)
    ]
    assert [value or 0 for value in found.columns.failed] == [
        bad[second] for second in range(first + 1, now + 1)
    ]
    spans = [span for span in found.columns.span_s if span is not None]
    assert sum(spans) >= min(now, RING_S)


# --- the timer that takes samples, on a loop whose time is virtual


async def sample_with_a_late_second(samples: Samples, loop: VirtualTimeLoop) -> None:
    num_reads = 0

    def read_gauges() -> Gauges:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 1:
            raise ValueError("a gauge that cannot be read")
        return Gauges(running_pulls=num_reads)

    sampler = Sampler(samples, read_gauges, loop.time)
    sampler.start()
    await asyncio.sleep(3)
    samples.add(pull_record())
    loop.now += 2.5  # the loop does nothing meanwhile
    await asyncio.sleep(3)
    sampler.stop()
    before = num_reads
    await asyncio.sleep(3)
    assert num_reads == before


def test_a_late_loop_leaves_a_gap_and_an_error_ends_no_sampling() -> None:
    samples = Samples()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        runner.run(sample_with_a_late_second(samples, loop))
    columns = samples.report(900).columns
    assert columns.span_s == [None, 2, 1, None, None, 3, 1, 1, 1]
    assert columns.running_pulls == [None, 2, 3, None, None, 4, 5, 6, 7]
    assert columns.delivered == [None, 0, 0, None, None, 1, 0, 0, 0]
