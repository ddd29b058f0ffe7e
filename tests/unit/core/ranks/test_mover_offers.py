"""A mover gets neither memory nor pulls before its worker watches it."""

from __future__ import annotations

import pytest

from kvxferd.core import Settings
from kvxferd.core.ranks.local_ranks import MAX_UNACKNOWLEDGED, OFFER_RETRY_S, OFFER_TIMEOUT_S
from kvxferd.errors import Code
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.mover import DevicePlacement, ReadWay
from tests.support.simulation import Worker, World, mover_of, spec_of


@pytest.fixture
def silent(world: World) -> Worker:
    """A rank whose worker acknowledges nothing until the test does."""
    host = world.host("d")
    worker = world.connect(host)
    worker.acknowledges = False
    other = world.register(world.host("layouts"), spec_of("decode"))
    worker.spec, worker.layout, worker.memory = other.spec, other.layout, bytearray(len(other.memory))
    world.register_again(worker)
    return worker


def acknowledge(worker: Worker, number: int) -> None:
    worker.say(wk.MoverAcknowledged(number=number))


def offers(worker: Worker) -> list[int]:
    return [offer.number for offer in worker.received(wk.MoverOffered)]


def test_the_memory_is_given_once_the_worker_watches_the_mover(world, silent):
    assert offers(silent) == [1]
    assert silent.pidfds == [(wk.MoverOffered, mover_of(silent).mover)]
    assert not mover_of(silent).is_bound
    mover_of(silent).say(mv.Bound(regions=(), metadata=b""))  # of memory that it was not given
    assert not silent.received(wk.Registered)
    acknowledge(silent, 1)
    assert mover_of(silent).is_bound
    assert len(silent.received(wk.Registered)) == 1
    assert len(silent.pidfds) == 1  # with the offer alone


def test_an_acknowledgement_that_comes_twice_or_too_late_says_nothing_new(world, silent):
    first = mover_of(silent)
    first.die()
    world.advance(1)
    acknowledge(silent, 1)  # was on its way
    assert not mover_of(silent).is_bound
    acknowledge(silent, 2)
    acknowledge(silent, 2)
    acknowledge(silent, 1)
    assert len(silent.received(wk.Registered)) == 1
    assert silent.connected


@pytest.mark.parametrize("number", [0, -1, 2, 1 << 62])
def test_a_number_that_was_never_offered_costs_its_sender_the_connection(world, source, silent, number):
    acknowledge(silent, number)
    assert [m.code for m in silent.received(wk.Farewell)] == [Code.OUT_OF_PLACE]
    assert not silent.connected
    assert source.connected


def test_a_mover_that_is_not_acknowledged_is_replaced_and_then_the_session_ends(world, silent):
    for number in range(1, MAX_UNACKNOWLEDGED + 1):
        assert offers(silent)[-1] == number
        assert silent.connected
        world.advance(OFFER_TIMEOUT_S + 1)
    assert [m.code for m in silent.received(wk.Farewell)] == [Code.DEADLINE]
    assert not silent.connected
    assert not [m for m in silent.host.movers.values() if m.alive and m.worker is silent]
    assert silent.host.node.next_deadline() is None


def test_a_pidfd_that_could_not_be_sent_is_sent_again(world):
    host = world.host("d")
    world.without_descriptors.add("d")
    worker = world.register(host, spec_of("decode"))
    world.advance(60)
    assert not worker.received(wk.MoverOffered)
    assert not mover_of(worker).is_bound
    assert len(host.movers) == 1  # it was not the worker that failed
    world.without_descriptors.clear()
    world.advance(OFFER_RETRY_S)
    assert offers(worker) == [1]
    assert len(worker.received(wk.Registered)) == 1


def test_a_mover_that_comes_once_its_rank_sleeps_gets_no_memory(world):
    host = world.host("d")
    host.give_movers = False
    worker = world.register(host, spec_of("decode"))
    worker.say(wk.Suspend())
    late = host.bring_mover()
    assert not late.alive
    assert not offers(worker)


def test_child_movers_alone_are_offered_and_get_the_settings_of_movers(world):
    world.settings = Settings(read_way=ReadWay.COVERING, device_placement=DevicePlacement.STAGED)
    worker = world.register(world.host("d"), spec_of("decode"))
    bind = mover_of(worker).bound_by
    assert (bind.read_way, bind.device_placement) == (ReadWay.COVERING, DevicePlacement.STAGED)
    worker.say(wk.Suspend())
    (region,) = worker.layout.regions
    export = wk.RegionExport(region.region, region.size_bytes, kind="resident", address=4096)
    worker.say(wk.Resume(request=2, regions=(export,), incarnation="second", placement="resident"))
    bind = mover_of(worker).bound_by
    assert (bind.read_way, bind.device_placement) == (ReadWay.DIRECT, DevicePlacement.DIRECT)
    assert offers(worker) == [1]  # of the child that it had
    assert [m.request for m in worker.received(wk.Registered)] == [1, 2]
