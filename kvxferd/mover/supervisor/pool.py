"""The daemon's pool of movers. Some are kept ready, so that a registration need not wait for a fork."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvxferd.core.ucx_log import TransportsUsed, UcxLine, is_about_connection, parse_transports
from kvxferd.errors import Code, MoverError
from kvxferd.ids import BootId, MoverId
from kvxferd.mover.agent_names import new_agent_name
from kvxferd.mover.backends import BACKEND_VARIABLE, DEFAULT_BACKEND, Backend, backend_to_text
from kvxferd.mover.disconnects import transports_prove_over
from kvxferd.mover.forkserver_protocol import Forked, ForkFailed, LibraryLoaded, LibraryUnavailable
from kvxferd.mover.supervisor.forkserver_client import ForkserverClient, ForkserverMessage
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.wire.mover import DisconnectJudged, DisconnectSeen, FromMover, MoverUp

_LOG = logging.getLogger(__name__)

REFILL_DELAY_S = 0.25  # after a mover was acquired: its registration goes first
MAX_EARLY_TRANSPORTS = 256  # lines; a mover writes fewer than 10 of them before its first pull
RESTART_DELAYS_S = (0.1, 0.5, 2.0, 5.0)  # of a forkserver that dies; the last one repeats
# Where a mover cannot be forked, because descriptors or processes are short; the last one repeats.
FORK_RETRY_DELAYS_S = (0.25, 0.5, 2.0, 5.0)


class PoolStatus(NamedTuple):
    """The pool's state, for people."""

    num_warm: int  # ready, and assigned to no rank
    num_starting: int
    num_assigned: int
    library: str  # "" until the forkserver has imported one
    reason: str  # why there are no movers; "" where there can be some


class MoverPool:
    """Keeps `size` movers ready. All methods belong to the event loop that called `start`.

    `on_message` gets the messages of acquired movers, in order. `on_exit` is called once for each acquired
    mover, after its last message, when its process is gone and nothing that it posted writes any more.
    `on_transports` gets the transports of each new connection of an acquired mover; the earlier ones are in
    its handle. `on_crash` is called for the forkserver and for each mover that died before it was acquired.
    """

    def __init__(
        self,
        *,
        boot: BootId,
        size: int,
        on_message: Callable[[MoverId, FromMover], None],
        on_exit: Callable[[MoverId], None],
        on_transports: Callable[[MoverId, TransportsUsed], None] = lambda mover, lanes: None,
        on_crash: Callable[[], None] = lambda: None,
        lock_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        library: str = "auto",
        backend: Backend = DEFAULT_BACKEND,
        mover_ids: Iterator[int] | None = None,
    ) -> None:
        """`mover_ids` yields ids for new movers, and is shared with every other maker of movers."""
        self._boot = boot
        self._size = size
        self._on_message = on_message
        self._on_exit = on_exit
        self._on_transports = on_transports
        self._on_crash = on_crash
        self._early_transports: dict[int, list[TransportsUsed]] = {}  # by process id
        self._lock_fds = tuple(lock_fds)
        self._backend = backend
        # By which the movers make their agents, and by which their lost connections are judged.
        self._environment = {**(environment or {}), BACKEND_VARIABLE: backend_to_text(backend)}
        self._library_choice = library  # "nixl", "rixl", or "auto" for the first that can be imported
        self._forkserver: ForkserverClient | None = None
        self._library = ""
        self._reason = ""
        self._num_restarts = 0
        self._num_failed_forks = 0  # since the last fork that succeeded
        self._is_busy = False
        self._is_stopping = False
        self._mover_ids = itertools.count(1) if mover_ids is None else mover_ids
        self._starting: dict[MoverId, MoverHandle] = {}
        self._warm: deque[MoverHandle] = deque()
        self._assigned: dict[MoverId, MoverHandle] = {}
        self._waiters: deque[asyncio.Future[MoverHandle]] = deque()
        self._refill: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self.num_died_starting = 0  # movers that died before their agent was made
        self.num_died_unassigned = 0  # and before a rank had them

    async def start(self) -> None:
        """Start the forkserver; the first movers get ready while the caller goes on."""
        self._start_forkserver()

    async def acquire(self) -> MoverHandle:
        """Return a ready mover, or wait for a new one.

        Raises MoverError: nixl-unavailable with the reason, or mover-lost where the new one died.
        """
        if self._reason:
            raise MoverError(self._reason, Code.NIXL_UNAVAILABLE)
        if self._is_stopping:
            raise MoverError("cannot take a mover: the pool is stopping", Code.MOVER_LOST)
        self._fill_later()
        while self._warm:
            mover = self._warm.popleft()
            if mover.is_alive:
                self._assigned[mover.mover_id] = mover
                return mover
        waiter: asyncio.Future[MoverHandle] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            self._fill()
            return await waiter
        except BaseException:
            with suppress(ValueError):  # it was removed when it was given a mover or an error
                self._waiters.remove(waiter)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release_unclaimed(waiter.result())
            raise

    def set_busy(self, busy: bool) -> None:
        """While busy, fork only the movers for which a caller of `acquire` waits."""
        self._is_busy = busy
        if not busy:
            self._fill_later()

    def status(self) -> PoolStatus:
        """Return how many movers there are and of which library, or why there are none."""
        return PoolStatus(
            len(self._warm), len(self._starting), len(self._assigned), self._library, self._reason
        )

    @property
    def forkserver_pid(self) -> int | None:
        """The process id of the movers' parent; None: there is none."""
        return self._forkserver.pid if self._forkserver is not None else None

    def pids(self) -> list[int]:
        """Return the process ids of all movers that have been forked."""
        return [mover.pid for mover in self._all_movers() if mover.pid > 0]

    async def stop(self) -> None:
        """Kill all movers and the forkserver; return when they are gone."""
        self._is_stopping = True
        if self._refill is not None:
            self._refill.cancel()
        self._fail_waiters(MoverError("cannot take a mover: the pool is stopping", Code.MOVER_LOST))
        for mover in self._all_movers():
            mover.kill()
        if self._forkserver is not None:
            self._forkserver.shutdown()
        self._signal_if_empty()
        await self._empty.wait()

    # --- the forkserver

    def _start_forkserver(self) -> None:
        if self._is_stopping:
            return
        try:
            self._forkserver = ForkserverClient(
                self._environment,
                self._library_choice,
                self._lock_fds,
                self._on_forkserver_message,
                self._on_forkserver_exit,
                self._on_ucx_line,
                self._on_ucx_lines_lost,
            )
        except OSError as error:
            _LOG.error("forkserver not started: reason=%s", error)
            self._fail_waiters(MoverError(f"cannot start the movers' parent: {error}", Code.MOVER_LOST))
            self._restart_later()

    def _on_forkserver_message(self, message: ForkserverMessage, pidfd: int) -> None:
        match message:
            case LibraryLoaded():
                self._library = message.library
                self._num_restarts = 0
                self._fill()
            case LibraryUnavailable():
                _LOG.error("transfer library unavailable: reason=%s", message.reason)
                self._reason = message.reason
                self._fail_waiters(MoverError(message.reason, Code.NIXL_UNAVAILABLE))
            case Forked():
                self._num_failed_forks = 0
                mover = self._starting[message.mover]
                mover.attach(message.pid, pidfd)
                mover.transports_used += self._early_transports.pop(message.pid, [])
                if not self._has_pending_forks():
                    self._early_transports.clear()
                if self._is_stopping:
                    mover.kill()
            case ForkFailed():
                _LOG.error("mover not forked: mover=%d reason=%s", message.mover, message.reason)
                self._starting.pop(message.mover).discard()
                if not self._has_pending_forks():
                    self._early_transports.clear()
                self._fail_one_waiter(MoverError(f"cannot fork a mover: {message.reason}", Code.MOVER_LOST))
                self._retry_fork_later()

    def _on_ucx_lines_lost(self) -> None:
        """Lines may be lost, and they may be of any mover."""
        for mover in self._all_movers():
            mover.has_unknown_transports = True

    def _on_ucx_line(self, line: UcxLine) -> None:
        if not is_about_connection(line.text):
            return
        used = parse_transports(line.text)
        if used is None:  # an unknown version of UCX wrote it, so every mover's lines are unreadable
            self._on_ucx_lines_lost()
            return
        mover = next((mover for mover in self._all_movers() if mover.pid == line.pid), None)
        if mover is None:
            self._keep_early_transports(line.pid, used)
            return
        mover.transports_used.append(used)
        if mover.mover_id in self._assigned:
            self._on_transports(mover.mover_id, used)

    def _keep_early_transports(self, pid: int, used: TransportsUsed) -> None:
        """Keep a line of a mover whose `Forked` may still arrive, as that comes by another descriptor.

        Where no fork is pending, the line is that of a dead mover or of no mover.
        """
        if not self._has_pending_forks():
            return
        if sum(map(len, self._early_transports.values())) < MAX_EARLY_TRANSPORTS:
            self._early_transports.setdefault(pid, []).append(used)
        else:
            self._on_ucx_lines_lost()

    def _has_pending_forks(self) -> bool:
        return any(mover.pidfd < 0 for mover in self._starting.values())

    def _on_forkserver_exit(self) -> None:
        self._early_transports.clear()
        self._forkserver = None
        self._library = ""
        # Their pidfds never came, and they die with the forkserver.
        for mover in [m for m in self._starting.values() if m.pidfd < 0]:
            del self._starting[mover.mover_id]
            mover.discard()
        if not self._is_stopping and not self._reason:
            _LOG.error("forkserver died")  # and its movers with it; it is started again
            self._on_crash()
            self._fail_waiters(MoverError("the movers' parent died; register again", Code.MOVER_LOST))
            self._restart_later()
        self._signal_if_empty()

    def _restart_later(self) -> None:
        delay = RESTART_DELAYS_S[min(self._num_restarts, len(RESTART_DELAYS_S) - 1)]
        self._num_restarts += 1
        asyncio.get_running_loop().call_later(delay, self._start_forkserver)

    # --- movers that start

    def _fill_later(self, delay_s: float = REFILL_DELAY_S) -> None:
        if self._refill is None and not self._is_stopping:
            self._refill = asyncio.get_running_loop().call_later(delay_s, self._fill)

    def _retry_fork_later(self) -> None:
        delay_s = FORK_RETRY_DELAYS_S[min(self._num_failed_forks, len(FORK_RETRY_DELAYS_S) - 1)]
        self._num_failed_forks += 1
        if self._refill is not None:
            self._refill.cancel()
            self._refill = None
        self._fill_later(delay_s)

    def _fill(self) -> None:
        if self._refill is not None:
            self._refill.cancel()
            self._refill = None
        if self._forkserver is None or not self._library or self._is_stopping:
            return
        wanted = len(self._waiters)
        if not self._is_busy:
            wanted += max(0, self._size - len(self._warm))
        for _ in range(wanted - len(self._starting)):
            try:
                self._fork(self._forkserver)
            except (OSError, ValueError) as error:  # no descriptor is left, or the forkserver's end is closed
                _LOG.error("mover not requested: reason=%s", error)
                self._retry_fork_later()
                if len(self._waiters) <= len(self._starting):
                    return
                text = f"cannot ask for a mover: {error}; register again"
                self._fail_one_waiter(MoverError(text, Code.MOVER_LOST))

    def _fork(self, forkserver: ForkserverClient) -> None:
        """Request one more mover. Raises OSError or ValueError, and then keeps nothing of it."""
        mover_id = MoverId(next(self._mover_ids))
        agent = new_agent_name(self._boot)
        ours, theirs = socket.socketpair()
        mover = MoverHandle(mover_id, agent, ours, self._on_mover_message, self._on_mover_exit)
        self._starting[mover_id] = mover
        try:
            with theirs:
                forkserver.fork(mover_id, agent, theirs)
        except BaseException:
            del self._starting[mover_id]
            mover.discard()
            raise

    def _on_mover_message(self, mover: MoverHandle, message: FromMover) -> None:
        if isinstance(message, DisconnectSeen):
            mover.send(DisconnectJudged(number=message.number, over=self._has_no_reads_left(mover)))
            return
        if not isinstance(message, MoverUp):
            self._on_message(mover.mover_id, message)
            return
        del self._starting[mover.mover_id]
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._assigned[mover.mover_id] = mover
                waiter.set_result(mover)
                return
        self._warm.append(mover)

    def _has_no_reads_left(self, mover: MoverHandle) -> bool:
        """Whether no read is in flight any more on a connection that the mover has lost.

        UCX wrote the connection's line before the mover could read over it, so the line is in the pipe.
        """
        if self._forkserver is None:
            return False
        self._forkserver.read_stderr()
        return not mover.has_unknown_transports and transports_prove_over(
            self._backend, mover.transports_used
        )

    def _on_mover_exit(self, mover: MoverHandle) -> None:
        if self._starting.pop(mover.mover_id, None) is not None:
            if not self._is_stopping:
                self.num_died_starting += 1
                _LOG.error("mover died before its agent was made: mover=%d", mover.mover_id)
                self._on_crash()
            self._fail_one_waiter(MoverError("the mover died before its agent was made", Code.MOVER_LOST))
            # The next `acquire` tries again: with a library that cannot make agents this would fork for ever.
        elif self._assigned.pop(mover.mover_id, None) is not None:
            self._on_exit(mover.mover_id)
        elif mover in self._warm:
            self._warm.remove(mover)
            if not self._is_stopping:
                self.num_died_unassigned += 1
                self._on_crash()
            self._fill_later()
        self._signal_if_empty()

    def _release_unclaimed(self, mover: MoverHandle) -> None:
        """Make a mover warm again whose waiter was cancelled."""
        if self._assigned.pop(mover.mover_id, None) is not None and mover.is_alive:
            self._warm.append(mover)

    # --- callers that wait

    def _fail_one_waiter(self, error: MoverError) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)
                return

    def _fail_waiters(self, error: MoverError) -> None:
        while self._waiters:
            self._fail_one_waiter(error)

    def _all_movers(self) -> list[MoverHandle]:
        return [*self._starting.values(), *self._warm, *self._assigned.values()]

    def _signal_if_empty(self) -> None:
        if self._is_stopping and self._forkserver is None and not self._all_movers():
            self._empty.set()
