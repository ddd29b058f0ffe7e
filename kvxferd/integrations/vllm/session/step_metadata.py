"""What the connector's scheduler sends to its workers with a step, and what they send to it at start.

It is plain picklable data, without vLLM's types: `connector` wraps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from kvxferd.client import BlockList, TransferRef
from kvxferd.ids import Generation


@dataclass(frozen=True, slots=True)
class PrepareSpec:
    """Hold a transfer for a request that waits to be scheduled, on every rank."""

    ref: TransferRef
    is_early: bool  # as `PullSpec.is_early`


@dataclass(frozen=True, slots=True)
class PullSpec:
    """Read a transfer's tokens into a request's blocks, on every rank."""

    request_id: str
    ref: TransferRef
    blocks: Mapping[str, BlockList]  # by group, from the first token that is not cached here
    num_tokens: int
    block_ids: frozenset[int] = frozenset()  # reported to vLLM on failure; empty: the request is reported
    is_early: bool = False  # the prefill engine may still be computing it
    refusal: str = ""  # not empty: why the pull is not tried; the workers report it as failed


@dataclass(frozen=True, slots=True)
class PublishSpec:
    """A published request: ranks copy its blocks out, or wait for work they launched, then report ready."""

    request_id: str
    transfer_id: str
    blocks: Mapping[str, BlockList]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ExtendSpec:
    """A published request whose first tokens the steps before this one have written, on every rank."""

    transfer_id: str
    ready_tokens: int


@dataclass(slots=True)
class StepMetadata:
    """What the workers do in one step, in this order."""

    prepares: list[PrepareSpec] = field(default_factory=list)
    pulls: list[PullSpec] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)  # request ids whose pull is cancelled
    abandons: list[TransferRef] = field(default_factory=list)  # transfers that this engine will not read
    extends: list[ExtendSpec] = field(default_factory=list)
    publishes: list[PublishSpec] = field(default_factory=list)
    released: list[str] = field(default_factory=list)  # request ids whose published blocks are free

    @property
    def is_empty(self) -> bool:
        """Whether the workers have nothing to do."""
        return not any(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The engine that a worker reports once its rank is registered."""

    engine_id: str
    generation: Generation
    needs_ready: bool  # some rank copies blocks out, or finishes them, before they can be read
