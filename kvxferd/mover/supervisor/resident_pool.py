"""Resident movers in the daemon: threads of workers. Each arrives as a socket that its worker has sent.

A resident mover is asked to end, and never killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator

from kvxferd.core.movers import STUCK_S
from kvxferd.errors import Code, MoverError, ProtocolError
from kvxferd.frame_socket import close_fds
from kvxferd.ids import AgentName, BootId, MoverId
from kvxferd.mover.agent_names import is_agent_name
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.wire.framing import Frame
from kvxferd.wire.mover import DisconnectSeen, FromMover, MoverLeaving, MoverUp

_LOG = logging.getLogger(__name__)

MAX_UNREAD_REPLY_BYTES = 1 << 20  # 30,000 replies
UP_TIMEOUT_S = 20.0  # a worker's first agent takes 0.5 s; a busy engine's GIL makes that longer

# A worker may send as fast as it likes. One frame takes some 15 us, and a read holds 13,000 of the smallest.
# After these many the event loop's other sockets have their turn.
MAX_READS_PER_TURN, MAX_FRAMES_PER_TURN = 1, 64


class ResidentPool:
    """Accepts resident movers. All methods belong to one event loop.

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
        self._boot = boot
        self._mover_ids = mover_ids
        self._is_name_used = is_name_used  # whether a mover of this daemon has that agent's name
        self._on_message = on_message
        self._on_exit = on_exit
        self._starting: dict[MoverId, asyncio.Future[None]] = {}  # done once the agent is made
        self._handles: dict[MoverId, ResidentHandle] = {}

    async def accept(self, sock: socket.socket, worker: tuple[int, int]) -> ResidentHandle:
        """Return the mover at the other end of the socket once its agent is made.

        `worker`: as `ResidentHandle` takes it. This object owns both descriptors. Raises MoverError: with the
        mover's own reason, or mover-lost.
        """
        number = MoverId(next(self._mover_ids))
        handle = ResidentHandle(number, sock, worker, self._on_mover_message, self._on_mover_exit)
        self._handles[number] = handle
        self._starting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(UP_TIMEOUT_S):
                await self._starting[number]
        except BaseException as error:
            del self._handles[number]
            handle.discard()
            if isinstance(error, TimeoutError):
                raise MoverError(
                    f"cannot use the resident mover of worker {worker[0]}: no agent in {UP_TIMEOUT_S:g} s",
                    Code.MOVER_LOST,
                ) from None
            raise
        finally:
            del self._starting[number]
        return handle

    def close(self) -> None:
        """Close all streams: the movers end at EOF, and their workers see when they are gone."""
        for handle in self._handles.values():
            handle.discard()
        self._handles.clear()

    def _on_mover_message(self, mover: MoverHandle, message: FromMover) -> None:
        waiting = self._starting.get(mover.mover_id)
        if isinstance(message, DisconnectSeen) and mover.num_queued_bytes > MAX_UNREAD_REPLY_BYTES:
            return  # it sends requests and does not read the replies, which would fill this daemon's memory
        if waiting is None:
            if mover.mover_id in self._handles:
                self._on_message(mover.mover_id, message)
            return
        if waiting.done():
            return
        match message:
            case MoverUp() if self._is_name_free(message.agent):
                waiting.set_result(None)
            case MoverUp():
                text = f"cannot use a resident mover called {message.agent[:80]!r}: it is not free here"
                waiting.set_exception(MoverError(text, Code.OUT_OF_PLACE))
            case MoverLeaving():
                waiting.set_exception(MoverError(message.message, message.code))

    def _is_name_free(self, agent: AgentName) -> bool:
        """Whether a new mover may have this name: peers would read it in place of another of that name."""
        return is_agent_name(agent, self._boot) and not self._is_name_used(agent)

    def _on_mover_exit(self, mover: MoverHandle) -> None:
        waiting = self._starting.get(mover.mover_id)
        if waiting is not None:
            if not waiting.done():
                text = f"the resident mover of worker {mover.pid} ended before its agent was made"
                waiting.set_exception(MoverError(text, Code.MOVER_LOST))
                return
            # Its agent was made, and `accept` has not returned it yet: its exit is reported after that.
            asyncio.get_running_loop().call_soon(self._on_mover_exit, mover)
            return
        if self._handles.pop(mover.mover_id, None) is not None:
            self._on_exit(mover.mover_id)


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
            # Blocks of its pulls in doubt stay out of use until it ends, or its worker does.
            _LOG.error(
                "resident mover stuck in the transfer library: agent=%s worker_pid=%d after_s=%g",
                self.agent,
                self.pid,
                STUCK_S,
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
            _LOG.error(
                "resident mover closed after a malformed message: agent=%s reason=%s",
                self.agent,
                error.message,
            )
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
