"""Agents that are loaded to send them a reply, and for nothing else.

Whoever knows an agent's name can send a request under it, with metadata that it has chosen. So an agent
that was loaded from a request must not say where reads go: it is dropped before the same agent is loaded to
be read from, and one that is loaded to be read from is never loaded from a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvxferd.ids import AgentName
from kvxferd.mover.transport.base import Transport, TransportError

_LOG = logging.getLogger(__name__)

IDLE_S = 60.0  # after which an agent without replies is dropped
MAX_LOADED = 256  # who had a reply last stays; any other is loaded again with its next reply


class ReplyAgents:
    """The agents of one mover, in the order of their last replies."""

    def __init__(self, transport: Transport, is_loaded_elsewhere: Callable[[AgentName], bool]) -> None:
        """`is_loaded_elsewhere`: whether an agent is loaded to be read from, and must stay so."""
        self._transport = transport
        self._is_loaded_elsewhere = is_loaded_elsewhere
        self._used_at: dict[AgentName, float] = {}

    def __len__(self) -> int:
        return len(self._used_at)

    def send(self, agent: AgentName, metadata: bytes, payload: bytes, now: float) -> str:
        """Send a reply; return why it was not sent, "" if it was. `metadata`: of the request's sender."""
        try:
            if self._is_loaded_elsewhere(agent):
                self._transport.notify(agent, payload)
            elif not self._send_to_known(agent, payload, now):
                if (name := self._transport.load_remote(metadata, agent)) != agent:
                    _LOG.warning("chunk request with another agent's metadata: agent=%s of=%s", agent, name)
                    return f"its metadata is that of {name}"
                self._used_at[agent] = now
                self._transport.notify(agent, payload)
        except TransportError as error:
            return error.message
        return ""

    def _send_to_known(self, agent: AgentName, payload: bytes, now: float) -> bool:
        if agent not in self._used_at:
            return False
        try:
            self._transport.notify(agent, payload)
        except TransportError:
            self._drop(agent)  # it has a new connection
            return False
        del self._used_at[agent]
        self._used_at[agent] = now
        return True

    def forget_idle(self, now: float) -> None:
        """Drop agents that have had no reply for long, or where they are too many."""
        while self._used_at:
            agent, used_at = next(iter(self._used_at.items()))
            if len(self._used_at) <= MAX_LOADED and now <= used_at + IDLE_S:
                return
            self._drop(agent)

    def give_up(self, agent: AgentName) -> None:
        """Drop an agent that is about to be loaded to be read from."""
        if agent in self._used_at:
            self._drop(agent)

    def _drop(self, agent: AgentName) -> None:
        del self._used_at[agent]
        if self._is_loaded_elsewhere(agent):
            return
        try:
            self._transport.drop_remote(agent)
        except TransportError as error:
            _LOG.warning("agent not dropped: agent=%s reason=%s", agent, error.message)
