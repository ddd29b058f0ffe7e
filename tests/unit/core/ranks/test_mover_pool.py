"""The pool's decisions, event by event: nothing waits for ever, and nothing is kept of what is gone."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvxferd.core import Settings
from kvxferd.core import effects as fx
from kvxferd.core.context import NodeContext
from kvxferd.core.ranks.mover_pool import (
    FORK_RETRY_DELAYS_S,
    REFILL_DELAY_S,
    RESIDENT_START_TIMEOUT_S,
    RESTART_DELAYS_S,
    START_TIMEOUT_S,
    MoverPool,
)
from kvxferd.core.ranks.movers import Mover, Movers
from kvxferd.errors import Code
from kvxferd.ids import AgentName, BootId, Endpoint, MoverId, SessionId
from kvxferd.wire.common import Refusal
from kvxferd.wire.mover import MoverLeaving, MoverUp, Polling

ONE, TWO, THREE = MoverId(1), MoverId(2), MoverId(3)
FULL = Refusal(Code.MOVER_LOST, "full")


class Pool:
    """A pool under a clock that the test moves. It is checked after each call."""

    def __init__(self, size: int = 0, library: bool = True) -> None:
        self.context = NodeContext(
            boot=BootId("boot"),
            endpoint=Endpoint("tcp://here:1"),
            settings=Settings(mover_pool_size=size),
            new_token=map("{:032x}".format, itertools.count()).__next__,
        )
        self.movers = Movers(self.context, lambda mover: None, lambda mover: False)
        self.is_busy = False
        self.assigned: dict[int, Mover] = {}  # by session; `refused` too
        self.refused: dict[int, Code] = {}
        self.pool = MoverPool(self.context, self.movers, lambda: self.is_busy, self._assign, self._refuse)
        if library:
            self.call(self.pool.forkserver_ready, "nixl")

    def _assign(self, mover: Mover, library: str) -> None:
        self.movers.add(mover)
        assert mover.session not in self.assigned.keys() | self.refused.keys()
        self.assigned[mover.session] = mover

    def _refuse(self, session: SessionId, refusal: Refusal) -> None:
        assert session not in self.assigned.keys() | self.refused.keys()
        self.refused[session] = refusal.code

    def call(self, method: Callable[..., None], *arguments: object) -> list[fx.Effect]:
        """Call a method of the pool; return the effects."""
        method(*arguments)
        self.context.run_due(100)
        self.pool.check_integrity()
        return self.context.pop_effects()

    def request(self, session: int) -> list[fx.Effect]:
        return self.call(self.pool.request, SessionId(session))

    def wait(self, seconds: float) -> list[fx.Effect]:
        """Let time pass; return what the timers do."""
        self.context.now += seconds
        return self.call(lambda: None)

    def get_ready(self, mover: MoverId, agent: str = "") -> list[fx.Effect]:
        """Have a mover report its agent."""
        up = MoverUp(pid=1, agent=AgentName(agent or f"boot/{mover}"), library="nixl")
        return self.call(self.pool.handle, mover, up)


def forks(effects: list[fx.Effect]) -> list[MoverId]:
    assert all(isinstance(effect, fx.ForkMover) for effect in effects)
    return [effect.mover for effect in effects if isinstance(effect, fx.ForkMover)]


def test_a_request_forks_and_gets_what_is_forked() -> None:
    pool = Pool()
    (fork,) = pool.request(7)
    assert isinstance(fork, fx.ForkMover)
    assert pool.request(7) == [], "a session has one request at a time"
    assert pool.get_ready(ONE, fork.agent) == []
    assert (pool.assigned[7].mover_id, pool.assigned[7].agent) == (ONE, fork.agent)


def test_ready_movers_are_assigned_in_order_and_replaced_after_a_delay_unless_busy() -> None:
    pool = Pool(size=2)
    pool.get_ready(TWO)
    pool.get_ready(ONE)
    assert pool.request(1) == pool.request(2) == []
    assert [pool.assigned[number].mover_id for number in (1, 2)] == [TWO, ONE]
    assert forks(pool.wait(REFILL_DELAY_S)) == [THREE, MoverId(4)]
    pool.get_ready(THREE)
    pool.is_busy = True
    pool.request(3)
    assert pool.wait(REFILL_DELAY_S) == []
    pool.is_busy = False
    assert len(forks(pool.wait(REFILL_DELAY_S))) == 1


def test_a_mover_that_makes_no_agent_in_time_is_killed_and_its_request_refused() -> None:
    pool = Pool()
    pool.request(7)
    assert pool.wait(START_TIMEOUT_S) == [fx.KillMover(ONE)]
    assert pool.refused == {7: Code.MOVER_LOST}
    # It is stopped no more, and reports before it dies.
    assert pool.get_ready(ONE) == []
    assert forks(pool.request(8)) == [TWO]
    assert pool.call(pool.pool.mover_died, ONE) == []
    pool.get_ready(TWO)
    assert pool.assigned[8].mover_id == TWO


def test_a_library_that_never_loads_lets_nobody_wait_for_ever() -> None:
    pool = Pool(library=False)
    assert pool.request(1) == []
    pool.wait(START_TIMEOUT_S)
    assert pool.refused == {1: Code.MOVER_LOST}


def test_a_forkserver_that_dies_takes_its_movers_and_refuses_what_waits() -> None:
    pool = Pool(size=1)
    pool.get_ready(ONE)
    pool.request(1)
    pool.request(2)
    assert pool.call(pool.pool.forkserver_exited, "it died") == [fx.KillMover(TWO), fx.KillMover(THREE)]
    assert pool.refused == {2: Code.MOVER_LOST}
    # The late exit of an old mover costs no request that waits for the next forkserver.
    assert pool.request(3) == []
    assert pool.call(pool.pool.mover_died, TWO) == []
    assert pool.wait(RESTART_DELAYS_S[0]) == [fx.StartForkserver()]
    pool.get_ready(forks(pool.call(pool.pool.forkserver_ready, "nixl"))[0])
    assert 3 in pool.assigned


def test_a_ready_mover_that_dies_or_whose_forkserver_died_is_not_assigned() -> None:
    pool = Pool(size=2)
    pool.get_ready(ONE)
    pool.get_ready(TWO)
    pool.call(pool.pool.mover_died, ONE)
    assert pool.call(pool.pool.forkserver_exited, "it died") == [fx.KillMover(TWO)]
    assert pool.request(1) == []
    assert not pool.assigned


def test_restarts_are_delayed_longer_until_a_mover_gets_ready() -> None:
    pool = Pool()
    for delay in (*RESTART_DELAYS_S, RESTART_DELAYS_S[-1]):
        pool.call(pool.pool.forkserver_exited, "it died")
        assert pool.wait(delay * 0.99) == []
        assert pool.wait(delay * 0.02) == [fx.StartForkserver()]
        pool.call(pool.pool.forkserver_ready, "nixl")  # it dies with the first fork
    pool.request(1)
    pool.get_ready(ONE)
    pool.call(pool.pool.forkserver_exited, "it died")
    assert pool.wait(RESTART_DELAYS_S[0]) == [fx.StartForkserver()]


def test_forks_that_fail_are_tried_later_each_time_later() -> None:
    pool = Pool(size=1)
    mover = ONE
    for delay in (*FORK_RETRY_DELAYS_S, FORK_RETRY_DELAYS_S[-1]):
        assert pool.call(pool.pool.not_started, mover, FULL) == []
        assert pool.wait(delay * 0.99) == []
        (mover,) = forks(pool.wait(delay * 0.02))


def test_a_failed_fork_refuses_a_request_only_where_no_other_mover_is_on_its_way() -> None:
    pool = Pool(size=1)
    pool.request(1)  # the second fork, beside the one that is kept ready
    pool.call(pool.pool.not_started, ONE, FULL)
    assert not pool.refused
    pool.call(pool.pool.mover_died, TWO)
    assert pool.refused == {1: Code.MOVER_LOST}


def test_without_a_library_every_request_is_refused_and_nothing_is_restarted() -> None:
    pool = Pool(library=False)
    pool.request(1)
    pool.call(pool.pool.library_unavailable, "none")
    pool.request(2)
    assert pool.refused == {1: Code.NIXL_UNAVAILABLE, 2: Code.NIXL_UNAVAILABLE}
    assert pool.call(pool.pool.forkserver_exited, "it died") == []
    assert pool.context.next_deadline() is None


@pytest.mark.parametrize(
    ("agent", "code"),
    [
        ("boot/free", None),
        ("boot/used", Code.OUT_OF_PLACE),  # peers would read it in place of another
        ("elsewhere/free", Code.OUT_OF_PLACE),
        ("boot/" + 500 * "a", Code.OUT_OF_PLACE),
        (MoverLeaving(code=Code.NIXL_UNAVAILABLE, message="none"), Code.NIXL_UNAVAILABLE),
        (FULL, Code.MOVER_LOST),  # it was not accepted
        ("dies", Code.MOVER_LOST),
        ("late", Code.MOVER_LOST),
    ],
)
def test_a_resident_mover_is_assigned_with_an_agent_of_its_own_in_time(
    agent: str | MoverLeaving | Refusal, code: Code | None
) -> None:
    pool = Pool()
    pool.movers.add(Mover(MoverId(9), SessionId(9), AgentName("boot/used")))
    assert pool.call(pool.pool.request_resident, SessionId(1)) == [fx.AcceptResidentMover(ONE, SessionId(1))]
    assert pool.call(pool.pool.handle, ONE, Polling(token=1)) == []
    if isinstance(agent, Refusal):
        effects = pool.call(pool.pool.not_started, ONE, agent)
    elif isinstance(agent, MoverLeaving):
        effects = pool.call(pool.pool.handle, ONE, agent)
    elif agent == "dies":
        effects = pool.call(pool.pool.mover_died, ONE)
    elif agent == "late":
        effects = pool.wait(RESIDENT_START_TIMEOUT_S)
    else:
        effects = pool.get_ready(ONE, agent)
    if code is None:
        assert (effects, pool.assigned[1].resident) == ([], True)
    else:
        assert (effects, pool.refused) == ([fx.KillMover(ONE)], {1: code})
    assert pool.wait(RESIDENT_START_TIMEOUT_S) == []
