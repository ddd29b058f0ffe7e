"""A transport without a library: agents of one process read each other's memory.

For tests of what stands above `Transport`; a fabric can delay, break and stall on demand.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvxferd.ids import AgentName
from kvxferd.mover.transport.base import (
    HOST,
    MemoryKind,
    MemoryRange,
    ReadHandle,
    ReadKinds,
    TransportError,
    check_agent_name,
)
from kvxferd.plan import Runs

Uint64s: TypeAlias = npt.NDArray[np.uint64]


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `metadata` encodes."""

    agent: AgentName
    spans: tuple[MemoryRange, ...]


@dataclass
class Fabric:
    """What joins the agents of one test, and what goes wrong in it."""

    agents: dict[AgentName, MemoryTransport] = field(default_factory=dict)
    polls_per_read: int = 0  # a read is done after so many polls; 0: when it is posted
    stalled: set[AgentName] = field(default_factory=set)  # reads from these stay under way
    errors: dict[AgentName, TransportError] = field(default_factory=dict)  # raised by the next poll
    posts: list[tuple[AgentName, int]] = field(default_factory=list)  # (agent, descriptors), in order
    notes: dict[AgentName, list[tuple[AgentName, bytes]]] = field(default_factory=dict)


@dataclass
class _Read:
    agent: AgentName
    runs: Runs
    polls_left: int
    done: bool = False


class MemoryTransport:
    """One agent of a fabric; see `Transport` for the promises."""

    def __init__(self, fabric: Fabric, agent: AgentName) -> None:
        self._fabric = fabric
        self._agent = agent
        self._spans: set[MemoryRange] = set()
        self._remote_spans: dict[AgentName, set[MemoryRange]] = {}
        self._lost: set[AgentName] = set()
        fabric.agents[agent] = self

    @property
    def agent(self) -> AgentName:
        return self._agent

    @property
    def library(self) -> str:
        return "memory"

    @property
    def loaded(self) -> set[AgentName]:
        """The agents that are loaded here."""
        return set(self._remote_spans)

    def register(self, span: MemoryRange) -> None:
        self._spans.add(span)

    def deregister(self, span: MemoryRange) -> None:
        self._spans.remove(span)

    def metadata(self, spans: Sequence[MemoryRange]) -> bytes:
        if not spans or not self._spans.issuperset(spans):
            raise TransportError("cannot describe memory that is not registered", settled=True)
        return msgspec.msgpack.encode(_Metadata(self._agent, tuple(spans)))

    def load_remote(self, metadata: bytes, agent: AgentName | None = None) -> AgentName:
        try:
            card = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            raise TransportError(f"cannot load a remote agent: {error}", settled=True) from error
        check_agent_name(card.agent, agent)
        self._remote_spans.setdefault(card.agent, set()).update(card.spans)
        return card.agent

    def drop_remote(self, agent: AgentName) -> None:
        self._remote_spans.pop(agent, None)
        self._lost.discard(agent)

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
        known = self._spans if agent == self._agent else self._remote_spans.get(agent)
        if known is None:
            raise TransportError(f"cannot read from agent {agent}: it is not known here", settled=True)
        if not (
            _within(self._spans, kinds.local, runs.local, runs.length)
            and _within(known, kinds.remote, runs.remote, runs.length)
        ):
            raise TransportError(f"cannot read from agent {agent}: not registered", settled=True)
        self._fabric.posts.append((agent, len(runs.length)))
        read = _Read(agent, runs, self._fabric.polls_per_read)
        self._advance(read)
        return read

    def poll(self, handle: ReadHandle) -> bool:
        assert isinstance(handle, _Read)
        self._advance(handle)
        return handle.done

    def release(self, handle: ReadHandle) -> None:
        assert handle.done or isinstance(handle, _Read)

    def progress(self) -> None:
        """Nothing here waits for the source."""

    def notify(self, agent: AgentName, payload: bytes) -> None:
        if agent not in self._remote_spans:
            raise TransportError(f"cannot tell agent {agent} anything: it is not known here", settled=True)
        if agent not in self._fabric.agents:
            raise TransportError(f"cannot tell agent {agent} anything: it is gone", settled=True, lost=True)
        self._fabric.notes.setdefault(agent, []).append((self._agent, payload))

    def receive_notifications(self) -> list[tuple[AgentName, bytes]]:
        return self._fabric.notes.pop(self._agent, [])

    def close(self) -> None:
        """Die: whoever reads from this agent learns that the connection is lost."""
        self._fabric.agents.pop(self._agent, None)

    def _advance(self, read: _Read) -> None:
        if read.done or read.agent in self._fabric.stalled:
            return
        if read.agent in self._fabric.errors:
            raise self._fabric.errors.pop(read.agent)
        if read.agent not in self._fabric.agents or read.agent in self._lost:
            self._lost.add(read.agent)
            raise TransportError(
                f"cannot read from agent {read.agent}: it disconnected", settled=True, lost=True
            )
        if read.polls_left:
            read.polls_left -= 1
            return
        for to, source, size in zip(*(column.tolist() for column in read.runs), strict=True):
            ctypes.memmove(to, source, size)
        read.done = True


def _within(spans: set[MemoryRange], place: MemoryKind, addresses: Uint64s, lengths: Uint64s) -> bool:
    """Whether each stretch is in one span, as the library demands of a descriptor."""
    alike = [span for span in spans if (span.mem_type, span.device) == (place.mem_type, place.device)]
    return not place.staged and all(
        any(s.address <= start and start + size <= s.address + s.size_bytes for s in alike)
        for start, size in zip(addresses.tolist(), lengths.tolist(), strict=True)
    )
