"""Movers for the daemon: some kept ready, so that a registration need not wait for one."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvxferd.core.lanes import Lanes, UcxLine, is_about_lanes, parse_lanes
from kvxferd.errors import Code, MoverError
from kvxferd.ids import AgentName, BootId, MoverId
from kvxferd.mover.control import Forked, ForkFailed, Ready, Unavailable
from kvxferd.mover.disconnects import lanes_prove_over
from kvxferd.mover.handle import MoverHandle
from kvxferd.mover.launch import ParentProcess, Said
from kvxferd.wire.mover import DisconnectJudged, DisconnectSeen, FromMover, Up

_LOG = logging.getLogger(__name__)

REFILL_DELAY_S = 0.25  # after a mover was taken: its registration goes first
MAX_EARLY_LANES = 256  # a mover connects in fewer than 10 ways before its first pull
RESTART_DELAYS_S = (0.1, 0.5, 2.0, 5.0)  # of a parent that dies; the last one repeats
FORK_AGAIN_S = (0.25, 0.5, 2.0, 5.0)  # where a mover cannot be forked: descriptors or processes are short


class PoolStatus(NamedTuple):
    """For people."""

    num_warm: int
    num_starting: int
    num_taken: int
    library: str  # "" until the parent has imported one
    reason: str  # why there are no movers; "" when there can be


class MoverPool:
    """Keeps `size` movers ready. All methods belong to the event loop that called `start`.

    `on_message` gets what a taken mover says, in order; `on_exit` comes once for each taken mover,
    after its last message, when its process is gone and nothing of it writes any more. `on_lanes` gets
    each new way in which a taken mover connects; those from before are in its handle.
    """

    def __init__(
        self,
        *,
        boot: BootId,
        size: int,
        on_message: Callable[[MoverId, FromMover], None],
        on_exit: Callable[[MoverId], None],
        on_lanes: Callable[[MoverId, Lanes], None] = lambda mover, lanes: None,
        lock_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        use: str = "auto",
        numbers: Iterator[int] | None = None,
    ) -> None:
        """`numbers` are those of its movers; shared where other movers are numbered too."""
        self._boot = boot
        self._size = size
        self._on_message = on_message
        self._on_exit = on_exit
        self._on_lanes = on_lanes
        self._early_lanes: dict[int, list[Lanes]] = {}  # by process id
        self._lock_fds = tuple(lock_fds)
        self._environment = dict(environment or {})
        self._use = use  # "nixl", "rixl", or "auto": the first that can be imported
        self._parent: ParentProcess | None = None
        self._library = ""
        self._reason = ""
        self._num_restarts = 0
        self._num_failed_forks = 0  # since the last that succeeded
        self._is_busy = False
        self._is_stopping = False
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._starting: dict[MoverId, MoverHandle] = {}
        self._warm: deque[MoverHandle] = deque()
        self._taken: dict[MoverId, MoverHandle] = {}
        self._waiters: deque[asyncio.Future[MoverHandle]] = deque()
        self._refill: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()

    async def start(self) -> None:
        """Start the parent; the first movers get ready while the caller goes on."""
        self._start_parent()

    async def take(self) -> MoverHandle:
        """Return a ready mover, or else a new one when it is.

        Raises MoverError: nixl-unavailable with the reason, or mover-lost where one died on the way.
        """
        if self._reason:
            raise MoverError(self._reason, Code.NIXL_UNAVAILABLE)
        if self._is_stopping:
            raise MoverError("cannot take a mover: the pool is stopping", Code.MOVER_LOST)
        self._fill_later()
        while self._warm:
            mover = self._warm.popleft()
            if mover.is_alive:
                self._taken[mover.mover_id] = mover
                return mover
        waiter: asyncio.Future[MoverHandle] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            self._fill()
            return await waiter
        except BaseException:
            with suppress(ValueError):  # a mover or a refusal took it out
                self._waiters.remove(waiter)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give_back(waiter.result())
            raise

    def set_busy(self, busy: bool) -> None:
        """While busy no movers are made but those that somebody waits for."""
        self._is_busy = busy
        if not busy:
            self._fill_later()

    def describe(self) -> PoolStatus:
        """Say how many movers there are, of which library, or why there are none."""
        return PoolStatus(len(self._warm), len(self._starting), len(self._taken), self._library, self._reason)

    async def stop(self) -> None:
        """Kill all movers and their parent; return when they are gone."""
        self._is_stopping = True
        if self._refill is not None:
            self._refill.cancel()
        self._refuse_waiters(MoverError("cannot take a mover: the pool is stopping", Code.MOVER_LOST))
        for mover in self._all():
            mover.kill()
        if self._parent is not None:
            self._parent.end()
        self._note_empty()
        await self._empty.wait()

    # --- the parent

    def _start_parent(self) -> None:
        if self._is_stopping:
            return
        try:
            self._parent = ParentProcess(
                self._environment,
                self._use,
                self._lock_fds,
                self._parent_said,
                self._parent_exited,
                self._ucx_said,
                self._ucx_unheard,
            )
        except OSError as error:
            _LOG.error("cannot start the movers' parent: %s", error)
            self._refuse_waiters(MoverError(f"cannot start the movers' parent: {error}", Code.MOVER_LOST))
            self._restart_later()

    def _parent_said(self, said: Said, pidfd: int) -> None:
        match said:
            case Ready():
                self._library = said.library
                self._num_restarts = 0
                self._fill()
            case Unavailable():
                _LOG.error("no movers: %s", said.reason)
                self._reason = said.reason
                self._refuse_waiters(MoverError(said.reason, Code.NIXL_UNAVAILABLE))
            case Forked():
                self._num_failed_forks = 0
                self._starting[said.mover].attach(said.pid, pidfd)
                self._starting[said.mover].lanes += self._early_lanes.pop(said.pid, [])
                if not self._has_unforked():
                    self._early_lanes.clear()
                if self._is_stopping:
                    self._starting[said.mover].kill()
            case ForkFailed():
                _LOG.error("cannot fork a mover: %s", said.reason)
                self._starting.pop(said.mover).discard()
                if not self._has_unforked():
                    self._early_lanes.clear()
                self._refuse_one(MoverError(f"cannot fork a mover: {said.reason}", Code.MOVER_LOST))
                self._fork_again_later()

    def _ucx_unheard(self) -> None:
        """Lines may be lost, of any mover."""
        for mover in self._all():
            mover.has_unknown_lanes = True

    def _ucx_said(self, line: UcxLine) -> None:
        if not is_about_lanes(line.text):
            return
        lanes = parse_lanes(line.text)
        if lanes is None:  # whose it is does not matter: it is of a version of UCX that is not known
            self._ucx_unheard()
            return
        mover = next((mover for mover in self._all() if mover.pid == line.pid), None)
        if mover is None:
            self._keep_early(line.pid, lanes)
            return
        mover.lanes.append(lanes)
        if mover.mover_id in self._taken:
            self._on_lanes(mover.mover_id, lanes)

    def _keep_early(self, pid: int, lanes: Lanes) -> None:
        """Keep what may be of a mover whose `Forked` comes another way. Others are dead, or never were."""
        if not self._has_unforked():
            return
        if sum(map(len, self._early_lanes.values())) < MAX_EARLY_LANES:
            self._early_lanes.setdefault(pid, []).append(lanes)
        else:
            self._ucx_unheard()

    def _has_unforked(self) -> bool:
        return any(mover.pidfd < 0 for mover in self._starting.values())

    def _parent_exited(self) -> None:
        self._early_lanes.clear()
        self._parent = None
        self._library = ""
        # Movers that it had not told of: their pidfds never came, and they die with it.
        for mover in [m for m in self._starting.values() if m.pidfd < 0]:
            del self._starting[mover.mover_id]
            mover.discard()
        if not self._is_stopping and not self._reason:
            _LOG.error("the movers' parent died, and its movers with it; it is started again")
            self._refuse_waiters(MoverError("the movers' parent died; register again", Code.MOVER_LOST))
            self._restart_later()
        self._note_empty()

    def _restart_later(self) -> None:
        delay = RESTART_DELAYS_S[min(self._num_restarts, len(RESTART_DELAYS_S) - 1)]
        self._num_restarts += 1
        asyncio.get_running_loop().call_later(delay, self._start_parent)

    # --- movers on their way

    def _fill_later(self, delay_s: float = REFILL_DELAY_S) -> None:
        if self._refill is None and not self._is_stopping:
            self._refill = asyncio.get_running_loop().call_later(delay_s, self._fill)

    def _fork_again_later(self) -> None:
        delay_s = FORK_AGAIN_S[min(self._num_failed_forks, len(FORK_AGAIN_S) - 1)]
        self._num_failed_forks += 1
        if self._refill is not None:
            self._refill.cancel()
            self._refill = None
        self._fill_later(delay_s)

    def _fill(self) -> None:
        if self._refill is not None:
            self._refill.cancel()
            self._refill = None
        if self._parent is None or not self._library or self._is_stopping:
            return
        wanted = len(self._waiters)
        if not self._is_busy:
            wanted += max(0, self._size - len(self._warm))
        for _ in range(wanted - len(self._starting)):
            try:
                self._fork(self._parent)
            except (OSError, ValueError) as error:  # no descriptor is left, or the parent's end is closed
                _LOG.error("cannot ask for a mover: %s; it is tried again", error)
                self._fork_again_later()
                if len(self._waiters) <= len(self._starting):
                    return
                text = f"cannot ask for a mover: {error}; register again"
                self._refuse_one(MoverError(text, Code.MOVER_LOST))

    def _fork(self, parent: ParentProcess) -> None:
        """Ask for one more. Raises OSError or ValueError, and then keeps nothing of it."""
        mover_id = MoverId(next(self._numbers))
        agent = AgentName(f"{self._boot}/{secrets.token_hex(8)}")
        ours, theirs = socket.socketpair()
        mover = MoverHandle(mover_id, agent, ours, self._mover_said, self._mover_exited)
        self._starting[mover_id] = mover
        try:
            with theirs:
                parent.fork(mover_id, agent, theirs)
        except BaseException:
            del self._starting[mover_id]
            mover.discard()
            raise

    def _mover_said(self, mover: MoverHandle, message: FromMover) -> None:
        if isinstance(message, DisconnectSeen):
            mover.send(DisconnectJudged(number=message.number, over=self._is_over(mover)))
            return
        if not isinstance(message, Up):
            self._on_message(mover.mover_id, message)
            return
        del self._starting[mover.mover_id]
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._taken[mover.mover_id] = mover
                waiter.set_result(mover)
                return
        self._warm.append(mover)

    def _is_over(self, mover: MoverHandle) -> bool:
        """Whether a connection that the mover has lost has no read under way any more.

        Its line in the log was written before the mover could read anything: by now it is in the pipe.
        """
        if self._parent is None:
            return False
        self._parent.read_log()
        return not mover.has_unknown_lanes and lanes_prove_over(mover.lanes)

    def _mover_exited(self, mover: MoverHandle) -> None:
        if self._starting.pop(mover.mover_id, None) is not None:
            if not self._is_stopping:
                _LOG.error("a mover died before its agent was made")
            self._refuse_one(MoverError("the mover died before its agent was made", Code.MOVER_LOST))
            # Not tried again before somebody asks: a library that cannot make agents would fork for ever.
        elif self._taken.pop(mover.mover_id, None) is not None:
            self._on_exit(mover.mover_id)
        elif mover in self._warm:
            self._warm.remove(mover)
            self._fill_later()
        self._note_empty()

    def _give_back(self, mover: MoverHandle) -> None:
        """Whoever waited for it is gone."""
        if self._taken.pop(mover.mover_id, None) is not None and mover.is_alive:
            self._warm.append(mover)

    # --- those who wait

    def _refuse_one(self, error: MoverError) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)
                return

    def _refuse_waiters(self, error: MoverError) -> None:
        while self._waiters:
            self._refuse_one(error)

    def _all(self) -> list[MoverHandle]:
        return [*self._starting.values(), *self._warm, *self._taken.values()]

    def _note_empty(self) -> None:
        if self._is_stopping and self._parent is None and not self._all():
            self._empty.set()
