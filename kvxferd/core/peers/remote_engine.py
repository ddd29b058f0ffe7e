"""What another daemon has told of an engine, checked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvxferd.core.effects import NO_USER
from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.wire.common import RankManifest

# The bytes of each rank, region, piece of a region, and tensor (of equal layouts, one is counted): estimates.
RANK_BYTES, REGION_BYTES, PIECE_BYTES, TENSOR_BYTES = 2048, 256, 128, 384


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class RemoteEngine:
    """A whole remote engine: every rank of every stage."""

    spec: EngineSpec
    ranks: dict[Rank, RankManifest]
    uid: int = NO_USER  # the user whose share it counts for

    @property
    def num_bytes(self) -> int:
        """Return about how much memory it takes. A layout that engines share counts for each of them."""
        return manifest_bytes(self.ranks.values())

    def layouts(self) -> dict[Rank, RankLayout]:
        """Return the layout of each rank, for the planner."""
        return {rank: manifest.layout for rank, manifest in self.ranks.items()}


def manifest_bytes(manifests: Collection[RankManifest]) -> int:
    """Return about how much memory these take. A layout that ranks share counts once."""
    bindings = [manifest.binding for manifest in manifests]
    regions = [region for binding in bindings for region in binding.regions]
    layouts = {id(manifest.layout): manifest.layout for manifest in manifests}
    return (
        sum(RANK_BYTES + len(binding.metadata) for binding in bindings)
        + REGION_BYTES * len(regions)
        + PIECE_BYTES * sum(len(region.pieces) for region in regions)
        + TENSOR_BYTES * sum(len(layout.tensors) for layout in layouts.values())
    )
