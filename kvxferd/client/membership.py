"""What a session is to its daemon: a rank with memory, or a publisher without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from kvxferd.client.memory_export import MemoryExport
from kvxferd.errors import LayoutError
from kvxferd.ids import EngineId, Generation
from kvxferd.layout import EngineSpec, RankLayout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankRole:
    """The session is a rank; `exports` is None while its memory is suspended."""

    engine: EngineSpec
    layout: RankLayout
    exports: MemoryExport | None

    @property
    def engine_id(self) -> EngineId:
        """The rank's engine."""
        return self.engine.engine_id

    @property
    def generation(self) -> Generation:
        """The engine's generation."""
        return self.engine.generation

    def __str__(self) -> str:
        return f"rank {self.engine.rank} of {self.engine.key}"


@dataclass(frozen=True, slots=True)
class PublisherRole:
    """The session is an engine's scheduler: it publishes, and has no memory."""

    engine_id: EngineId
    generation: Generation

    def __str__(self) -> str:
        return f"publisher of {self.engine_id}@{self.generation}"


SessionRole = RankRole | PublisherRole


def validated(value: T, what: str) -> T:
    """Return an engine's struct as the daemon will decode it. Raises LayoutError that names the wrong field.

    msgspec checks types when it decodes, not when a struct is made.
    """
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
        raise LayoutError(f"cannot register: {what}: {error}") from error
