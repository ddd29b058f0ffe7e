"""What the connector's scheduler sends to its workers with a step.

It is plain picklable data, without vLLM's types: `connector` wraps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvxferd.client import BlockList, TransferRef


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
    is_early: bool = False  # the prefill engine may still be computing it
    refusal: str = ""  # not empty: why the pull is not tried; the workers report it as failed


@dataclass(frozen=True, slots=True)
class WrittenSpec:
    """A published request of which the steps before this one have written so many tokens, on every rank."""

    transfer_id: str
    ready_tokens: int | None = None  # None: all


@dataclass(slots=True)
class StepMetadata:
    """What the workers do in one step, in this order."""

    prepares: list[PrepareSpec] = field(default_factory=list)
    written: list[WrittenSpec] = field(default_factory=list)
    pulls: list[PullSpec] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)  # request ids whose pull is cancelled
    abandons: list[TransferRef] = field(default_factory=list)  # transfers that this engine will not read
    released: list[str] = field(default_factory=list)  # request ids whose published blocks are free
