"""Slow peers and mispredicted reads: found by both numbers, and not by load alone."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.core.snapshot import PullRecord
from kvxferd.ids import Endpoint
from kvxferd.telemetry.warnings.read_speed import (
    ADOPT_S,
    MAX_PEERS,
    MIN_SAMPLES,
    NUM_SAMPLES,
    RECENT_S,
    MispredictedReads,
    SlowPeers,
)
from tests.support.node_samples import pull_record

GB = 1e9
OWN = Endpoint("tcp://10.0.0.1:9441")
FAST = [Endpoint(f"tcp://10.0.0.{n}:9441") for n in (2, 3, 4)]
SLOW = Endpoint("tcp://10.0.0.9:9441")


def a_pull(peer: Endpoint, ended: float, wire_s: float, num_bytes: int, **changes: object) -> PullRecord:
    record = pull_record("delivered")
    return msgspec.structs.replace(
        record,
        peer=peer,
        bytes=num_bytes,
        runs=1,
        ways={"direct": num_bytes},
        phases_s={"wire": wire_s},
        ended_at=ended,
        **changes,
    )


class Traffic:
    """Pulls one after another, or several at a time, from peers of a given speed."""

    def __init__(self) -> None:
        self.slow_peers = SlowPeers(OWN)
        self.now = 1000.0

    def read(
        self, peer: Endpoint, speed: float, num: int, at_a_time: int = 1, num_bytes: int = 8 << 20
    ) -> None:
        wire_s = num_bytes * at_a_time / speed
        for _ in range(num // at_a_time):
            self.now += wire_s
            for _ in range(at_a_time):
                self.slow_peers.record(a_pull(peer, self.now, wire_s, num_bytes), self.now)
            self.slow_peers.findings(self.now)

    def slow(self) -> list[str]:
        return [finding.subject for finding in self.slow_peers.findings(self.now)]


def test_a_peer_far_below_the_others_is_named_and_ends_when_it_is_not() -> None:
    traffic = Traffic()
    for peer in FAST:
        traffic.read(peer, 10 * GB, NUM_SAMPLES)
    traffic.read(SLOW, 2 * GB, NUM_SAMPLES)
    (finding,) = traffic.slow_peers.findings(traffic.now)
    assert finding.subject == SLOW
    assert "2 GB/s, and from other peers they are 10 GB/s" in finding.message
    traffic.read(SLOW, 4 * GB, NUM_SAMPLES)
    assert traffic.slow() == [SLOW]  # better, and not yet above a half
    traffic.read(SLOW, 6 * GB, NUM_SAMPLES)
    assert traffic.slow() == []


def test_a_peer_below_its_own_past_is_named_though_it_is_the_only_one() -> None:
    traffic = Traffic()
    traffic.read(SLOW, 10 * GB, 6 * NUM_SAMPLES)
    assert traffic.slow() == []
    traffic.read(SLOW, 1 * GB, NUM_SAMPLES)
    (finding,) = traffic.slow_peers.findings(traffic.now)
    assert "1 GB/s, and from it they were 10 GB/s before" in finding.message


@pytest.mark.parametrize("at_a_time", [4, 16])
def test_more_or_fewer_pulls_at_a_time_are_not_a_slow_peer(at_a_time: int) -> None:
    busier = Traffic()
    busier.read(SLOW, 10 * GB, 6 * NUM_SAMPLES)
    busier.read(SLOW, 10 * GB, 2 * NUM_SAMPLES, at_a_time)
    assert busier.slow() == []
    quieter = Traffic()
    # Each alone reads at 1 GB/s: several movers together reach more.
    quieter.read(SLOW, at_a_time * GB, 6 * NUM_SAMPLES, at_a_time)
    quieter.read(SLOW, 1 * GB, 2 * NUM_SAMPLES)
    assert quieter.slow() == []


def test_a_single_stall_is_not_a_slow_peer() -> None:
    traffic = Traffic()
    traffic.read(SLOW, 10 * GB, 6 * NUM_SAMPLES)
    traffic.read(SLOW, 0.001 * GB, 1)
    assert traffic.slow() == []


def test_small_pulls_short_runs_and_too_few_pulls_do_not_count() -> None:
    traffic = Traffic()
    traffic.read(SLOW, 10 * GB, 6 * NUM_SAMPLES)
    traffic.read(SLOW, 0.1 * GB, NUM_SAMPLES, num_bytes=(1 << 20) - 1)
    short_runs = a_pull(SLOW, traffic.now, 10.0, 8 << 20)
    for _ in range(NUM_SAMPLES):
        traffic.slow_peers.record(msgspec.structs.replace(short_runs, runs=1 << 20), traffic.now)
        traffic.slow_peers.record(msgspec.structs.replace(short_runs, outcome="failed"), traffic.now)
    assert traffic.slow() == []
    few = Traffic()
    for peer in FAST:
        few.read(peer, 10 * GB, NUM_SAMPLES)
    few.read(SLOW, 1 * GB, MIN_SAMPLES - 1)
    assert few.slow() == []


def test_a_node_s_reads_from_itself_are_no_measure_of_the_network() -> None:
    traffic = Traffic()
    traffic.read(OWN, 100 * GB, NUM_SAMPLES)
    traffic.read(FAST[0], 10 * GB, NUM_SAMPLES)
    traffic.read(SLOW, 10 * GB, NUM_SAMPLES)
    assert traffic.slow() == []


def test_it_ends_without_traffic_and_what_stays_slow_becomes_usual() -> None:
    traffic = Traffic()
    traffic.read(SLOW, 10 * GB, 6 * NUM_SAMPLES)
    traffic.read(SLOW, 1 * GB, NUM_SAMPLES)
    assert traffic.slow() == [SLOW]
    traffic.now += RECENT_S + 1
    assert traffic.slow() == []
    traffic.read(SLOW, 1 * GB, NUM_SAMPLES)
    assert traffic.slow() == [SLOW]
    for _ in range(int(ADOPT_S / 200) + 2):
        traffic.now += 200
        traffic.read(SLOW, 1 * GB, NUM_SAMPLES)
    assert traffic.slow() == []


def test_peers_are_bounded() -> None:
    slow_peers = SlowPeers(OWN)
    for number in range(3 * MAX_PEERS):
        slow_peers.record(a_pull(Endpoint(f"tcp://{number}:1"), 1.0, 1.0, 8 << 20), 1.0)
    assert len(slow_peers._peers) == MAX_PEERS


@given(
    st.lists(
        st.tuples(st.sampled_from([*FAST, SLOW, OWN]), st.floats(0.0, 100.0), st.integers(0, 1 << 30)),
        max_size=200,
    )
)
def test_no_record_breaks_it(pulls: list[tuple[Endpoint, float, int]]) -> None:
    slow_peers, mispredicted, now = SlowPeers(OWN), MispredictedReads(), 0.0
    for peer, wire_s, num_bytes in pulls:
        now += 1.0
        record = a_pull(peer, now, wire_s, num_bytes, predicted_s=wire_s / 3)
        for check in (slow_peers, mispredicted):
            check.record(record, now)
            check.findings(now)


def predicted(ratio: float, at_a_time: int = 1) -> MispredictedReads:
    reads, now = MispredictedReads(), 0.0
    for _ in range(NUM_SAMPLES):
        now += ratio * 0.01 * at_a_time
        for _ in range(at_a_time):
            record = a_pull(SLOW, now, ratio * 0.01 * at_a_time, 8 << 20, predicted_s=0.01)
            reads.record(record, now)
    return reads


def test_reads_that_take_far_longer_than_predicted_are_named() -> None:
    (finding,) = predicted(6.0).findings(2.0)
    assert "6.0 times as long as predicted" in finding.message
    assert predicted(2.0).findings(2.0) == []
    assert predicted(6.0).findings(2.0 + RECENT_S) == []


def test_several_pulls_at_a_time_share_the_link_and_are_not_mispredicted() -> None:
    assert predicted(1.0, at_a_time=8).findings(3.0) == []
