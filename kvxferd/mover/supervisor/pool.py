"""The daemon's pool of movers. Some are kept ready, so that a registration need not wait for a fork.

This is the shell of `pool_decisions`: processes, sockets and the clock.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import assert_never

from kvxferd.decision_loop import DecisionLoop
from kvxferd.errors import MoverError
from kvxferd.ids import BootId, MoverId
from kvxferd.mover.agent_names import new_agent_name
from kvxferd.mover.backends import DEFAULT_BACKEND, Backend
from kvxferd.mover.forkserver_protocol import Forked, ForkFailed, LibraryUnavailable
from kvxferd.mover.supervisor.forkserver_client import ForkserverClient, ForkserverMessage, start_forkserver
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.mover.supervisor.pool_decisions import PoolDecisions, PoolStatus
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
from kvxferd.wire.mover import FromMover

_LOG = logging.getLogger(__name__)

OnResult = Callable[[MoverHandle | MoverError], None]


class MoverPool:
    """Keeps `size` movers ready. All methods belong to the event loop that called `start`.

    `on_message` gets the messages of assigned movers, in order. `on_exit` is called once for each assigned
    mover, after its last message, when its process is gone and nothing that it posted writes any more.
    """

    def __init__(
        self,
        *,
        boot: BootId,
        size: int,
        on_message: Callable[[MoverId, FromMover], None],
        on_exit: Callable[[MoverId], None],
        lock_fd: int | None = None,
        environment: Mapping[str, str] | None = None,
        library: str = "auto",
        backend: Backend = DEFAULT_BACKEND,
        mover_ids: Iterator[int] | None = None,
    ) -> None:
        """`mover_ids` yields ids for new movers, and is shared with every other maker of movers.

        `library`: "nixl", "rixl", or "auto" for the first that can be imported. The movers make their agents
        by `backend`.
        """
        self._on_message = on_message
        self._on_exit = on_exit
        self._start = partial(start_forkserver, environment or {}, library, backend, lock_fd)
        self._decisions = PoolDecisions(
            size=size,
            mover_ids=itertools.count(1) if mover_ids is None else mover_ids,
            new_agent=lambda: new_agent_name(boot),
        )
        self._forkserver: ForkserverClient | None = None
        self._handles: dict[MoverId, MoverHandle] = {}  # from its fork's request until it is gone
        self._on_result: dict[int, OnResult] = {}  # by request
        self._requests = itertools.count(1)
        self._feed = DecisionLoop[PoolEvent, PoolEffect](
            lambda: self._decisions, TimersDue(), self._carry_out
        ).feed
        self._stopped = asyncio.Event()

    async def start(self) -> None:
        """Start the forkserver; the first movers get ready while the caller goes on."""
        self._feed(Started())

    def request(self, on_result: OnResult) -> None:
        """Call `on_result` once: with a mover that is ready, now or later, or with why there is none.

        The error's code is nixl-unavailable, or mover-lost where another request may succeed.
        """
        self._notice_exits()
        number = next(self._requests)
        self._on_result[number] = on_result
        self._feed(MoverRequested(number))

    def set_busy(self, busy: bool) -> None:
        """While busy, fork only the movers that were requested."""
        if self._decisions.is_changed_by(busy):
            self._feed(BusyChanged(busy))

    def status(self) -> PoolStatus:
        """Return how many movers there are and of which library, or why there are none."""
        return self._decisions.status()

    @property
    def num_died_starting(self) -> int:
        """How many movers died before their agent was made."""
        return self._decisions.num_died_starting

    @property
    def num_died_unassigned(self) -> int:
        """How many movers died ready, before a rank had them."""
        return self._decisions.num_died_unassigned

    @property
    def forkserver_pid(self) -> int | None:
        """The process id of the movers' parent; None: there is none."""
        return self._forkserver.pid if self._forkserver is not None else None

    def pids(self) -> list[int]:
        """Return the process ids of all movers that have been forked."""
        return [handle.pid for handle in self._handles.values() if handle.pid > 0]

    async def stop(self) -> None:
        """Kill all movers and the forkserver; return when they are gone."""
        self._feed(StopRequested())
        await self._stopped.wait()

    # --- events in

    def _notice_exits(self) -> None:
        """Notice the exits of ready movers that the event loop has not come to."""
        for mover in self._decisions.warm():
            self._handles[mover].notice_exit()

    def _on_forkserver_message(self, message: ForkserverMessage, pidfd: int) -> None:
        match message:
            case LibraryUnavailable():
                _LOG.error("transfer library unavailable: reason=%s", message.reason)
            case Forked():
                handle = self._handles.get(message.mover)
                if handle is None or handle.pidfd >= 0:
                    os.close(pidfd)
                else:
                    handle.attach(message.pid, pidfd)
            case ForkFailed():
                _LOG.error("mover not forked: mover=%d reason=%s", message.mover, message.reason)
        self._feed(message)

    def _on_forkserver_exit(self) -> None:
        self._forkserver = None
        self._feed(ForkserverExited())

    def _on_mover_message(self, mover: MoverHandle, message: FromMover) -> None:
        self._feed(MoverReported(mover.mover_id, message))

    # --- effects out

    def _carry_out(self, effect: PoolEffect) -> None:
        match effect:
            case StartForkserver():
                self._start_forkserver()
            case ShutDownForkserver():
                if self._forkserver is not None:
                    self._forkserver.shutdown()
            case KillForkserver():
                if self._forkserver is not None:
                    _LOG.error("forkserver killed: reason=%s", effect.reason)
                    self._forkserver.kill()
            case RequestFork():
                self._request_fork(effect)
            case AssignMover():
                self._on_result.pop(effect.request)(self._handles[effect.mover])
            case RefuseRequest():
                self._on_result.pop(effect.request)(effect.error)
            case KillProcess():
                self._kill(effect)
            case DiscardMover():
                if handle := self._handles.pop(effect.mover, None):
                    handle.discard()
            case ReportMessage():
                self._on_message(effect.mover, effect.message)
            case ReportExit():
                self._on_exit(effect.mover)
            case ReportForkserverDeath():
                _LOG.error("forkserver died")  # and its movers with it; it is started again
            case ReportEarlyDeath():
                if effect.was_starting:
                    _LOG.error("mover died before its agent was made: mover=%d", effect.mover)
                else:
                    _LOG.error("mover died before a rank had it: mover=%d", effect.mover)
            case ReportStopped():
                self._stopped.set()
            case _:
                assert_never(effect)

    def _start_forkserver(self) -> None:
        try:
            self._forkserver = ForkserverClient(
                self._start,
                self._on_forkserver_message,
                self._on_forkserver_exit,
            )
        except OSError as error:
            _LOG.error("forkserver not started: reason=%s", error)
            self._feed(ForkserverNotStarted(str(error)))

    def _request_fork(self, effect: RequestFork) -> None:
        try:
            self._fork(effect)
        except (OSError, ValueError) as error:  # no descriptor is left, or the forkserver's end is closed
            _LOG.error("mover not requested: reason=%s", error)
            self._feed(ForkNotSent(effect.mover, str(error)))

    def _fork(self, effect: RequestFork) -> None:
        """Request one more mover. Raises OSError or ValueError; `ForkNotSent` then drops its handle."""
        if self._forkserver is None:
            raise ValueError("the movers' parent is gone")
        ours, theirs = socket.socketpair()
        with theirs:
            self._handles[effect.mover] = MoverHandle(
                effect.mover,
                effect.agent,
                ours,
                self._on_mover_message,
                lambda mover: self._feed(MoverExited(mover.mover_id)),
                lambda mover: self._feed(MoverStreamClosed(mover.mover_id)),
            )
            self._forkserver.fork(effect.mover, effect.agent, theirs)

    def _kill(self, effect: KillProcess) -> None:
        handle = self._handles.get(effect.mover)
        if handle is None:
            return
        if effect.reason:
            _LOG.error("mover killed: mover=%d reason=%s", effect.mover, effect.reason)
        handle.kill()
