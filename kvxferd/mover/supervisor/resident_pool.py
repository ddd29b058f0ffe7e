"""Resident movers in the daemon: threads of workers. Each arrives as a socket that its worker has sent.

A resident mover is asked to end, and never killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import assert_never

from kvxferd.core.ranks.movers import STUCK_S
from kvxferd.decision_loop import DecisionLoop
from kvxferd.ids import AgentName, BootId, MoverId
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.mover.supervisor.pool import OnResult
from kvxferd.mover.supervisor.pool_effects import (
    AssignMover,
    DiscardMover,
    RefuseRequest,
    ReportExit,
    ReportMessage,
    ResidentEffect,
)
from kvxferd.mover.supervisor.pool_events import (
    MoverExited,
    MoverReported,
    ResidentEvent,
    ResidentOffered,
    StopRequested,
    TimersDue,
)
from kvxferd.mover.supervisor.resident_decisions import ResidentDecisions
from kvxferd.wire.mover import FromMover, MoverLeaving, MoverUp

_LOG = logging.getLogger(__name__)


class ResidentPool:
    """Accepts resident movers: the shell of `resident_decisions`. All methods belong to one event loop.

    `on_message` and `on_exit` are as a `MoverPool`'s; `mover_ids` is shared with it.
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
        self._mover_ids = mover_ids
        self._on_message = on_message
        self._on_exit = on_exit
        self._decisions = ResidentDecisions(boot, is_name_used)
        self._on_result: dict[int, OnResult] = {}  # of those that start
        self._handles: dict[MoverId, ResidentHandle] = {}
        self._feed = DecisionLoop[ResidentEvent, ResidentEffect](
            lambda: self._decisions, TimersDue(), self._carry_out
        ).feed

    def accept(self, sock: socket.socket, worker: tuple[int, int], on_result: OnResult) -> None:
        """Call `on_result` once: with the mover at the other end of the socket, or with why it is refused.

        `worker`: as `ResidentHandle` takes it. This object owns both descriptors. The error has the mover's
        own reason and code, or mover-lost.
        """
        number = MoverId(next(self._mover_ids))
        self._on_result[number] = on_result
        self._handles[number] = ResidentHandle(
            number, sock, worker, self._on_mover_message, self._on_mover_exit
        )
        self._feed(ResidentOffered(number, worker[0]))

    def close(self) -> None:
        """Close all streams: the movers end at EOF, and their workers see when they are gone."""
        self._feed(StopRequested())

    def _carry_out(self, effect: ResidentEffect) -> None:
        match effect:
            case AssignMover():
                self._on_result.pop(effect.request)(self._handles[effect.mover])
            case RefuseRequest():
                self._on_result.pop(effect.request)(effect.error)
            case DiscardMover():
                self._handles.pop(effect.mover).discard()
            case ReportMessage():
                self._on_message(effect.mover, effect.message)
            case ReportExit():
                del self._handles[effect.mover]
                self._on_exit(effect.mover)
            case _:
                assert_never(effect)

    def _on_mover_message(self, mover: MoverHandle, message: FromMover) -> None:
        self._feed(MoverReported(mover.mover_id, message))

    def _on_mover_exit(self, mover: MoverHandle) -> None:
        self._feed(MoverExited(mover.mover_id))


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
