"""The daemon's end of one mover: of a child its socket and its pidfd, of a resident mover its socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence

from kvxferd.frame_socket import close_fds, dup_fds
from kvxferd.frame_stream import FrameStream
from kvxferd.ids import AgentName, MoverId
from kvxferd.wire.codec import FROM_MOVER, encode
from kvxferd.wire.common import Message
from kvxferd.wire.fd_batches import leading_fd_batches, start_of_last_batch
from kvxferd.wire.framing import Frame
from kvxferd.wire.mover import FromMover, MoverLeaving, MoverUp

_LOG = logging.getLogger(__name__)

STUCK_S = 2.0  # a resident mover that must end is gone within milliseconds, or is stuck in its library


class MoverHandle:
    """One mover process. `pidfd` is open until `on_exit` has returned; who needs it longer duplicates it."""

    def __init__(
        self,
        mover_id: MoverId,
        agent: AgentName,
        sock: socket.socket,
        on_message: Callable[[MoverHandle, FromMover], None],
        on_exit: Callable[[MoverHandle], None],
    ) -> None:
        """`on_exit` is called once, after the last message, when nothing that it posted writes any more."""
        self.mover_id = mover_id
        self.agent = agent
        self.library = ""
        self.pid = -1
        self.pidfd = -1
        self._stream = FrameStream(sock, self._read, self._on_stream_end)
        self._on_message = on_message
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()

    @property
    def is_unforked(self) -> bool:
        """Whether it has no process yet."""
        return self.pid < 0

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue a message; never blocks. Does nothing for a mover that is gone, which `on_exit` reports."""
        if self._stream.fileno() < 0:
            return
        payload = encode(message)
        if not fds:
            self._stream.send(payload)
            return
        copies = dup_fds(fds)  # all or none: a part of them would go with the next message
        for ahead, part in leading_fd_batches(copies):
            self._stream.send(encode(ahead), part)
        self._stream.send(payload, copies[start_of_last_batch(len(copies)) :])

    def kill(self) -> None:
        """Kill the process, whatever it is doing; `on_exit` follows. Idempotent."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    # --- for `MoverProcesses`

    def attach(self, pid: int, pidfd: int) -> None:
        """Begin to read from the process, which runs. Takes ownership of the pidfd."""
        self.pid = pid
        self.pidfd = pidfd
        self._stream.set_reading()
        self._loop.add_reader(pidfd, self._handle_exit)

    def discard(self) -> None:
        """Close everything without a callback: the process was never made, or is gone. Idempotent."""
        self._stream.close()
        if self.pidfd >= 0:
            self._loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1

    # --- callbacks of the event loop

    def _read(self) -> bool:
        """Deliver what has arrived; return whether there may be more."""
        return self._stream.read(self._decode_frame)

    def _on_stream_end(self, reason: str) -> None:
        if reason:
            _LOG.error("mover cut off: agent=%s reason=%s", self.agent, reason)
        self._stream.close()
        self.kill()  # it cannot be reached any more

    def _decode_frame(self, frame: Frame) -> None:
        close_fds(frame.fds)
        self._handle(FROM_MOVER.decode(frame.payload))

    def _handle(self, message: FromMover) -> None:
        if isinstance(message, MoverUp):
            self.library = message.library
        self._on_message(self, message)

    def _handle_exit(self) -> None:
        self._loop.remove_reader(self.pidfd)
        while self._read():
            pass
        self._stream.close()
        try:
            self._on_exit(self)
        finally:
            self.discard()


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
        super().__init__(mover_id, AgentName(""), sock, on_message, on_exit)
        self.pid, self._worker_exit_fd = worker
        self._end_requested = False
        self._discards_input = False  # it is cut off: only EOF is waited for
        self._stream.set_reading()
        if self._worker_exit_fd >= 0:
            self._loop.add_reader(self._worker_exit_fd, self._handle_exit)

    def kill(self) -> None:
        """Ask it to end, by closing the sending side: at EOF it destroys its agent and closes. Idempotent."""
        if self._stream.fileno() >= 0 and not self._end_requested:
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
