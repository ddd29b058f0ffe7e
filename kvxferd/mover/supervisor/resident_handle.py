"""The daemon's end of a mover that is a thread of a worker: told to end, never killed."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable

from kvxferd.errors import ProtocolError
from kvxferd.frame_socket import close_fds
from kvxferd.ids import AgentName, MoverId
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.wire.framing import Frame
from kvxferd.wire.mover import FromMover, MoverLeaving, MoverUp

_LOG = logging.getLogger(__name__)

# A worker may send as fast as it likes. One frame takes some 15 us, a read holds 13,000 of the smallest:
# then the loop's other sockets have their turn.
MAX_READS_PER_TURN, MAX_FRAMES_PER_TURN = 1, 64
STUCK_S = 2.0  # one that was told to end is gone within milliseconds, or is stuck in its library


class ResidentHandle(MoverHandle):
    """One resident mover. `on_exit` comes when its stream has ended, or its worker is dead.

    The mover closes its end after it has destroyed its agent, so the stream's end is what a dead
    process is of a child: nothing that it posted writes any more. Nobody can force it to come.
    """

    def __init__(
        self,
        mover_id: MoverId,
        sock: socket.socket,
        worker: tuple[int, int],
        on_message: Callable[[MoverHandle, FromMover], None],
        on_exit: Callable[[MoverHandle], None],
    ) -> None:
        """`worker`: its process id, and a descriptor that is readable once it is dead; -1: there is none.

        The descriptor is the handle's from here on. The agent's name comes with the mover's `Up`.
        """
        super().__init__(mover_id, AgentName(""), sock, on_message, on_exit)
        self.pid, self._worker_exit_fd = worker
        self._end_requested = False
        self._frames: deque[Frame] = deque()  # and not dealt with yet
        self._is_read_scheduled = False  # more of them on the loop's next turn
        self._discards_input = False  # it has spoken nonsense: only its end is waited for
        self._loop.add_reader(self._stream.fileno(), self._read)
        if self._worker_exit_fd >= 0:
            self._loop.add_reader(self._worker_exit_fd, self._handle_exit)

    @property
    def is_alive(self) -> bool:
        return self._stream.fileno() >= 0 and not self._end_requested

    def kill(self) -> None:
        """Have it end: it reads the end of its stream, destroys its agent, and closes. Idempotent."""
        if self.is_alive:
            self._end_requested = True
            self._loop.remove_writer(self._stream.fileno())
            self._stream.shutdown_write()
            self._loop.call_later(STUCK_S, self._log_stuck)

    def discard(self) -> None:
        """Let go of it, whatever it does: no callback will come."""
        self._drop_frames()
        self._close_stream()
        self._close_worker_exit_fd()

    def _log_stuck(self) -> None:
        if self._stream.fileno() >= 0:
            _LOG.error(
                "resident mover %s was told to end %g s ago and has not: its agent is stuck in the transfer "
                "library; blocks of its pulls in doubt stay out of use until it ends, or worker %d does",
                self.agent,
                STUCK_S,
                self.pid,
            )

    def _read(self) -> bool:
        frames: list[Frame] | None = []
        try:
            if not self._frames and not self._discards_input:
                frames = self._stream.receive(MAX_READS_PER_TURN, MAX_FRAMES_PER_TURN)
                self._frames.extend(frames or ())
            for _ in range(min(MAX_FRAMES_PER_TURN, len(self._frames))):
                frame = self._frames.popleft()
                self._decode_frame(frame.payload, frame.fds)
                if self._stream.fileno() < 0:
                    return False
        except ProtocolError as error:
            _LOG.error("resident mover %s speaks nonsense and is told to end: %s", self.agent, error.message)
            self._discards_input = True
            self._drop_frames()
            self.kill()
            return False
        if frames is None or (self._discards_input and self._stream.discard_received()):
            self._handle_exit()
            return False
        has_more = bool(self._frames) or (self._stream.has_buffered_frames and not self._discards_input)
        if has_more and not self._is_read_scheduled:
            self._is_read_scheduled = True
            self._loop.call_soon(self._read_more)
        return has_more

    def _read_more(self) -> None:
        self._is_read_scheduled = False
        if self._stream.fileno() >= 0:
            self._read()

    def _drop_frames(self) -> None:
        while self._frames:
            close_fds(self._frames.popleft().fds)

    def _handle(self, message: FromMover) -> None:
        match message:
            case MoverUp():
                self.agent = message.agent
            case MoverLeaving():
                _LOG.warning("resident mover %s of worker %d ends: %s", self.agent, self.pid, message.message)
        super()._handle(message)

    def _handle_exit(self) -> None:
        if self._stream.fileno() < 0:
            return
        self.discard()
        self._on_exit(self)

    def _close_worker_exit_fd(self) -> None:
        death, self._worker_exit_fd = self._worker_exit_fd, -1
        if death >= 0:
            self._loop.remove_reader(death)
            with contextlib.suppress(OSError):
                os.close(death)
