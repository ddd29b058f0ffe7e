"""What the scheduler's side of the connector tells its workers with a step, and they tell it at start.

Plain picklable data, without vLLM's types: `connector` wraps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvxferd.client import BlockList
from kvxferd.ids import Generation
from kvxferd.wire.common import TransferRef


@dataclass(frozen=True, slots=True)
class PullSpec:
    """Read a transfer's tokens into a request's blocks, on every rank."""

    request_id: str
    ref: TransferRef
    blocks: Mapping[str, BlockList]  # by group, from the first token that is not cached here
    num_tokens: int
    block_ids: frozenset[int] = frozenset()  # what vLLM is told on failure; empty: the request
    refusal: str = ""  # why it cannot even be tried: the workers report it as failed


@dataclass(frozen=True, slots=True)
class PublishSpec:
    """A request was published: ranks copy its blocks out or wait for what they launched, then say ready."""

    request_id: str
    transfer_id: str
    blocks: Mapping[str, BlockList]
    num_tokens: int


@dataclass(slots=True)
class StepMetadata:
    """One step's orders, in the order in which a worker carries them out."""

    prepares: list[TransferRef] = field(default_factory=list)
    pulls: list[PullSpec] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)  # request ids whose pull is not wanted any more
    abandons: list[TransferRef] = field(default_factory=list)  # nobody here will read these
    publishes: list[PublishSpec] = field(default_factory=list)
    released: list[str] = field(default_factory=list)  # request ids whose published blocks are free

    @property
    def is_empty(self) -> bool:
        """Nothing to do."""
        return not (
            self.prepares or self.pulls or self.cancels or self.abandons or self.publishes or self.released
        )


@dataclass(frozen=True, slots=True)
class RegisteredEngine:
    """What a worker says once its rank is registered."""

    engine_id: str
    generation: Generation
    needs_ready: bool  # some rank copies blocks out, or finishes them, before they can be read
