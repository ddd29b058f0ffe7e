"""The daemon's end of a mover that is a thread of a worker: it is asked to end, and never killed."""

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

# A worker may send as fast as it likes. One frame takes some 15 us, and a read holds 13,000 of the smallest.
# After these many the event loop's other sockets have their turn.
MAX_READS_PER_TURN, MAX_FRAMES_PER_TURN = 1, 64
STUCK_S = 2.0  # a mover that is asked to end is gone within milliseconds, or is stuck in its library


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
        self._frames: deque[Frame] = deque()  # received, and not handled yet
        self._is_read_scheduled = False  # more are handled on the event loop's next turn
        self._discards_input = False  # it sent a malformed frame: only EOF is waited for
        self._loop.add_reader(self._stream.fileno(), self._read)
        if self._worker_exit_fd >= 0:
            self._loop.add_reader(self._worker_exit_fd, self._handle_exit)

    @property
    def is_alive(self) -> bool:
        return self._stream.fileno() >= 0 and not self._end_requested

    def kill(self) -> None:
        """Ask it to end, by closing the sending side: at EOF it destroys its agent and closes. Idempotent."""
        if self.is_alive:
            self._end_requested = True
            self._loop.remove_writer(self._stream.fileno())
            self._stream.shutdown_write()
            self._loop.call_later(STUCK_S, self._log_stuck)

    def discard(self) -> None:
        """Close everything, whatever the mover does; no callback follows."""
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
        exit_fd, self._worker_exit_fd = self._worker_exit_fd, -1
        if exit_fd >= 0:
            self._loop.remove_reader(exit_fd)
            with contextlib.suppress(OSError):
                os.close(exit_fd)
