"""Connects to agents ahead of the first pull, by reading one word from each when it is loaded.

The library connects with the first read, which takes 11 ms between two processes of a node. A failure here
is only logged: the first pull meets it again, and reports it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from kvxferd.ids import AgentName
from kvxferd.mover.reads.remote_agents import RemoteAgents
from kvxferd.mover.transport.base import ReadHandle, TransportError
from kvxferd.mover.transport.buffers import WordSlots
from kvxferd.mover.transport.runs import single_run
from kvxferd.wire.limits import FENCE_WORD_BYTES

_LOG = logging.getLogger(__name__)

# By then there is a connection, or nothing at the other end, and no reason to keep a core awake.
WARMUP_TIMEOUT_S = 2.0


class _WarmupRead(NamedTuple):
    handle: ReadHandle
    agent: AgentName
    slot: int
    deadline: float


class ConnectionWarmup:
    """The warm-up reads in flight. One thread."""

    def __init__(
        self,
        remotes: RemoteAgents,
        word_slots: WordSlots,
        clock: Callable[[], float],
    ) -> None:
        self._remotes = remotes
        self._word_slots = word_slots
        self._clock = clock
        self._reads: list[_WarmupRead] = []
        self._started: set[AgentName] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a read is in flight that is worth polling for."""
        return bool(self._reads) and self._clock() < self._reads[-1].deadline

    def start(self, agent: AgentName, address: int) -> None:
        """Read a word at an address of the agent's host memory, once for each agent."""
        if agent in self._started or (slot := self._word_slots.acquire()) is None:
            return
        self._started.add(agent)
        try:
            handle = self._remotes.post(agent, single_run(slot, address, FENCE_WORD_BYTES))
        except TransportError as error:
            self._on_failure(agent, slot, error)
            return
        if handle.done:
            self._word_slots.release(slot)
            return
        self._reads.append(_WarmupRead(handle, agent, slot, self._clock() + WARMUP_TIMEOUT_S))

    def forget(self, agent: AgentName) -> None:
        """Forget an agent that was dropped. Another of its name is read again."""
        self._started.discard(agent)

    def poll(self) -> bool:
        """Poll all reads; return whether any has ended."""
        moved = False
        for read in tuple(self._reads):
            try:
                if not self._remotes.poll(read.agent, read.handle):
                    continue
            except TransportError as error:
                self._on_failure(read.agent, read.slot, error)
            else:
                self._word_slots.release(read.slot)
            self._reads.remove(read)
            moved = True
        return moved

    def _on_failure(self, agent: AgentName, slot: int, error: TransportError) -> None:
        _LOG.info("agent not connected ahead: agent=%s reason=%s", agent, error.message)
        self._started.discard(agent)
        if error.settled:  # otherwise something may still land there
            self._word_slots.release(slot)
