"""A remote engine as one local rank knows it: an entry of the registry in `kvxferd.plan.topology`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from kvxferd.ids import Endpoint, EngineId, Generation, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan.hybrid import HybridReads
from kvxferd.plan.info import EngineTransferInfo
from kvxferd.plan.plan import Plan
from kvxferd.plan.plan_cache import KeptPlan, LayoutDigests


class RemoteManifest(Protocol):
    """A remote engine's manifest, of which the registry needs the layouts."""

    def layouts(self) -> Mapping[Rank, RankLayout]:
        """Return the layout of each rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutsByHand:
    """Layouts that come without a manifest."""

    ranks: Mapping[Rank, RankLayout]

    def layouts(self) -> Mapping[Rank, RankLayout]:
        """Return the layout of each rank."""
        return self.ranks


@dataclasses.dataclass(slots=True, eq=False)
class RegisteredEngine:
    """One remote engine as one local rank knows it."""

    engine_id: EngineId
    home: Endpoint  # the peer whose daemon sent its manifest; "" for facts built by hand
    generation: Generation
    last_used: float  # seconds of the caller's clock
    stages: dict[int, EngineTransferInfo]  # by pp_rank, the lowest first where layouts are known
    spec: EngineSpec | None = None  # of its first rank; None: it is known by facts alone
    kept: KeptPlan | None = None  # what this rank reads of it; None: it is known by facts alone
    layout_digests: LayoutDigests = ()  # of each rank, the lowest first
    manifest: Callable[[], RemoteManifest | None] | None = None  # a weak reference, which returns None later
    hybrids: dict[int, HybridReads] | None = None  # by pp_rank; None: none has states
    num_parts: int = 0  # counted against `MAX_KEPT_PARTS`

    @property
    def plan(self) -> Plan | None:
        """Return the plan; None where only facts are known, or the cache of plans has evicted it."""
        return None if self.kept is None else self.kept.plan

    def layouts(self) -> Mapping[Rank, RankLayout] | None:
        """Return the layout of each rank; None where only facts are known, or the manifest is forgotten."""
        manifest = self.manifest() if self.manifest is not None else None
        return None if manifest is None else manifest.layouts()
