"""What movers find out of their memory and connections is on the rank, and told once."""

from __future__ import annotations

import pytest

from kvxferd.core.events import MoverMessage
from kvxferd.records import PlacementRecord, RankSnapshot, TransportsRecord
from kvxferd.ucx_log import TransportsUsed
from kvxferd.wire.common import MeasuredPlacement
from kvxferd.wire.mover import ProbeResult, TransportsSeen
from tests.support.simulation import Worker, World, mover_of, spec_of

ITSELF = TransportsUsed("itself", ("tcp/lo", "cma/memory"))


@pytest.fixture
def worker() -> Worker:
    world = World()
    return world.register(world.host("p"), spec_of("e"))


def rank(worker: Worker) -> RankSnapshot:
    ((shown,),) = [engine.ranks for engine in worker.host.node.snapshot().engines]
    return shown


def prove(worker: Worker, placement: MeasuredPlacement) -> None:
    worker.world.feed(worker.host, MoverMessage(mover_of(worker).mover, ProbeResult(placement=placement)))


def seen(lanes: TransportsUsed) -> TransportsSeen:
    return TransportsSeen(
        reach=lanes.reach, transports=lanes.transports, is_fully_parsed=lanes.is_fully_parsed
    )


def connect(worker: Worker, lanes: TransportsUsed) -> None:
    worker.world.feed(worker.host, MoverMessage(mover_of(worker).mover, seen(lanes)))


def records(worker: Worker, kind: type) -> list:
    return [record for record in worker.host.records if isinstance(record, kind)]


def test_a_proof_is_told_with_the_lanes_that_its_mover_has_to_itself(worker):
    connect(worker, ITSELF)
    prove(worker, MeasuredPlacement(gigabytes_per_s=4.5))
    found = rank(worker).placement
    assert found is not None
    assert (found.proved, found.lanes, found.gigabytes_per_s) == (True, "cma", 4.5)
    (record,) = records(worker, PlacementRecord)
    assert (record.placement, record.lanes, record.proved) == ("direct", "cma", True)


def test_tcp_to_a_process_of_this_node_is_slow_where_the_mover_could_do_better(worker):
    connect(worker, ITSELF)
    connect(worker, TransportsUsed("network", ("tcp/eth0",)))
    connect(worker, TransportsUsed("node", ("tcp/lo", "cma/memory")))
    connect(worker, TransportsUsed("node", ("tcp/lo", "tcp/eth0")))
    assert [(r.reach, r.lanes, r.slow) for r in records(worker, TransportsRecord)] == [
        ("network", "tcp", False),
        ("node", "cma", False),
        ("node", "tcp", True),
    ]
    assert [lanes.slow for lanes in rank(worker).lanes] == [False, False, False, True]


def test_another_mover_starts_with_nothing_known(worker):
    connect(worker, ITSELF)
    prove(worker, MeasuredPlacement(gigabytes_per_s=4.5))
    mover_of(worker).die()
    worker.world.advance(5.0)
    found = rank(worker).placement
    assert found is not None
    assert (found.proved, found.lanes, rank(worker).lanes) == (False, "", ())


def test_a_resident_movers_transports_are_not_believed(worker):
    found = worker.host.node.movers.get(mover_of(worker).mover)
    assert found is not None
    found.resident = True
    connect(worker, ITSELF)
    assert rank(worker).lanes == ()


def test_what_a_dead_mover_found_is_void(worker):
    number = mover_of(worker).mover
    mover_of(worker).die()
    worker.world.settle()
    worker.world.feed(
        worker.host, MoverMessage(number, ProbeResult(placement=MeasuredPlacement(gigabytes_per_s=9.0)))
    )
    worker.world.feed(worker.host, MoverMessage(number, seen(ITSELF)))
    assert rank(worker).lanes == ()
    assert records(worker, PlacementRecord) == []


def test_what_the_kernel_counted_wins_over_what_the_library_says(worker):
    connect(worker, ITSELF)
    prove(worker, MeasuredPlacement(lanes="tcp", gigabytes_per_s=0.9))
    assert records(worker, PlacementRecord)[0].lanes == "tcp"
