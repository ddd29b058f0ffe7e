"""The daemon's movers as processes and sockets: what the core decides of them is carried out here."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial

from kvxferd.core.events import (
    Event,
    ForkserverExited,
    ForkserverReady,
    LibraryUnavailable,
    MoverDied,
    MoverMessage,
    MoverNotStarted,
)
from kvxferd.errors import Code
from kvxferd.ids import AgentName, MoverId
from kvxferd.mover import forkserver_protocol as protocol
from kvxferd.mover.backends import DEFAULT_BACKEND, Backend
from kvxferd.mover.supervisor.forkserver_client import ForkserverClient, ForkserverMessage, start_forkserver
from kvxferd.mover.supervisor.handle import MoverHandle, ResidentHandle
from kvxferd.wire.common import Message, Refusal
from kvxferd.wire.mover import FromMover

_LOG = logging.getLogger(__name__)

SHUTDOWN_S = 3.0  # of the forkserver: it may be importing the library, which it cannot leave


class MoverProcesses:
    """The forkserver, its movers, and the resident movers. All methods belong to one event loop.

    `on_event` feeds the core. A mover's `MoverDied` comes after its last message, when its process is gone
    and nothing that it posted writes any more.
    """

    def __init__(
        self,
        on_event: Callable[[Event], None],
        on_exit: Callable[[MoverHandle], None] = lambda handle: None,
        *,
        lock_fd: int | None = None,
        environment: Mapping[str, str] | None = None,
        library: str = "auto",
        backend: Backend = DEFAULT_BACKEND,
    ) -> None:
        """`on_exit` is called before a mover's `MoverDied` is fed. Movers inherit `lock_fd`.

        `library`: "nixl", "rixl", or "auto" for the first that can be imported. The movers make their agents
        by `backend`.
        """
        self.backend = backend
        self._on_event = on_event
        self._on_exit = on_exit
        self._start = partial(start_forkserver, environment or {}, library, backend, lock_fd)
        self._forkserver: ForkserverClient | None = None
        self._handles: dict[MoverId, MoverHandle] = {}  # from its fork's request until it is gone
        self._is_stopping = False
        self._stopped = asyncio.Event()

    @property
    def forkserver_pid(self) -> int | None:
        """The process id of the movers' parent; None: there is none."""
        return self._forkserver.pid if self._forkserver is not None else None

    def pids(self) -> list[int]:
        """Return the process ids of all child movers."""
        return [handle.pid for handle in self._handles.values() if handle.pidfd >= 0]

    async def stop(self) -> None:
        """End all movers and the forkserver; return when those that are processes are gone."""
        self._is_stopping = True
        for mover, handle in list(self._handles.items()):
            if isinstance(handle, ResidentHandle):  # it ends at EOF, and its worker detects when
                self._discard(mover)
            handle.kill()
        if self._forkserver is not None:
            self._forkserver.shutdown()
        limit = asyncio.get_running_loop().call_later(SHUTDOWN_S, self._kill_forkserver)
        self._set_if_stopped()
        await self._stopped.wait()
        limit.cancel()

    def _kill_forkserver(self) -> None:
        if self._forkserver is not None:
            _LOG.error("forkserver killed: reason=it has not ended in %g s", SHUTDOWN_S)
            self._forkserver.kill()

    def _set_if_stopped(self) -> None:
        if self._is_stopping and self._forkserver is None and not self._handles:
            self._stopped.set()

    # --- effects

    def start_forkserver(self) -> None:
        """Start a forkserver, unless all is to end."""
        if self._is_stopping:
            return
        try:
            self._forkserver = ForkserverClient(
                self._start, self._on_forkserver_message, self._on_forkserver_exit
            )
        except OSError as error:
            _LOG.error("forkserver not started: reason=%s", error)
            self._on_event(ForkserverExited(f"cannot start the movers' parent: {error}"))

    def fork(self, mover: MoverId, agent: AgentName) -> None:
        """Request a mover of the forkserver, unless all is to end."""
        if self._is_stopping:
            return
        try:
            self._fork(mover, agent)
        except (OSError, ValueError) as error:  # no descriptor is left, or the forkserver's end is closed
            self._not_forked(mover, str(error))

    def _fork(self, mover: MoverId, agent: AgentName) -> None:
        if self._forkserver is None:
            raise ValueError("the movers' parent is gone")
        ours, theirs = socket.socketpair()
        with theirs:
            self._handles[mover] = MoverHandle(mover, agent, ours, self._on_message, self._on_mover_exit)
            self._forkserver.fork(mover, agent, theirs)

    def _not_forked(self, mover: MoverId, reason: str) -> None:
        _LOG.error("mover not forked: mover=%d reason=%s", mover, reason)
        self._discard(mover)
        self._on_event(MoverNotStarted(mover, Refusal(Code.MOVER_LOST, f"cannot fork a mover: {reason}")))

    def accept(self, mover: MoverId, sock: socket.socket, worker: tuple[int, int]) -> None:
        """Take a resident mover. `worker`: as `ResidentHandle`, which owns both descriptors."""
        self._handles[mover] = ResidentHandle(mover, sock, worker, self._on_message, self._on_mover_exit)

    def kill(self, mover: MoverId) -> None:
        """Kill the mover, or request a resident one to end. Does nothing where it is gone."""
        handle = self._handles.get(mover)
        if handle is None:
            return
        handle.kill()
        if handle.is_unforked:
            self._discard(mover)  # the forkserver may fork it yet: it ends where its socket is closed

    def send(self, mover: MoverId, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message. Does nothing where the mover is gone. Raises OSError: no descriptor is left."""
        if handle := self._handles.get(mover):
            handle.send(message, fds)

    def dup_pidfd(self, mover: MoverId) -> tuple[int, ...]:
        """Return a copy of the mover's pidfd; none if it has exited. Raises OSError."""
        handle = self._handles.get(mover)
        return (os.dup(handle.pidfd),) if handle is not None else ()

    def _discard(self, mover: MoverId) -> None:
        if handle := self._handles.pop(mover, None):
            handle.discard()

    # --- events

    def _on_forkserver_message(self, message: ForkserverMessage, pidfd: int) -> None:
        match message:
            case protocol.LibraryLoaded():
                self._on_event(ForkserverReady(message.library))
            case protocol.LibraryUnavailable():
                _LOG.error("transfer library unavailable: reason=%s", message.reason)
                self._on_event(LibraryUnavailable(message.reason))
            case protocol.Forked():
                handle = self._handles.get(message.mover)
                if handle is not None and handle.is_unforked:
                    handle.attach(message.pid, pidfd)
                else:
                    os.close(pidfd)
            case protocol.ForkFailed():
                self._not_forked(message.mover, message.reason)

    def _on_forkserver_exit(self) -> None:
        self._forkserver = None
        for mover, handle in list(self._handles.items()):
            if handle.is_unforked:
                self._discard(mover)
        if not self._is_stopping:
            _LOG.error("forkserver died")  # and its movers with it; the core starts another
            self._on_event(ForkserverExited("the movers' parent died; register again"))
        self._set_if_stopped()

    def _on_message(self, handle: MoverHandle, message: FromMover) -> None:
        self._on_event(MoverMessage(handle.mover_id, message))

    def _on_mover_exit(self, handle: MoverHandle) -> None:
        self._handles.pop(handle.mover_id, None)
        if not self._is_stopping:
            self._on_exit(handle)
        self._on_event(MoverDied(handle.mover_id))
        self._set_if_stopped()
