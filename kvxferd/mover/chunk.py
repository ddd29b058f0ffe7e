"""A read through buffers, as what is under way of it: chunks, and how far each is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from kvxferd.ids import AgentName
from kvxferd.mover.transport import Kinds, ReadHandle, TransportError
from kvxferd.plan import Runs
from kvxferd.wire.notes import Lent


class Stage(Enum):
    """What a chunk waits for."""

    ASKED = auto()  # the source copies it
    READING = auto()
    CHECKING = auto()  # was it still the chunk that was asked for?
    COPYING = auto()  # into the place where it belongs


@dataclass(slots=True, eq=False)
class Chunk:
    """As much of a read as one slot holds."""

    runs: Runs
    stage: Stage
    since: float
    slot: int | None = None  # of the own ring
    number: int = 0  # of the ask
    lent: Lent | None = None
    handle: ReadHandle | None = None
    stamp_slot: int | None = None
    copied: Any = None


@dataclass(slots=True, eq=False)
class StagedRead:
    """One post: its chunks, those that are to come and those under way."""

    agent: AgentName
    kinds: Kinds
    left: Iterator[Runs]
    next: Runs | None
    active: list[Chunk] = field(default_factory=list)
    fault: TransportError | None = None
    touched: bool = False  # some of it was posted
    done: bool = False
