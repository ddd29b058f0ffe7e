"""What movers find out of their memory and connections is on the rank, and told once."""

from __future__ import annotations

import pytest

from kvxferd.core.events import MoverMessage
from kvxferd.records import PlacementRecord, RankSnapshot, TransportsRecord
from kvxferd.ucx_log import TransportsUsed
from kvxferd.wire.common import MeasuredPlacement
from kvxferd.wire.mover import ProbeResult, TransportsSeen
from tests.support.simulation import Mover, Worker, World, mover_of, spec_of

ITSELF = TransportsUsed("itself", ("tcp/lo", "cma/memory"))


@pytest.fixture
def worker() -> Worker:
    world = World()
    return world.register(world.host("p"), spec_of("e"))


def rank(worker: Worker) -> RankSnapshot:
    ((shown,),) = [engine.ranks for engine in worker.host.node.snapshot().engines]
    return shown


def report(worker: Worker, *found: MeasuredPlacement | TransportsUsed, by: Mover | None = None) -> None:
    """Have a mover, the present one unless another is named, report what it found."""
    mover = by or mover_of(worker)
    for one in found:
        message = (
            ProbeResult(placement=one)
            if isinstance(one, MeasuredPlacement)
            else TransportsSeen(
                reach=one.reach, transports=one.transports, is_fully_parsed=one.is_fully_parsed
            )
        )
        worker.host.feed(MoverMessage(mover.mover, message))


def records(worker: Worker, kind: type) -> list:
    return [record for record in worker.host.records if isinstance(record, kind)]


def test_a_proof_is_told_with_the_lanes_that_its_mover_has_to_itself(worker):
    report(worker, ITSELF, MeasuredPlacement(gigabytes_per_s=4.5))
    found = rank(worker).placement
    assert found is not None
    assert (found.proved, found.lanes, found.gigabytes_per_s) == (True, "cma", 4.5)
    (record,) = records(worker, PlacementRecord)
    assert (record.placement, record.lanes, record.proved) == ("direct", "cma", True)


def test_tcp_to_a_process_of_this_node_is_slow_where_the_mover_could_do_better(worker):
    report(
        worker,
        ITSELF,
        TransportsUsed("network", ("tcp/eth0",)),
        TransportsUsed("node", ("tcp/lo", "cma/memory")),
        TransportsUsed("node", ("tcp/lo", "tcp/eth0")),
    )
    assert [(r.reach, r.lanes, r.slow) for r in records(worker, TransportsRecord)] == [
        ("network", "tcp", False),
        ("node", "cma", False),
        ("node", "tcp", True),
    ]
    assert [lanes.slow for lanes in rank(worker).lanes] == [False, False, False, True]


def test_another_mover_starts_with_nothing_known_and_what_the_dead_one_says_is_void(worker):
    report(worker, ITSELF, MeasuredPlacement(gigabytes_per_s=4.5))
    dead = mover_of(worker)
    dead.die()
    worker.world.advance(5.0)
    report(worker, ITSELF, MeasuredPlacement(gigabytes_per_s=9.0), by=dead)
    found = rank(worker).placement
    assert found is not None
    assert (found.proved, found.lanes, rank(worker).lanes) == (False, "", ())
    assert len(records(worker, PlacementRecord)) == 1


def test_a_resident_movers_transports_are_not_believed(worker):
    found = worker.host.node.movers.get(mover_of(worker).mover)
    assert found is not None
    found.resident = True
    report(worker, ITSELF)
    assert rank(worker).lanes == ()


def test_what_the_kernel_counted_wins_over_what_the_library_says(worker):
    report(worker, ITSELF, MeasuredPlacement(lanes="tcp", gigabytes_per_s=0.9))
    assert records(worker, PlacementRecord)[0].lanes == "tcp"
