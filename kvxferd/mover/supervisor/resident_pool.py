"""Resident movers for the daemon: each comes as a socket that its worker has sent."""

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

MAX_UNREAD_REPLY_BYTES = 1 << 20  # of answers; 30,000 of them
UP_TIMEOUT_S = 20.0  # a worker's first agent takes 0.5 s; a busy engine's GIL makes that longer


class ResidentPool:
    """Takes resident movers in. All methods belong to one event loop.

    `on_message` and `on_exit` are as a `MoverPool`'s; `numbers` is shared with it.
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
        self._is_name_used = is_name_used  # whether a mover of that agent's name lives here
        self._on_message = on_message
        self._on_exit = on_exit
        self._starting: dict[MoverId, asyncio.Future[None]] = {}  # for the agent to be made
        self._handles: dict[MoverId, ResidentHandle] = {}

    async def accept(self, sock: socket.socket, worker: tuple[int, int]) -> ResidentHandle:
        """Return the mover at the other end of the socket once its agent is made.

        `worker`: as `ResidentHandle` takes it. Both descriptors are this object's. Raises MoverError:
        with the mover's own reason, or mover-lost.
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
        """Let go of all: they read the end of their streams, and their workers know when they are gone."""
        for handle in self._handles.values():
            handle.discard()
        self._handles.clear()

    def _on_mover_message(self, mover: MoverHandle, message: FromMover) -> None:
        waiting = self._starting.get(mover.mover_id)
        if isinstance(message, DisconnectSeen) and mover.num_queued_bytes > MAX_UNREAD_REPLY_BYTES:
            return  # it asks and does not read: its worker's affair, not this daemon's memory
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
        """A mover that takes another's name would be read in its place."""
        fits = agent.startswith(f"{self._boot}/") and len(agent) <= MAX_NAME_CHARS
        return fits and not self._is_name_used(agent)

    def _on_mover_exit(self, mover: MoverHandle) -> None:
        waiting = self._starting.get(mover.mover_id)
        if waiting is not None:
            if not waiting.done():
                text = f"the resident mover of worker {mover.pid} ended before its agent was made"
                waiting.set_exception(MoverError(text, Code.MOVER_LOST))
                return
            # Its agent was made, and nobody has heard of it yet: `adopt` returns it first.
            asyncio.get_running_loop().call_soon(self._on_mover_exit, mover)
            return
        if self._handles.pop(mover.mover_id, None) is not None:
            self._on_exit(mover.mover_id)
