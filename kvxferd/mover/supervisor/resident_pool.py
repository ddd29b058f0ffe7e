"""Resident movers in the daemon: each arrives as a socket that its worker has sent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

from kvxferd.errors import Code, MoverError
from kvxferd.ids import AgentName, BootId, MoverId
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.mover.supervisor.resident_handle import ResidentHandle
from kvxferd.wire.limits import MAX_NAME_CHARS
from kvxferd.wire.mover import DisconnectSeen, FromMover, MoverLeaving, MoverUp

MAX_UNREAD_REPLY_BYTES = 1 << 20  # 30,000 replies
UP_TIMEOUT_S = 20.0  # a worker's first agent takes 0.5 s; a busy engine's GIL makes that longer


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
        fits = agent.startswith(f"{self._boot}/") and len(agent) <= MAX_NAME_CHARS
        return fits and not self._is_name_used(agent)

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
