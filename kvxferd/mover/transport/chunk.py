"""A read through buffers, as what is under way of it: chunks, and how far each is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from kvxferd.ids import AgentName
from kvxferd.mover.transport.base import ReadHandle, ReadKinds, TransportError
from kvxferd.plan import Runs
from kvxferd.wire.staging import ChunkReady


class ChunkState(Enum):
    """What a chunk waits for."""

    REQUESTED = auto()  # the source copies it
    READING = auto()
    VERIFYING = auto()  # was it still the chunk that was asked for?
    COPYING = auto()  # into the place where it belongs


@dataclass(slots=True, eq=False)
class Chunk:
    """As much of a read as one slot holds."""

    runs: Runs
    state: ChunkState
    created_at: float
    slot: int | None = None  # of the own ring
    number: int = 0  # of the ask
    ready: ChunkReady | None = None
    handle: ReadHandle | None = None
    stamp_slot: int | None = None
    copy_event: Any = None


@dataclass(slots=True, eq=False)
class StagedRead:
    """One post: its chunks, those that are to come and those under way."""

    agent: AgentName
    kinds: ReadKinds
    remaining: Iterator[Runs]
    next: Runs | None
    active: list[Chunk] = field(default_factory=list)
    error: TransportError | None = None
    has_posted: bool = False  # some of it was posted
    done: bool = False
