"""The daemon's end of one mover: its socket and its pidfd."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence

from kvxferd.errors import KvxferdError
from kvxferd.frame_socket import close_fds, dup_fds
from kvxferd.frame_stream import FrameStream
from kvxferd.ids import AgentName, MoverId
from kvxferd.wire.codec import FROM_MOVER, encode
from kvxferd.wire.common import Message
from kvxferd.wire.fd_batches import leading_fd_batches, start_of_last_batch
from kvxferd.wire.framing import Frame
from kvxferd.wire.mover import FromMover, MoverUp

_LOG = logging.getLogger(__name__)


class MoverHandle:
    """One mover process. Made by the pool; belongs to one rank once it is assigned.

    `pidfd` is open until `on_exit` has returned; a caller that needs it longer duplicates it.
    """

    def __init__(
        self,
        mover_id: MoverId,
        agent: AgentName,
        sock: socket.socket,
        on_message: Callable[[MoverHandle, FromMover], None],
        on_exit: Callable[[MoverHandle], None],
        on_stream_closed: Callable[[MoverHandle], None],
    ) -> None:
        """`on_stream_closed` is called where the mover closed its end or is cut off."""
        self.mover_id = mover_id
        self.agent = agent
        self.library = ""
        self.pid = -1
        self.pidfd = -1
        self._stream = FrameStream(sock, self._read, self._on_stream_end)
        self._on_message = on_message
        self._on_exit = on_exit
        self._on_stream_closed = on_stream_closed
        self._loop = asyncio.get_running_loop()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs. It may be False before `on_exit` is called."""
        if self.pidfd < 0:
            return False
        poller = select.poll()  # select would fail in a daemon of more than 1,024 descriptors
        poller.register(self.pidfd, select.POLLIN)
        return not poller.poll(0)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue a message; never blocks. Does nothing for a mover that is gone, which `on_exit` reports."""
        if self._stream.fileno() < 0:
            return
        payload = encode(message)
        copies = dup_fds(fds)  # all or none: a part of them would go with the next message
        for ahead, part in leading_fd_batches(copies):
            self._stream.send(encode(ahead), part)
        self._stream.send(payload, copies[start_of_last_batch(len(copies)) :])

    def kill(self) -> None:
        """Kill the process, whatever it is doing; `on_exit` follows. Idempotent."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    # --- for the pool

    def attach(self, pid: int, pidfd: int) -> None:
        """Begin to read from the process, which runs. Takes ownership of the pidfd."""
        self.pid = pid
        self.pidfd = pidfd
        self._stream.set_reading()
        self._loop.add_reader(pidfd, self._handle_exit)

    def discard(self) -> None:
        """Close it without a callback: the process was never made, or is of no interest any more."""
        self._stream.close()
        if self.pidfd >= 0:
            self._loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1

    def notice_exit(self) -> None:
        """Report the exit now if the process is gone, before the event loop comes to it."""
        if self.pidfd >= 0 and not self.is_alive:
            self._handle_exit()

    # --- callbacks of the event loop

    def _read(self) -> bool:
        """Deliver what has arrived; return whether there may be more."""
        return self._stream.read(self._decode_frame)

    def _on_stream_end(self, reason: str) -> None:
        if reason:
            _LOG.error("mover cut off: agent=%s reason=%s", self.agent, reason)
        self._stream.close()
        self._on_stream_closed(self)

    def _decode_frame(self, frame: Frame) -> None:
        close_fds(frame.fds)
        self._handle(FROM_MOVER.decode(frame.payload))

    def _handle(self, message: FromMover) -> None:
        if isinstance(message, MoverUp):
            self.library = message.library
        try:
            self._on_message(self, message)
        except KvxferdError as error:
            _LOG.error("mover message failed: agent=%s reason=%s", self.agent, error.message)
        except Exception:
            _LOG.exception("mover message failed: agent=%s", self.agent)

    def _handle_exit(self) -> None:
        self._loop.remove_reader(self.pidfd)
        while self._read():
            pass
        self._stream.close()
        try:
            self._on_exit(self)
        finally:
            self.discard()
