"""The pool's decisions, event by event: nothing waits for ever, and nothing is kept of what is gone."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from kvxferd.errors import Code
from kvxferd.ids import AgentName, MoverId
from kvxferd.mover.forkserver_protocol import Forked, ForkFailed, LibraryLoaded, LibraryUnavailable
from kvxferd.mover.supervisor import pool_effects as effects
from kvxferd.mover.supervisor import pool_events as events
from kvxferd.mover.supervisor.pool_decisions import (
    FORK_RETRY_DELAYS_S,
    REFILL_DELAY_S,
    RESTART_DELAYS_S,
    SHUTDOWN_S,
    START_TIMEOUT_S,
    PoolDecisions,
)
from kvxferd.wire.mover import MoverUp, Polling

ONE, TWO = MoverId(1), MoverId(2)


class Pool:
    """Decisions under a clock that the test moves; they are checked after each event."""

    def __init__(self, size: int = 0, library: bool = True) -> None:
        names = (AgentName(f"boot/{number}") for number in itertools.count(1))
        self.decisions = PoolDecisions(size=size, mover_ids=itertools.count(1), new_agent=names.__next__)
        self.now = 0.0
        assert self.feed(events.Started()) == [effects.StartForkserver()]
        if library:
            self.started = self.feed(LibraryLoaded(library="nixl"))

    def feed(self, event: events.PoolEvent) -> list[effects.PoolEffect]:
        out = self.decisions.feed(event, self.now)
        self.decisions.check_integrity()
        return out

    def wait(self, seconds: float) -> list[effects.PoolEffect]:
        """Let time pass; return what the timers do."""
        self.now += seconds
        return self.feed(events.TimersDue())

    def make_ready(self, mover: MoverId, pid: int = 0) -> list[effects.PoolEffect]:
        """Fork a mover that was requested, and have it make its agent."""
        self.feed(Forked(mover=mover, pid=pid or 100 + mover))
        return self.report_up(mover)

    def report_up(self, mover: MoverId) -> list[effects.PoolEffect]:
        up = MoverUp(pid=1, agent=AgentName(f"boot/{mover}"), library="nixl")
        return self.feed(events.MoverReported(mover, up))


def refusals(out: list[effects.PoolEffect]) -> list[tuple[int, Code]]:
    return [(one.request, one.error.code) for one in out if isinstance(one, effects.RefuseRequest)]


def kinds(out: list[effects.PoolEffect]) -> list[str]:
    return [type(one).__name__ for one in out]


def test_a_request_forks_and_gets_what_is_forked() -> None:
    pool = Pool()
    assert pool.feed(events.MoverRequested(7)) == [effects.RequestFork(ONE, AgentName("boot/1"))]
    assert pool.make_ready(ONE) == [effects.AssignMover(7, ONE)]
    assert pool.feed(events.MoverExited(ONE)) == [effects.ReportExit(ONE), effects.DiscardMover(ONE)]
    assert pool.feed(events.MoverExited(ONE)) == []


def test_ready_movers_are_assigned_in_order_and_replaced_after_a_delay_unless_busy() -> None:
    pool = Pool(size=2)
    pool.make_ready(TWO)
    pool.make_ready(ONE)
    assert pool.feed(events.MoverRequested(1)) == [effects.AssignMover(1, TWO)]
    assert kinds(pool.wait(REFILL_DELAY_S)) == ["RequestFork"]
    pool.make_ready(MoverId(3))
    pool.feed(events.BusyChanged(True))
    pool.feed(events.MoverRequested(2))
    assert pool.wait(REFILL_DELAY_S) == []
    pool.feed(events.BusyChanged(False))
    assert kinds(pool.wait(REFILL_DELAY_S)) == ["RequestFork"]


def test_busy_changes_something_when_it_is_new_or_when_movers_are_missing() -> None:
    pool = Pool(size=2)
    assert pool.decisions.is_changed_by(True)
    assert not pool.decisions.is_changed_by(False)  # both are starting
    pool.make_ready(ONE)
    pool.make_ready(TWO)
    pool.feed(events.BusyChanged(True))
    pool.feed(events.MoverRequested(1))
    assert not pool.decisions.is_changed_by(True)
    assert pool.decisions.is_changed_by(False)
    pool.feed(events.BusyChanged(False))
    assert pool.decisions.is_changed_by(False)  # until the next one is forked
    pool.wait(REFILL_DELAY_S)
    assert not pool.decisions.is_changed_by(False)


def test_a_mover_that_is_stopped_before_its_agent_is_made_is_killed_and_replaced() -> None:
    pool = Pool()
    pool.feed(events.MoverRequested(7))
    pool.now = 1.0
    pool.feed(Forked(mover=ONE, pid=100))
    assert refusals(pool.wait(START_TIMEOUT_S - 1)) == [(7, Code.MOVER_LOST)]
    (kill,) = pool.wait(1.0)
    assert isinstance(kill, effects.KillProcess)
    assert kill.mover == ONE
    # It is stopped no more, and reports before it dies.
    assert pool.report_up(ONE) == []
    assert kinds(pool.feed(events.MoverRequested(8))) == ["RequestFork"]
    assert kinds(pool.feed(events.MoverExited(ONE))) == ["ReportEarlyDeath", "DiscardMover"]
    assert pool.make_ready(TWO) == [effects.AssignMover(8, TWO)]
    assert pool.decisions.num_died_starting == 1


def test_a_forkserver_that_is_stopped_lets_nobody_wait_for_ever() -> None:
    pool = Pool()
    for request in range(1, 4):
        pool.feed(events.MoverRequested(request))
        assert refusals(pool.wait(START_TIMEOUT_S)) == [(request, Code.MOVER_LOST)]
    assert pool.decisions.status().num_starting == 1  # what it has not answered is not asked again
    assert pool.make_ready(ONE) == []
    assert pool.feed(events.MoverRequested(4)) == [effects.AssignMover(4, ONE)]


def test_a_library_that_never_loads_lets_nobody_wait_for_ever() -> None:
    pool = Pool(library=False)
    assert pool.feed(events.MoverRequested(1)) == []
    assert pool.decisions.next_deadline() is not None
    assert refusals(pool.wait(START_TIMEOUT_S)) == [(1, Code.MOVER_LOST)]


def test_a_forkserver_that_dies_while_forks_are_pending() -> None:
    pool = Pool()
    pool.feed(events.MoverRequested(1))
    pool.feed(events.MoverRequested(2))
    pool.feed(Forked(mover=ONE, pid=100))
    out = pool.feed(events.ForkserverExited())
    assert kinds(out) == [
        "ReportForkserverDeath",
        "RefuseRequest",
        "RefuseRequest",
        "KillProcess",
        "DiscardMover",
    ]
    # The late exit of an old mover costs no request that waits for the next forkserver.
    assert pool.feed(events.MoverRequested(3)) == []
    assert kinds(pool.feed(events.MoverExited(ONE))) == ["ReportEarlyDeath", "DiscardMover"]
    assert pool.wait(RESTART_DELAYS_S[0]) == [effects.StartForkserver()]
    assert kinds(pool.feed(LibraryLoaded(library="nixl"))) == ["RequestFork"]
    assert pool.make_ready(MoverId(3)) == [effects.AssignMover(3, MoverId(3))]


def test_a_ready_mover_of_a_dead_forkserver_is_not_assigned() -> None:
    pool = Pool(size=1)
    pool.make_ready(ONE)
    assert effects.KillProcess(ONE) in pool.feed(events.ForkserverExited())
    assert pool.feed(events.MoverRequested(1)) == []
    assert pool.feed(events.MoverExited(ONE)) == [
        effects.ReportEarlyDeath(ONE, was_starting=False),
        effects.DiscardMover(ONE),
    ]
    assert pool.decisions.num_died_unassigned == 1


def test_a_ready_mover_that_cannot_be_reached_is_not_assigned() -> None:
    pool = Pool(size=1)
    pool.make_ready(ONE)
    assert pool.feed(events.MoverStreamClosed(ONE)) == [effects.KillProcess(ONE)]
    assert pool.feed(events.MoverRequested(1)) == [
        effects.RequestFork(TWO, AgentName("boot/2")),
        effects.RequestFork(MoverId(3), AgentName("boot/3")),
    ]


def test_restarts_are_delayed_longer_until_a_fork_succeeds() -> None:
    pool = Pool()
    for delay in (*RESTART_DELAYS_S, RESTART_DELAYS_S[-1]):
        pool.feed(events.ForkserverExited())
        assert pool.wait(delay * 0.99) == []
        assert pool.wait(delay * 0.02) == [effects.StartForkserver()]
        pool.feed(LibraryLoaded(library="nixl"))  # it dies with the first fork
    pool.feed(events.MoverRequested(1))
    pool.make_ready(ONE)
    pool.feed(events.ForkserverExited())
    assert pool.wait(RESTART_DELAYS_S[0]) == [effects.StartForkserver()]


@pytest.mark.parametrize("failure", ["ForkFailed", "ForkNotSent"])
def test_forks_that_fail_are_tried_later_each_time_later(failure: str) -> None:
    pool = Pool(size=1)
    mover = ONE
    for delay in (*FORK_RETRY_DELAYS_S, FORK_RETRY_DELAYS_S[-1]):
        failed = (
            ForkFailed(mover=mover, reason="full")
            if failure == "ForkFailed"
            else events.ForkNotSent(mover, "full")
        )
        assert pool.feed(failed) == [effects.DiscardMover(mover)]
        assert pool.wait(delay * 0.99) == []
        (again,) = pool.wait(delay * 0.02)
        assert isinstance(again, effects.RequestFork)
        mover = again.mover


def test_a_failed_fork_refuses_a_request_only_where_no_other_mover_is_on_its_way() -> None:
    pool = Pool(size=1)
    pool.feed(events.MoverRequested(1))  # the second fork, beside the one that is kept ready
    assert refusals(pool.feed(ForkFailed(mover=ONE, reason="full"))) == []
    pool.feed(Forked(mover=TWO, pid=101))
    assert refusals(pool.feed(events.MoverExited(TWO))) == [(1, Code.MOVER_LOST)]


def test_without_a_library_every_request_is_refused_and_nothing_is_restarted() -> None:
    pool = Pool(library=False)
    pool.feed(events.MoverRequested(1))
    assert refusals(pool.feed(LibraryUnavailable(reason="none"))) == [(1, Code.NIXL_UNAVAILABLE)]
    assert refusals(pool.feed(events.MoverRequested(2))) == [(2, Code.NIXL_UNAVAILABLE)]
    assert pool.feed(events.ForkserverExited()) == []
    assert pool.decisions.next_deadline() is None


@pytest.mark.parametrize("message", [Forked(mover=TWO, pid=1), ForkFailed(mover=TWO, reason="x")])
def test_a_forkserver_that_answers_what_was_not_requested_is_killed(message: Forked | ForkFailed) -> None:
    pool = Pool(size=1)
    assert kinds(pool.feed(message)) == ["KillForkserver"]


def test_only_assigned_movers_are_reported() -> None:
    pool = Pool(size=1)
    pool.make_ready(ONE)
    polling = events.MoverReported(ONE, Polling(token=1))
    assert pool.feed(polling) == []
    pool.feed(events.MoverRequested(1))
    assert pool.feed(polling) == [effects.ReportMessage(ONE, Polling(token=1))]


def test_a_stop_ends_all_and_waits_for_the_last() -> None:
    pool = Pool(size=3)
    pool.feed(Forked(mover=ONE, pid=101))
    pool.make_ready(TWO)
    pool.feed(events.MoverRequested(1))
    pool.feed(events.MoverRequested(2))
    out = pool.feed(events.StopRequested())
    assert refusals(out) == [(2, Code.MOVER_LOST)]
    assert {one.mover for one in out if isinstance(one, effects.KillProcess)} == {ONE, TWO}
    assert kinds(out)[-1] == "ShutDownForkserver"
    assert refusals(pool.feed(events.MoverRequested(3))) == [(3, Code.MOVER_LOST)]
    assert pool.feed(Forked(mover=MoverId(3), pid=103)) == [effects.KillProcess(MoverId(3))]
    assert kinds(pool.wait(SHUTDOWN_S)) == ["KillForkserver"]
    pool.feed(events.ForkserverExited())
    pool.feed(events.MoverExited(ONE))
    pool.feed(events.MoverExited(MoverId(3)))
    assert kinds(pool.feed(events.MoverExited(TWO))) == ["ReportExit", "DiscardMover", "ReportStopped"]
    assert pool.decisions.next_deadline() is None


class RandomShell:
    """Answers the pool's effects late, in any order, or by a death; stopped processes never answer."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = Pool(size=self.random.randrange(3), library=False)
        self.pids = itertools.count(100)
        self.has_forkserver = True
        self.forks: list[MoverId] = []
        self.alive: dict[MoverId, bool] = {}  # whether it was killed
        self.assigned: dict[MoverId, int] = {}
        self.open: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.is_stopped = False

    def carry_out(self, out: list[effects.PoolEffect]) -> None:
        for effect in out:
            self.counts[type(effect).__name__] += 1
            match effect:
                case effects.StartForkserver():
                    assert not self.has_forkserver
                    self.has_forkserver = True
                case effects.RequestFork():
                    assert self.has_forkserver
                    self.forks.append(effect.mover)
                case effects.AssignMover():
                    self.open.remove(effect.request)
                    assert effect.mover not in self.assigned
                    self.assigned[effect.mover] = effect.request
                case effects.RefuseRequest():
                    self.open.remove(effect.request)
                case effects.KillProcess() if effect.mover in self.alive:
                    self.alive[effect.mover] = True
                case effects.ReportExit():
                    del self.assigned[effect.mover]
                case effects.ReportStopped():
                    assert not self.is_stopped
                    self.is_stopped = True
                case _:
                    pass

    def feed(self, event: events.PoolEvent) -> None:
        self.carry_out(self.pool.feed(event))

    def step(self, number: int) -> None:
        pick = self.random.random()
        if pick < 0.2:
            self.open.add(number)
            self.feed(events.MoverRequested(number))
        elif pick < 0.45 and self.forks:
            self.answer_fork(self.forks.pop(0))
        elif pick < 0.65 and self.alive:
            mover = self.random.choice(list(self.alive))
            if not self.alive[mover]:
                self.feed(events.MoverReported(mover, MoverUp(pid=1, agent=AgentName("a"), library="nixl")))
        elif pick < 0.8 and self.alive:
            self.exit(self.random.choice(list(self.alive)))
        elif pick < 0.83 and self.has_forkserver:
            self.end_forkserver()
        elif pick < 0.88:
            self.feed(events.BusyChanged(self.random.random() < 0.5))
        elif pick < 0.92 and self.has_forkserver:
            self.feed(LibraryLoaded(library="nixl"))
        else:
            self.carry_out(self.pool.wait(self.random.choice((0.1, 1.0, 30.0))))

    def answer_fork(self, mover: MoverId) -> None:
        if self.random.random() < 0.2:
            self.feed(ForkFailed(mover=mover, reason="full"))
            return
        self.alive[mover] = False
        self.feed(Forked(mover=mover, pid=next(self.pids)))

    def exit(self, mover: MoverId) -> None:
        del self.alive[mover]
        self.feed(events.MoverExited(mover))

    def end_forkserver(self) -> None:
        self.has_forkserver = False
        self.forks.clear()
        self.feed(events.ForkserverExited())

    def finish(self) -> None:
        """Every request has its answer in time; then a stop leaves nothing."""
        self.carry_out(self.pool.wait(START_TIMEOUT_S + 1))
        assert not self.open
        self.feed(events.StopRequested())
        for mover in list(self.alive):
            assert self.alive[mover], f"mover {mover} is not killed"
            self.exit(mover)
        if self.has_forkserver:
            self.end_forkserver()
        assert self.is_stopped
        assert not self.assigned
        assert self.pool.decisions.next_deadline() is None


def test_any_order_of_deaths_answers_each_request_once_and_leaves_nothing() -> None:
    counts: Counter[str] = Counter()
    for seed in range(300):
        shell = RandomShell(seed)
        for number in range(60):
            shell.step(number)
        shell.finish()
        counts += shell.counts
    assert {"AssignMover", "RefuseRequest", "ReportEarlyDeath", "ReportForkserverDeath"} <= counts.keys()
