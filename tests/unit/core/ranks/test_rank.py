"""The tables: what a rank may become, and what a connection may send as what it has registered as."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.core.ranks.rank import TRANSITIONS, RankState, RankTrigger
from kvxferd.core.ranks.session import ACCESS, Access, SessionState
from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from kvxferd.wire.common import TransferRef
from tests.support.simulation import IDS, TOKENS, World, spec_of


def test_memory_is_resumed_only_once_no_mover_can_reach_it(world: World) -> None:
    host = world.host("p")
    ready = host.node.sessions[world.register(host, spec_of("e")).session].rank
    assert ready is not None
    with pytest.raises(KeyError):
        ready.move(RankTrigger.RESUME)
    assert [state for state, trigger in TRANSITIONS if trigger is RankTrigger.RESUME] == [RankState.SUSPENDED]
    into = [move for move, state in TRANSITIONS.items() if state is RankState.SUSPENDED]
    assert into == [(RankState.SUSPENDING, RankTrigger.MOVERS_DEAD)]


REF = TransferRef("tcp://p:9441", "e", "g1", "t", "n")


def test_before_hello_nothing_else_may_be_sent() -> None:
    first = {message: row[SessionState.CONNECTED] for message, row in ACCESS.items()}
    assert first.pop(wk.Hello) is Access.HANDLE
    assert set(first.values()) == {Access.BREAK}


@pytest.mark.parametrize("attaches", [False, True])
@pytest.mark.parametrize("message", [wk.Cancel(ticket=1), wk.Abandon(ref=REF), wk.Suspend()])
def test_what_only_a_rank_sends_costs_another_its_connection(world: World, attaches, message) -> None:
    host = world.host("p")
    rank, other = world.register(host, spec_of("e")), world.connect(host)
    if attaches:
        other.say(wk.Attach(request=1, engine_id="e", generation="g1"))
    other.say(message)
    (farewell,) = other.received(wk.Farewell)
    assert farewell.code is Code.OUT_OF_PLACE
    assert "not a rank" in farewell.message or "neither a rank" in farewell.message
    assert not other.connected
    rank.publish("t", IDS, TOKENS)
    assert not rank.received(wk.PublishRefused)


def test_a_request_of_a_session_that_is_no_rank_is_refused_and_ends_nothing(world: World) -> None:
    other = world.attach(world.host("p"), spec_of("e"))
    ticket = other.pull(REF, IDS, TOKENS)
    other.say(wk.Resume(request=2, regions=(), incarnation="i"))
    assert (other.ended(ticket).code, other.ended(ticket).safe_to_reuse) == (Code.OUT_OF_PLACE, True)
    assert [(m.request, m.code) for m in other.received(wk.Refused)] == [(2, Code.OUT_OF_PLACE)]
    assert other.connected


def test_a_rank_wakes_with_all_regions_of_its_layout_and_with_none_of_them_changed(world: World) -> None:
    rank = world.register(world.host("p"), spec_of("e"))
    rank.say(wk.Suspend())
    assert rank.received(wk.Suspended)
    (export,) = rank.exports()
    for number, regions in enumerate([(), (msgspec.structs.replace(export, size_bytes=1),)]):
        rank.say(wk.Resume(request=2 + number, regions=regions, incarnation="second"))
    assert [m.code for m in rank.received(wk.Refused)] == [Code.REGION_INVALID] * 2
    num_registered = len(rank.received(wk.Registered))
    rank.resume(request=4)
    assert len(rank.received(wk.Registered)) == num_registered + 1


def test_an_acknowledgement_behind_a_refused_registration_ends_nothing(world: World) -> None:
    host = world.host("p")
    worker = world.connect(host)
    worker.spec = spec_of("e")
    worker.say(wk.MoverAcknowledged(number=1))
    assert worker.connected
