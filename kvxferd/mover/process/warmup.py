"""Connections made ahead: a word is read from each agent when it is loaded, for nothing but that.

The library connects with the first read, which takes 11 ms between two processes of a node. What
goes wrong here, the first pull finds again, and says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from kvxferd.ids import AgentName
from kvxferd.mover.disconnects import DisconnectRequests
from kvxferd.mover.process.remote_agents import RemoteAgents
from kvxferd.mover.transport.base import ReadHandle, Transport, TransportError
from kvxferd.mover.transport.scratch import WordSlots, single_word_run

_LOG = logging.getLogger(__name__)

# By then there is a connection, or nobody at the other end: no reason to keep a core awake.
WARMUP_TIMEOUT_S = 2.0


class _WarmupRead(NamedTuple):
    handle: ReadHandle
    agent: AgentName
    slot: int
    deadline: float


class ConnectionWarmup:
    """The reads that are under way. One thread."""

    def __init__(
        self,
        transport: Transport,
        remotes: RemoteAgents,
        word_slots: WordSlots,
        disconnects: DisconnectRequests,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._remotes = remotes
        self._word_slots = word_slots
        self._disconnects = disconnects
        self._clock = clock
        self._reads: list[_WarmupRead] = []
        self._started: set[AgentName] = set()

    @property
    def is_busy(self) -> bool:
        """Something is under way that is worth waiting for."""
        return bool(self._reads) and self._clock() < self._reads[-1].deadline

    def start(self, agent: AgentName, address: int) -> None:
        """Read a word at an address of the agent's host memory, once for each agent."""
        if (
            agent in self._started
            or self._remotes.ensure_loaded(agent)
            or (slot := self._word_slots.acquire()) is None
        ):
            return
        self._started.add(agent)
        self._remotes.read_started(agent)
        try:
            handle = self._transport.post(agent, single_word_run(slot, address))
        except TransportError as error:
            self._on_failure(agent, slot, error)
            return
        self._reads.append(_WarmupRead(handle, agent, slot, self._clock() + WARMUP_TIMEOUT_S))

    def forget(self, agent: AgentName) -> None:
        """The agent is dropped: who comes under its name is met anew."""
        self._started.discard(agent)

    def poll(self) -> bool:
        """Return whether any is over."""
        moved = False
        for reading in tuple(self._reads):
            try:
                if not self._transport.poll(reading.handle):
                    continue
            except TransportError as error:
                self._on_failure(reading.agent, reading.slot, error)
            else:
                self._transport.release(reading.handle)
                self._remotes.read_ended(reading.agent)
                self._word_slots.release(reading.slot)
            self._reads.remove(reading)
            moved = True
        return moved

    def _on_failure(self, agent: AgentName, slot: int, error: TransportError) -> None:
        _LOG.info("agent %s was not connected ahead: %s", agent, error.message)
        self._started.discard(agent)
        self._remotes.read_ended(agent, error.lost)
        if error.settled:  # else something may still land there
            self._word_slots.release(slot)
        elif error.lost:
            self._disconnects.request(lambda over: self._word_slots.release(slot) if over else None)
