"""The pool's decisions: events in, effects out. No I/O, no clock and no randomness of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, assert_never

from kvxferd.errors import Code, MoverError
from kvxferd.ids import AgentName, MoverId
from kvxferd.mover.forkserver_protocol import Forked, ForkFailed, LibraryLoaded, LibraryUnavailable
from kvxferd.mover.supervisor.pool_effects import (
    AssignMover,
    DiscardMover,
    KillForkserver,
    KillProcess,
    PoolEffect,
    RefuseRequest,
    ReportEarlyDeath,
    ReportExit,
    ReportForkserverDeath,
    ReportMessage,
    ReportStopped,
    RequestFork,
    ShutDownForkserver,
    StartForkserver,
)
from kvxferd.mover.supervisor.pool_events import (
    BusyChanged,
    ForkNotSent,
    ForkserverExited,
    ForkserverNotStarted,
    MoverExited,
    MoverReported,
    MoverRequested,
    MoverStreamClosed,
    PoolEvent,
    Started,
    StopRequested,
    TimersDue,
)
from kvxferd.timers import Timers
from kvxferd.wire.mover import FromMover, MoverUp

REFILL_DELAY_S = 0.25  # after a mover was acquired: its registration goes first
RESTART_DELAYS_S = (0.1, 0.5, 2.0, 5.0)  # of a forkserver that dies; the last one repeats
# Where a mover cannot be forked, because descriptors or processes are short; the last one repeats.
FORK_RETRY_DELAYS_S = (0.25, 0.5, 2.0, 5.0)
# A mover's agent takes 0.5 s, and an import from a slow disk takes tens of seconds. What takes longer is
# stopped, or hangs in the library: a rank that waits for it is refused, and may register again.
START_TIMEOUT_S = 60.0
SHUTDOWN_S = 3.0  # of the forkserver: it may be importing the library, which it cannot leave

_STOPPING = "cannot take a mover: the pool is stopping"


class PoolStatus(NamedTuple):
    """The pool's state, for people."""

    num_warm: int  # ready, and assigned to no rank
    num_starting: int
    num_assigned: int
    library: str  # "" until the forkserver has imported one
    reason: str  # why there are no movers; "" where there can be some


class PoolDecisions:
    """Keeps `size` movers ready, and gives each request one.

    A mover is starting until its agent is made, then warm, then assigned. One that is killed before it is
    assigned is ending until its process is gone.
    """

    def __init__(
        self,
        *,
        size: int,
        mover_ids: Iterator[int],
        new_agent: Callable[[], AgentName],
    ) -> None:
        """`new_agent` returns a name that no other agent has, ever."""
        self.size = size
        self.num_died_starting = 0  # movers that died before their agent was made
        self.num_died_unassigned = 0  # and before a rank had them
        self._mover_ids = mover_ids
        self._new_agent = new_agent
        self._now = 0.0
        self._timers = Timers()
        self._effects: list[PoolEffect] = []
        self._has_forkserver = False
        self._library = ""
        self._reason = ""
        self._num_restarts = 0  # since the last fork that succeeded
        self._num_failed_forks = 0  # since the last fork that succeeded
        self._is_busy = False
        self._is_stopping = False
        self._is_stopped = False
        self._waiters: deque[int] = deque()  # requests, the oldest first
        self._starting: dict[MoverId, bool] = {}  # whether it is forked
        self._warm: dict[MoverId, None] = {}  # the one that is longest ready first
        self._assigned: dict[MoverId, None] = {}
        self._ending: dict[MoverId, bool] = {}  # whether it was starting

    def feed(self, event: PoolEvent, now: float) -> list[PoolEffect]:
        """Take one event at a time that never goes back; return the effects, in order."""
        self._now = max(self._now, now)
        self._handle(event)
        while self._timers.run_next(self._now):
            pass
        self._report_if_stopped()
        effects, self._effects = self._effects, []
        return effects

    def is_changed_by(self, is_busy: bool) -> bool:
        """Whether `BusyChanged` would do anything: nearly never, and it is called with each event."""
        return is_busy != self._is_busy or (not is_busy and self._num_wanted() > 0)

    def next_deadline(self) -> float | None:
        """Return when a `TimersDue` is due; None: never."""
        return self._timers.next_deadline()

    def status(self) -> PoolStatus:
        """Return how many movers there are and of which library, or why there are none."""
        return PoolStatus(
            len(self._warm), len(self._starting), len(self._assigned), self._library, self._reason
        )

    def warm(self) -> list[MoverId]:
        """Return the movers that are ready, in the order in which they are assigned."""
        return list(self._warm)

    def assigned(self) -> list[MoverId]:
        """Return the movers that ranks have."""
        return list(self._assigned)

    def _handle(self, event: PoolEvent) -> None:
        match event:
            case Started():
                self._start_forkserver()
            case StopRequested():
                self._stop()
            case MoverRequested():
                self._request(event.request)
            case BusyChanged():
                self._is_busy = event.is_busy
                if not event.is_busy:
                    self._fill_later()
            case ForkserverNotStarted():
                self._has_forkserver = False
                self._refuse_all(f"cannot start the movers' parent: {event.reason}")
                self._restart_later()
            case ForkserverExited():
                self._on_forkserver_exit()
            case LibraryLoaded():
                self._library = event.library
                self._fill()
            case LibraryUnavailable():
                self._reason = event.reason
                self._refuse_all(event.reason, Code.NIXL_UNAVAILABLE)
            case Forked():
                self._on_forked(event)
            case ForkFailed():
                self._on_fork_failed(event)
            case ForkNotSent():
                self._forget_fork(event.mover)
                self._refuse_surplus(f"cannot ask for a mover: {event.reason}; register again")
                self._retry_fork_later()
            case MoverReported():
                self._on_message(event.mover, event.message)
            case MoverStreamClosed():
                self._kill(event.mover)
            case MoverExited():
                self._on_exit(event.mover)
            case TimersDue():
                pass
            case _:
                assert_never(event)

    # --- requests

    def _request(self, request: int) -> None:
        if self._reason:
            self._refuse(request, self._reason, Code.NIXL_UNAVAILABLE)
            return
        if self._is_stopping:
            self._refuse(request, _STOPPING)
            return
        self._fill_later()
        if self._warm:
            mover = next(iter(self._warm))
            del self._warm[mover]
            self._assign(request, mover)
            return
        self._waiters.append(request)
        self._after(("waits", request), START_TIMEOUT_S, lambda: self._give_up(request))
        self._fill()

    def _assign(self, request: int, mover: MoverId) -> None:
        self._assigned[mover] = None
        self._effects.append(AssignMover(request, mover))

    def _refuse(self, request: int, text: str, code: Code = Code.MOVER_LOST) -> None:
        self._timers.cancel(("waits", request))
        self._effects.append(RefuseRequest(request, MoverError(text, code)))

    def _refuse_all(self, text: str, code: Code = Code.MOVER_LOST) -> None:
        while self._waiters:
            self._refuse(self._waiters.popleft(), text, code)

    def _refuse_surplus(self, text: str) -> None:
        """Refuse a request for which no mover is on its way."""
        if len(self._waiters) > len(self._starting):
            self._refuse(self._waiters.popleft(), text)

    def _give_up(self, request: int) -> None:
        self._waiters.remove(request)
        self._refuse(request, f"no mover was ready in {START_TIMEOUT_S:g} s; register again")

    # --- the forkserver

    def _start_forkserver(self) -> None:
        self._has_forkserver = True
        self._effects.append(StartForkserver())

    def _restart_later(self) -> None:
        if self._is_stopping:
            return
        delay_s = RESTART_DELAYS_S[min(self._num_restarts, len(RESTART_DELAYS_S) - 1)]
        self._num_restarts += 1
        self._after("restart", delay_s, self._start_forkserver)

    def _on_forkserver_exit(self) -> None:
        self._has_forkserver = False
        self._library = ""
        self._timers.cancel("shutdown")
        if not self._is_stopping and not self._reason:
            self._effects.append(ReportForkserverDeath())
            self._refuse_all("the movers' parent died; register again")
            self._restart_later()
        # The pidfds of those that are not forked never came. The others die with it, noticed or not.
        for mover, is_forked in list(self._starting.items()):
            if is_forked:
                self._kill(mover)
            else:
                self._forget_fork(mover)
        for mover in self.warm():
            self._kill(mover)

    def _on_forked(self, message: Forked) -> None:
        mover = message.mover
        if self._starting.get(mover) is not False:
            self._effects.append(KillForkserver(f"it forked mover {mover}, which nobody requested"))
            return
        self._num_restarts = self._num_failed_forks = 0
        self._starting[mover] = True
        if self._is_stopping:
            self._kill(mover)
            return
        reason = f"it has made no agent in {START_TIMEOUT_S:g} s"
        self._after(("starts", mover), START_TIMEOUT_S, lambda: self._kill(mover, reason))

    def _on_fork_failed(self, message: ForkFailed) -> None:
        if self._starting.get(message.mover) is not False:
            self._effects.append(KillForkserver(f"it did not fork mover {message.mover}, which is not asked"))
            return
        self._forget_fork(message.mover)
        self._refuse_surplus(f"cannot fork a mover: {message.reason}")
        self._retry_fork_later()

    def _forget_fork(self, mover: MoverId) -> None:
        del self._starting[mover]
        self._effects.append(DiscardMover(mover))

    # --- movers that start

    def _fill_later(self) -> None:
        if "refill" not in self._timers and not self._is_stopping:
            self._after("refill", REFILL_DELAY_S, self._fill)

    def _retry_fork_later(self) -> None:
        delay_s = FORK_RETRY_DELAYS_S[min(self._num_failed_forks, len(FORK_RETRY_DELAYS_S) - 1)]
        self._num_failed_forks += 1
        if not self._is_stopping:
            self._after("refill", delay_s, self._fill)

    def _fill(self) -> None:
        self._timers.cancel("refill")
        if not self._library or self._is_stopping:
            return
        for _ in range(self._num_wanted()):
            mover = MoverId(next(self._mover_ids))
            self._starting[mover] = False
            self._effects.append(RequestFork(mover, self._new_agent()))

    def _num_wanted(self) -> int:
        """Return how many movers to fork now."""
        spare = 0 if self._is_busy else max(0, self.size - len(self._warm))
        return len(self._waiters) + spare - len(self._starting)

    def _on_message(self, mover: MoverId, message: FromMover) -> None:
        if isinstance(message, MoverUp):
            self._on_up(mover)
        elif mover in self._assigned:
            self._effects.append(ReportMessage(mover, message))

    def _on_up(self, mover: MoverId) -> None:
        if mover not in self._starting:
            return  # it is ending
        del self._starting[mover]
        self._timers.cancel(("starts", mover))
        if self._waiters:
            request = self._waiters.popleft()
            self._timers.cancel(("waits", request))
            self._assign(request, mover)
        else:
            self._warm[mover] = None

    # --- the end of movers

    def _kill(self, mover: MoverId, reason: str = "") -> None:
        """Kill a mover. One that no rank has is not assigned any more."""
        was_starting = self._starting.pop(mover, None) is not None
        if was_starting:
            self._ending[mover] = True
            self._timers.cancel(("starts", mover))
            self._refuse_surplus("the mover died before its agent was made")
        elif mover in self._warm:
            del self._warm[mover]
            self._ending[mover] = False
            self._fill_later()
        elif mover not in self._assigned:
            return  # it is ending, or gone
        self._effects.append(KillProcess(mover, reason))

    def _on_exit(self, mover: MoverId) -> None:
        if mover in self._assigned:
            del self._assigned[mover]
            self._effects.append(ReportExit(mover))
        elif mover in self._starting or mover in self._warm or mover in self._ending:
            self._on_early_exit(mover)
        else:
            return
        self._effects.append(DiscardMover(mover))

    def _on_early_exit(self, mover: MoverId) -> None:
        was_starting = mover in self._starting or self._ending.get(mover, False)
        if mover in self._starting:
            del self._starting[mover]
            self._timers.cancel(("starts", mover))
            self._refuse_surplus("the mover died before its agent was made")
            # The next request tries again: with a library that cannot make agents this would fork for ever.
        elif mover in self._warm:
            del self._warm[mover]
            self._fill_later()
        else:
            del self._ending[mover]
        if self._is_stopping:
            return
        if was_starting:
            self.num_died_starting += 1
        else:
            self.num_died_unassigned += 1
        self._effects.append(ReportEarlyDeath(mover, was_starting))

    def _stop(self) -> None:
        self._is_stopping = True
        self._timers.cancel("refill")
        self._timers.cancel("restart")
        self._refuse_all(_STOPPING)
        for mover in [m for m, is_forked in self._starting.items() if is_forked] + self.warm():
            self._kill(mover)
        for mover in self._assigned:
            self._effects.append(KillProcess(mover))
        if self._has_forkserver:
            self._effects.append(ShutDownForkserver())
            kill = KillForkserver(f"it has not ended in {SHUTDOWN_S:g} s")
            self._after("shutdown", SHUTDOWN_S, lambda: self._effects.append(kill))

    def _report_if_stopped(self) -> None:
        is_empty = not (self._starting or self._warm or self._assigned or self._ending)
        if self._is_stopping and not self._is_stopped and not self._has_forkserver and is_empty:
            self._is_stopped = True
            self._effects.append(ReportStopped())

    def _after(self, name: object, delay_s: float, callback: Callable[[], None]) -> None:
        self._timers.set(name, self._now + delay_s, callback)

    def check_integrity(self) -> None:
        """Assert what holds between two events."""
        states: list[Collection[MoverId]] = [self._starting, self._warm, self._assigned, self._ending]
        movers = {mover for state in states for mover in state}
        assert len(movers) == sum(map(len, states)), "a mover is in two states"
        for mover, is_forked in self._starting.items():
            is_timed = ("starts", mover) in self._timers
            assert is_timed == (is_forked and not self._is_stopping), f"mover {mover} may start for ever"
        for request in self._waiters:
            assert ("waits", request) in self._timers, f"request {request} may wait for ever"
        assert len(set(self._waiters)) == len(self._waiters)
        if self._library:
            assert self._has_forkserver
            assert len(self._waiters) <= len(self._starting), "a request waits for no mover"
        if self._warm:
            assert not self._waiters, "a request waits beside a mover that is ready"
        if not self._has_forkserver:
            assert not any(is_forked is False for is_forked in self._starting.values())
        if self._is_stopping:
            assert not self._waiters
            assert "refill" not in self._timers
            assert "restart" not in self._timers
        if self._reason:
            assert not self._waiters
