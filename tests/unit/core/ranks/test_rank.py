"""The table of a local rank's moves: what is not in it is a bug."""

from __future__ import annotations

import pytest

from kvxferd.core.ranks.rank import TRANSITIONS, WITH_MOVER, RankState, RankTrigger
from tests.support.simulation import World, spec_of


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
