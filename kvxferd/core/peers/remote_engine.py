"""What another daemon has told of an engine, checked."""

from __future__ import annotations

from collections.abc import Collection

from kvxferd.core.effects import NO_USER
from kvxferd.core.limits.ledger import Share
from kvxferd.ids import Digest, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.wire.common import RankManifest

# The bytes of each rank, region, piece of a region, and tensor (of equal layouts, one is counted): estimates.
RANK_BYTES, REGION_BYTES, PIECE_BYTES, TENSOR_BYTES = 2048, 256, 128, 384


class RemoteEngine:
    """A whole remote engine: every rank of every stage. It is charged to a user for as long as it is used.

    The peer whose it is uses it, and each grant that reads by it.
    """

    def __init__(self, spec: EngineSpec, ranks: dict[Rank, RankManifest], layouts_digest: Digest) -> None:
        """`spec`: of its first rank. `layouts_digest`: as `digest_of_layouts` returns it."""
        self.spec = spec
        self.ranks = ranks
        self.layouts_digest = layouts_digest
        self.num_bytes = manifest_bytes(ranks.values())
        self.uid = NO_USER  # to whom it is charged
        self._layouts = {rank: manifest.layout for rank, manifest in ranks.items()}
        self._share: Share
        self._num_users = 0

    def layouts(self) -> dict[Rank, RankLayout]:
        """Return the layout of each rank, for the planner."""
        return self._layouts

    def charge(self, share: Share, uid: int) -> None:
        """Charge it to the user until the last `release`. The caller uses it from now on."""
        share.add(uid, self.num_bytes)
        self.uid, self._share, self._num_users = uid, share, 1

    def acquire(self) -> RemoteEngine:
        """Return it, used once more."""
        self._num_users += 1
        return self

    def release(self) -> None:
        """Use it once less."""
        self._num_users -= 1
        if not self._num_users:
            self._share.release(self.uid, self.num_bytes)


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
