"""The pool of movers: which are forked, kept ready, given to ranks, and given up before a rank has them.

A child mover is starting until its agent is made, then ready, then assigned: from then on it is one of
`Movers`. A resident mover, a thread of a worker, starts for the rank whose worker has brought it. What is
given up before that is forgotten at once; its `MoverDied` changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import AcceptResidentMover, ForkMover, KillMover, StartForkserver
from kvxferd.core.ranks.movers import Mover, Movers
from kvxferd.errors import Code
from kvxferd.ids import AgentName, MoverId, SessionId
from kvxferd.wire.common import Refusal
from kvxferd.wire.limits import MAX_NAME_CHARS
from kvxferd.wire.mover import FromMover, MoverLeaving, MoverUp

REFILL_DELAY_S = 0.25  # after a mover was assigned: its registration goes first
RESTART_DELAYS_S = (0.1, 0.5, 2.0, 5.0)  # of a forkserver that dies; the last one repeats
# Where a mover cannot be forked, because descriptors or processes are short; the last one repeats.
FORK_RETRY_DELAYS_S = (0.25, 0.5, 2.0, 5.0)
# A mover's agent takes 0.5 s, and an import from a slow disk takes tens of seconds. What takes longer is
# stopped, or hangs in the library: a rank that waits for it is refused, and may register again.
START_TIMEOUT_S = 60.0
# A worker's first agent takes 0.5 s; a busy engine's GIL makes that longer.
RESIDENT_START_TIMEOUT_S = 20.0


class MoverPool:
    """Keeps `Settings.mover_pool_size` movers ready, and gives each rank that needs one a mover of its own.

    A mover is assigned in the step in which it gets ready, so it cannot die in between.
    """

    def __init__(
        self,
        context: NodeContext,
        movers: Movers,
        is_busy: Callable[[], bool],
        on_assigned: Callable[[Mover, str], None],
        on_refused: Callable[[SessionId, Refusal], None],
    ) -> None:
        """`is_busy`: whether pulls run, which a fork delays. `on_assigned` gets the library's name too.

        Each request ends in one call of `on_assigned` or `on_refused`, now or later.
        """
        self.library = ""  # "" until the forkserver has imported one
        self.unavailable = ""  # why there are never any movers
        self._context = context
        self._movers = movers
        self._is_busy = is_busy
        self._on_assigned = on_assigned
        self._on_refused = on_refused
        self._last_number = 0  # of a mover
        self._num_restarts = 0  # of the forkserver, since a mover last got ready
        self._num_failed_forks = 0  # since a mover last got ready
        self._waiting: dict[SessionId, None] = {}  # ranks that need a child mover, the oldest request first
        self._starting: dict[MoverId, None] = {}
        self._ready: dict[MoverId, MoverUp] = {}  # the one that is longest ready first
        self._residents: dict[MoverId, SessionId] = {}  # those that start

    @property
    def num_starting(self) -> int:
        """The number of child movers whose agents are not made yet."""
        return len(self._starting)

    @property
    def num_ready(self) -> int:
        """The number of child movers that are ready, and assigned to no rank."""
        return len(self._ready)

    # --- requests

    def request(self, session: SessionId) -> None:
        """Give the session's rank a mover. One request of a session is open at a time: each is a process.

        A rank that was suspended and resumed again and again had hundreds of movers started, and other ranks
        got none.
        """
        if session in self._waiting:
            return
        if self.unavailable:
            self._on_refused(session, Refusal(Code.NIXL_UNAVAILABLE, self.unavailable))
            return
        if self._ready:
            mover = next(iter(self._ready))
            self._fill_later(REFILL_DELAY_S)
            self._assign(session, mover, self._ready.pop(mover))
            return
        self._waiting[session] = None
        text = f"no mover was ready in {START_TIMEOUT_S:g} s; register again"
        refusal = Refusal(Code.MOVER_LOST, text)
        self._context.after(
            ("awaits-mover", session), START_TIMEOUT_S, lambda: self._refuse(session, refusal)
        )
        self._fill()

    def request_resident(self, session: SessionId) -> None:
        """Give the session's rank the resident mover that its worker has sent last."""
        mover = self._next_number()
        self._residents[mover] = session
        self._context.emit(AcceptResidentMover(mover, session))
        text = f"cannot use the worker's resident mover: no agent in {RESIDENT_START_TIMEOUT_S:g} s"
        refusal = Refusal(Code.MOVER_LOST, text)
        self._context.after(
            ("starts", mover), RESIDENT_START_TIMEOUT_S, lambda: self._refuse_resident(mover, refusal)
        )

    def _next_number(self) -> MoverId:
        self._last_number += 1
        return MoverId(self._last_number)

    def _assign(self, session: SessionId, mover: MoverId, up: MoverUp, resident: bool = False) -> None:
        self._on_assigned(Mover(mover, session, up.agent, resident), up.library)

    def _refuse(self, session: SessionId, refusal: Refusal) -> None:
        del self._waiting[session]
        self._context.timers.cancel(("awaits-mover", session))
        self._on_refused(session, refusal)

    def _refuse_all(self, refusal: Refusal) -> None:
        for session in tuple(self._waiting):
            self._refuse(session, refusal)

    def _refuse_surplus(self, refusal: Refusal) -> None:
        """Refuse a request for which no mover is on its way."""
        if len(self._waiting) > len(self._starting):
            self._refuse(next(iter(self._waiting)), refusal)

    # --- the forkserver

    def forkserver_ready(self, library: str) -> None:
        """Fork what is needed: the forkserver has imported its library."""
        self.library = library
        self._fill()

    def library_unavailable(self, reason: str) -> None:
        """Refuse all requests, from now on too."""
        self.unavailable = reason
        self._refuse_all(Refusal(Code.NIXL_UNAVAILABLE, reason))

    def forkserver_exited(self, reason: str) -> None:
        """Give up all movers that no rank has, because they die with the forkserver; start another later."""
        self.library = ""
        if self.unavailable:
            return
        for mover in (*self._starting, *self._ready):
            self._context.timers.cancel(("starts", mover))
            self._context.emit(KillMover(mover))
        self._starting.clear()
        self._ready.clear()
        self._refuse_all(Refusal(Code.MOVER_LOST, reason))
        delay_s = RESTART_DELAYS_S[min(self._num_restarts, len(RESTART_DELAYS_S) - 1)]
        self._num_restarts += 1
        self._context.after("forkserver", delay_s, lambda: self._context.emit(StartForkserver()))

    # --- movers that start

    def _fill_later(self, delay_s: float) -> None:
        if "fill" not in self._context.timers:
            self._context.after("fill", delay_s, self._fill)

    def _fill(self) -> None:
        """Fork what is needed now, and look again where more is needed once no pull runs."""
        self._context.timers.cancel("fill")
        if not self.library:
            return
        num_spare = max(0, self._context.settings.mover_pool_size - len(self._ready))
        num_now = len(self._waiting) + (0 if self._is_busy() else num_spare)
        while len(self._starting) < num_now:
            self._fork()
        if len(self._starting) < len(self._waiting) + num_spare:
            self._fill_later(REFILL_DELAY_S)

    def _fork(self) -> None:
        mover = self._next_number()
        self._starting[mover] = None
        agent = AgentName(f"{self._context.boot}/{self._context.new_token()[16:]}")
        self._context.emit(ForkMover(mover, agent))
        self._context.after(("starts", mover), START_TIMEOUT_S, lambda: self._start_timed_out(mover))

    def _start_timed_out(self, mover: MoverId) -> None:
        self._context.emit(KillMover(mover))
        self._lose_starting(mover, f"a mover has made no agent in {START_TIMEOUT_S:g} s")

    def _lose_starting(self, mover: MoverId, reason: str) -> None:
        """Forget a mover that will not get ready. The next request tries again, and nothing before.

        With a library that cannot make agents this would fork for ever.
        """
        del self._starting[mover]
        self._context.timers.cancel(("starts", mover))
        self._refuse_surplus(Refusal(Code.MOVER_LOST, reason))

    def handle(self, mover: MoverId, message: FromMover) -> None:
        """Handle a message of a mover that no rank has. One that was given up is not listened to."""
        if isinstance(message, MoverUp):
            if mover in self._starting:
                self._got_ready(mover, message)
            elif mover in self._residents:
                self._resident_got_ready(mover, message)
        elif isinstance(message, MoverLeaving) and mover in self._residents:
            self._refuse_resident(mover, Refusal(message.code, message.message))

    def _got_ready(self, mover: MoverId, up: MoverUp) -> None:
        del self._starting[mover]
        self._context.timers.cancel(("starts", mover))
        self._num_restarts = self._num_failed_forks = 0
        if not self._waiting:
            self._ready[mover] = up
            return
        session = next(iter(self._waiting))
        del self._waiting[session]
        self._context.timers.cancel(("awaits-mover", session))
        self._assign(session, mover, up)

    def _resident_got_ready(self, mover: MoverId, up: MoverUp) -> None:
        is_of_this_daemon = up.agent.startswith(f"{self._context.boot}/") and len(up.agent) <= MAX_NAME_CHARS
        if not is_of_this_daemon or self._movers.get_by_agent(up.agent) is not None:
            # Peers would read it in place of another of that name.
            text = f"cannot use a resident mover called {up.agent[:80]!r}: it is not free here"
            self._refuse_resident(mover, Refusal(Code.OUT_OF_PLACE, text))
            return
        self._context.timers.cancel(("starts", mover))
        self._assign(self._residents.pop(mover), mover, up, resident=True)

    def _refuse_resident(self, mover: MoverId, refusal: Refusal) -> None:
        self._context.timers.cancel(("starts", mover))
        self._context.emit(KillMover(mover))
        self._on_refused(self._residents.pop(mover), refusal)

    # --- the end of movers

    def not_started(self, mover: MoverId, refusal: Refusal) -> None:
        """Handle a mover that was not forked, or not accepted: there is nothing of it."""
        if mover in self._residents:
            self._refuse_resident(mover, refusal)
        elif mover in self._starting:
            self._lose_starting(mover, refusal.message)
            delay_s = FORK_RETRY_DELAYS_S[min(self._num_failed_forks, len(FORK_RETRY_DELAYS_S) - 1)]
            self._num_failed_forks += 1
            self._fill_later(delay_s)

    def mover_died(self, mover: MoverId) -> None:
        """Handle the death of a mover that no rank has."""
        if mover in self._residents:
            text = "the worker's resident mover ended before its agent was made"
            self._refuse_resident(mover, Refusal(Code.MOVER_LOST, text))
        elif mover in self._starting:
            self._lose_starting(mover, "the mover died before its agent was made")
        elif self._ready.pop(mover, None) is not None:
            self._fill_later(REFILL_DELAY_S)

    def check_integrity(self) -> None:
        """Raise AssertionError where a rank would wait for ever, or a mover is in two states."""
        timers = self._context.timers
        states: tuple[Collection[MoverId], ...] = (self._starting, self._ready, self._residents)
        movers = {mover for state in states for mover in state}
        assert len(movers) == sum(map(len, states)), "a mover is in two states"
        for mover in (*self._starting, *self._residents):
            assert ("starts", mover) in timers, f"mover {mover} may start for ever"
        for mover in movers:
            assert self._movers.get(mover) is None, f"mover {mover} is assigned, and in the pool"
        for session in self._waiting:
            assert ("awaits-mover", session) in timers, f"session {session} may wait for ever"
        if self.library:
            assert len(self._waiting) <= len(self._starting), "a rank waits for no mover"
        else:
            assert not self._starting, "a mover starts without a forkserver"
        assert not (self._waiting and self._ready), "a rank waits beside a mover that is ready"
        assert not (self._waiting and self.unavailable), "a rank waits for what never comes"
