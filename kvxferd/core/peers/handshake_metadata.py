"""What a reader gets of an engine's ranks: all stages, or stage 0 for one that is not PP-aware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from kvxferd.ids import Rank
from kvxferd.plan import set_xfer_handshake_metadata_pp_aware

Metadata = TypeVar("Metadata")


class _Consumer(Generic[Metadata]):
    """A reader as a consumer of metadata; it keeps what it is passed, by rank."""

    def __init__(self, name: str) -> None:
        self.consumer_name = name
        self.by_rank: dict[Rank, Metadata] = {}


class _StagedConsumer(_Consumer[Metadata]):
    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Metadata]) -> None:
        self.by_rank = {Rank(*rank): metadata[rank] for rank in sorted(metadata)}


class _LegacyConsumer(_Consumer[Metadata]):
    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Metadata]) -> None:
        self.by_rank = {Rank(0, tp_rank): metadata[tp_rank] for tp_rank in sorted(metadata)}


def aggregate_metadata(
    metadata: Iterable[Mapping[Rank, Metadata] | None], reader: str, pp_aware: bool
) -> dict[Rank, Metadata]:
    """Return the merged metadata that the reader gets, stage by stage.

    Raises NotPPAwareError, which names the reader, where it is not PP-aware and there are later stages.
    """
    consumer: _Consumer[Metadata] = _StagedConsumer(reader) if pp_aware else _LegacyConsumer(reader)
    set_xfer_handshake_metadata_pp_aware(consumer, metadata)
    return consumer.by_rank
