"""Resident movers in the daemon: threads of workers. Each arrives as a socket that its worker has sent.

A resident mover is asked to end, and never killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvxferd.core.ranks.movers import STUCK_S
from kvxferd.errors import Code, MoverError
from kvxferd.ids import AgentName, BootId, MoverId
from kvxferd.mover.agent_names import is_agent_name
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.mover.supervisor.pool import OnResult
from kvxferd.wire.mover import FromMover, MoverLeaving, MoverUp

_LOG = logging.getLogger(__name__)

UP_TIMEOUT_S = 20.0  # a worker's first agent takes 0.5 s; a busy engine's GIL makes that longer


class _Start(NamedTuple):
    on_result: OnResult
    timeout: asyncio.TimerHandle


class ResidentPool:
    """Accepts resident movers, once their agents are made. All methods belong to one event loop.

    `on_message` and `on_exit` are as a `MoverPool`'s; `mover_ids` is shared with it. `is_name_used`: whether
    a mover of this daemon has that agent's name.
    """

    def __init__(
        self,
        *,
        boot: BootId,
        mover_ids: Iterator[int],
        is_name_used: Callable[[AgentName], bool],
        on_message: Callable[[MoverId, FromMover], None],
        on_exit: Callable[[MoverId], None],
    ) -> None:
        self._boot = boot
        self._mover_ids = mover_ids
        self._is_name_used = is_name_used
        self._on_message = on_message
        self._on_exit = on_exit
        self._handles: dict[MoverId, ResidentHandle] = {}
        self._starting: dict[MoverId, _Start] = {}  # those of them whose agent is not made yet

    def accept(self, sock: socket.socket, worker: tuple[int, int], on_result: OnResult) -> None:
        """Call `on_result` once: with the mover at the other end of the socket, or with why it is refused.

        `worker`: as `ResidentHandle` takes it. This object owns both descriptors. The error has the mover's
        own reason and code, or mover-lost.
        """
        mover = MoverId(next(self._mover_ids))
        handle = ResidentHandle(mover, sock, worker, self._on_mover_message, self._on_mover_exit)
        self._handles[mover] = handle
        timeout = asyncio.get_running_loop().call_later(UP_TIMEOUT_S, self._give_up, mover)
        self._starting[mover] = _Start(on_result, timeout)

    def close(self) -> None:
        """Close all streams: the movers end at EOF, and their workers see when they are gone."""
        for mover in list(self._starting):
            self._refuse(mover, "cannot use a resident mover: the daemon stops")
        while self._handles:
            self._handles.popitem()[1].discard()

    def _on_mover_message(self, handle: MoverHandle, message: FromMover) -> None:
        mover = handle.mover_id
        if mover in self._starting:
            self._on_first_message(mover, message)
        elif mover in self._handles:
            self._on_message(mover, message)

    def _on_first_message(self, mover: MoverId, message: FromMover) -> None:
        match message:
            case MoverUp() if is_agent_name(message.agent, self._boot) and not self._is_name_used(
                message.agent
            ):
                self._end_start(mover, self._handles[mover])
            case MoverUp():  # peers would read it in place of another of that name
                text = f"cannot use a resident mover called {message.agent[:80]!r}: it is not free here"
                self._refuse(mover, text, Code.OUT_OF_PLACE)
            case MoverLeaving():
                self._refuse(mover, message.message, message.code)

    def _on_mover_exit(self, handle: MoverHandle) -> None:
        mover = handle.mover_id
        if mover in self._starting:
            self._refuse(mover, f"the resident mover of worker {handle.pid} ended before its agent was made")
        elif self._handles.pop(mover, None) is not None:
            self._on_exit(mover)

    def _give_up(self, mover: MoverId) -> None:
        worker = self._handles[mover].pid
        self._refuse(
            mover, f"cannot use the resident mover of worker {worker}: no agent in {UP_TIMEOUT_S:g} s"
        )

    def _refuse(self, mover: MoverId, text: str, code: Code = Code.MOVER_LOST) -> None:
        self._handles.pop(mover).discard()
        self._end_start(mover, MoverError(text, code))

    def _end_start(self, mover: MoverId, result: MoverHandle | MoverError) -> None:
        on_result, timeout = self._starting.pop(mover)
        timeout.cancel()
        on_result(result)


class ResidentHandle(MoverHandle):
    """One resident mover. `on_exit` is called when its stream has ended, or its worker is dead.

    The mover closes its end after it has destroyed its agent. EOF here means what process exit means for a
    child mover: nothing that it posted writes any more. It cannot be forced.
    """

    def __init__(
        self,
        mover_id: MoverId,
        sock: socket.socket,
        worker: tuple[int, int],
        on_message: Callable[[MoverHandle, FromMover], None],
        on_exit: Callable[[MoverHandle], None],
    ) -> None:
        """`worker`: its process id, and a descriptor that is readable once it is dead, -1 for none.

        The handle owns the descriptor. The agent's name comes with the mover's `MoverUp`.
        """
        super().__init__(mover_id, AgentName(""), sock, on_message, on_exit, on_exit)
        self.pid, self._worker_exit_fd = worker
        self._end_requested = False
        self._discards_input = False  # it is cut off: only EOF is waited for
        self._stream.set_reading()
        if self._worker_exit_fd >= 0:
            self._loop.add_reader(self._worker_exit_fd, self._handle_exit)

    @property
    def is_alive(self) -> bool:
        return self._stream.fileno() >= 0 and not self._end_requested

    def kill(self) -> None:
        """Ask it to end, by closing the sending side: at EOF it destroys its agent and closes. Idempotent."""
        if self.is_alive:
            self._end_requested = True
            self._stream.shutdown_write()
            self._loop.call_later(STUCK_S, self._log_stuck)

    def discard(self) -> None:
        """Close everything, whatever the mover does; no callback follows."""
        self._stream.close()
        self._close_worker_exit_fd()

    def _log_stuck(self) -> None:
        if self._stream.fileno() >= 0:
            # Blocks of its pulls in doubt stay out of use until it ends, or its worker does.
            _LOG.error(
                "resident mover stuck in the transfer library: agent=%s worker_pid=%d after_s=%g",
                self.agent,
                self.pid,
                STUCK_S,
            )

    def _read(self) -> bool:
        if not self._discards_input:
            return super()._read()
        if self._stream.discard_received():
            self._handle_exit()
        return False

    def _on_stream_end(self, reason: str) -> None:
        if not reason:
            self._handle_exit()
            return
        _LOG.error("resident mover cut off: agent=%s worker_pid=%d reason=%s", self.agent, self.pid, reason)
        self._discards_input = True
        self.kill()

    def _handle(self, message: FromMover) -> None:
        match message:
            case MoverUp():
                self.agent = message.agent
            case MoverLeaving():
                _LOG.warning(
                    "resident mover ended: agent=%s worker_pid=%d reason=%s",
                    self.agent,
                    self.pid,
                    message.message,
                )
        super()._handle(message)

    def _handle_exit(self) -> None:
        if self._stream.fileno() < 0:
            return
        self.discard()
        self._on_exit(self)

    def _close_worker_exit_fd(self) -> None:
        exit_fd, self._worker_exit_fd = self._worker_exit_fd, -1
        if exit_fd >= 0:
            self._loop.remove_reader(exit_fd)
            with contextlib.suppress(OSError):
                os.close(exit_fd)
