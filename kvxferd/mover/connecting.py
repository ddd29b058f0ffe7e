"""Connections made ahead: a word is read from each agent when it is loaded, for nothing but that.

The library connects with the first read, which takes 11 ms between two processes of a node. What
goes wrong here, the first pull finds again, and says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from kvxferd.ids import AgentName
from kvxferd.mover.disconnects import Disconnects
from kvxferd.mover.remotes import Remotes
from kvxferd.mover.scratch import Scratch, word_run
from kvxferd.mover.transport import ReadHandle, Transport, TransportError

_LOG = logging.getLogger(__name__)

# By then there is a connection, or nobody at the other end: no reason to keep a core awake.
PATIENCE_S = 2.0


class _Reading(NamedTuple):
    handle: ReadHandle
    agent: AgentName
    slot: int
    until: float


class Connecting:
    """The reads that are under way. One thread."""

    def __init__(
        self,
        transport: Transport,
        remotes: Remotes,
        scratch: Scratch,
        disconnects: Disconnects,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._remotes = remotes
        self._scratch = scratch
        self._disconnects = disconnects
        self._clock = clock
        self._readings: list[_Reading] = []
        self._met: set[AgentName] = set()

    @property
    def is_busy(self) -> bool:
        """Something is under way that is worth waiting for."""
        return bool(self._readings) and self._clock() < self._readings[-1].until

    def connect(self, agent: AgentName, address: int) -> None:
        """Read a word at an address of the agent's host memory, once for each agent."""
        if agent in self._met or self._remotes.prepare(agent) or (slot := self._scratch.take()) is None:
            return
        self._met.add(agent)
        self._remotes.began(agent)
        try:
            handle = self._transport.post(agent, word_run(slot, address))
        except TransportError as error:
            self._failed(agent, slot, error)
            return
        self._readings.append(_Reading(handle, agent, slot, self._clock() + PATIENCE_S))

    def forget(self, agent: AgentName) -> None:
        """The agent is dropped: who comes under its name is met anew."""
        self._met.discard(agent)

    def poll(self) -> bool:
        """Return whether any is over."""
        moved = False
        for reading in tuple(self._readings):
            try:
                if not self._transport.poll(reading.handle):
                    continue
            except TransportError as error:
                self._failed(reading.agent, reading.slot, error)
            else:
                self._transport.release(reading.handle)
                self._remotes.ended(reading.agent)
                self._scratch.give_back(reading.slot)
            self._readings.remove(reading)
            moved = True
        return moved

    def _failed(self, agent: AgentName, slot: int, error: TransportError) -> None:
        _LOG.info("agent %s was not connected ahead: %s", agent, error.message)
        self._met.discard(agent)
        self._remotes.ended(agent, error.lost)
        if error.settled:  # else something may still land there
            self._scratch.give_back(slot)
        elif error.lost:
            self._disconnects.ask(lambda over: self._scratch.give_back(slot) if over else None)
