"""The table of a local rank's moves: what is not in it is a bug."""

from __future__ import annotations

from typing import get_args

import pytest

from kvxferd.core.ranks.rank import TRANSITIONS, WITH_MOVER, RankState, RankTrigger
from kvxferd.core.ranks.session import ACCESS, Access, SessionState
from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from kvxferd.wire.common import TransferRef
from tests.support.simulation import IDS, TOKENS, World, spec_of


@pytest.fixture
def rank(world: World):
    host = world.host("p")
    return host.node.sessions[world.register(host, spec_of("e")).session].rank


@pytest.mark.parametrize("trigger", [RankTrigger.RESUME, RankTrigger.MOVERS_DEAD, RankTrigger.OFFER])
def test_a_move_that_is_not_in_the_table_raises_and_changes_nothing(rank, trigger) -> None:
    mover = rank.mover
    with pytest.raises(KeyError):
        rank.move(trigger)
    assert (rank.state, rank.mover) == (RankState.READY, mover)


@pytest.mark.parametrize("trigger", [RankTrigger.MOVER_LEFT, RankTrigger.SUSPEND, RankTrigger.CLOSE])
def test_a_rank_without_a_mover_names_none(rank, trigger) -> None:
    rank.move(trigger)
    assert rank.state not in WITH_MOVER
    assert (rank.mover, rank.agent) == (None, None)


def test_memory_is_resumed_only_once_no_mover_can_reach_it() -> None:
    assert [state for state, trigger in TRANSITIONS if trigger is RankTrigger.RESUME] == [RankState.SUSPENDED]
    into = [move for move, state in TRANSITIONS.items() if state is RankState.SUSPENDED]
    assert into == [(RankState.SUSPENDING, RankTrigger.MOVERS_DEAD)]


def test_nothing_happens_to_a_rank_that_is_gone() -> None:
    assert RankState.GONE not in {state for state, _ in TRANSITIONS}
    assert {state for state, trigger in TRANSITIONS if trigger is RankTrigger.CLOSE} == {*RankState} - {
        RankState.GONE
    }


# --- what a connection may send as what it has registered as: a table


REF = TransferRef("tcp://p:9441", "e", "g1", "t", "n")
WITH_REPLY = {wk.Register, wk.Attach, wk.Resume, wk.Publish, wk.PullRequest}


def test_each_message_has_a_row() -> None:
    assert set(ACCESS) == set(get_args(wk.ClientMessage))


def test_what_is_refused_has_a_reply() -> None:
    assert {message for message, row in ACCESS.items() if Access.REFUSE in row} == WITH_REPLY


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


def test_an_acknowledgement_behind_a_refused_registration_ends_nothing(world: World) -> None:
    host = world.host("p")
    worker = world.connect(host)
    worker.spec = spec_of("e")
    worker.say(wk.MoverAcknowledged(number=1))
    assert worker.connected
