"""What a reader gets of an engine's ranks: all stages, or stage 0 for one that is not PP-aware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TypeVar

from kvxferd.ids import Rank
from kvxferd.plan import set_xfer_handshake_metadata_pp_aware

Metadata = TypeVar("Metadata")


def aggregate_metadata(
    metadata: Iterable[Mapping[Rank, Metadata] | None], reader: str, pp_aware: bool
) -> dict[Rank, Metadata]:
    """Return the merged metadata that the reader gets, stage by stage.

    Raises NotPPAwareError, which names the reader, where it is not PP-aware and there are later stages.
    """
    by_rank: dict[Rank, Metadata] = {}

    def keep(found: Mapping[tuple[int, int], Metadata]) -> None:
        by_rank.update({Rank(*rank): found[rank] for rank in sorted(found)})

    def keep_first_stage(found: Mapping[int, Metadata]) -> None:
        keep({(0, tp_rank): one for tp_rank, one in found.items()})

    consumer = SimpleNamespace(consumer_name=reader, set_xfer_handshake_metadata=keep_first_stage)
    if pp_aware:
        consumer.set_xfer_handshake_metadata_pp_aware = keep
    set_xfer_handshake_metadata_pp_aware(consumer, metadata)
    return by_rank
