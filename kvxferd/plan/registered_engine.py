"""A remote engine as one local rank knows it: an entry of the registry in `kvxferd.plan.topology`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from kvxferd.ids import Digest, Endpoint, EngineId, Generation, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan.plan import Plan
from kvxferd.plan.plan_cache import KeptPlan
from kvxferd.plan.transfer_info import EngineTransferInfo


class RemoteManifest(Protocol):
    """A remote engine's manifest, of which the registry needs the spec and the layouts."""

    @property
    def spec(self) -> EngineSpec:
        """The spec of its first rank."""

    def layouts(self) -> Mapping[Rank, RankLayout]:
        """Return the layout of each rank."""


@dataclasses.dataclass(slots=True, eq=False)
class RegisteredEngine:
    """One remote engine as one local rank knows it."""

    home: Endpoint  # the peer whose daemon sent its manifest
    spec: EngineSpec  # of its first rank
    last_used: float  # seconds of the caller's clock
    stages: dict[int, EngineTransferInfo]  # by pp_rank, the lowest first
    kept: KeptPlan  # what this rank reads of it
    layouts_digest: Digest  # of the layouts of all its ranks
    manifest: Callable[[], RemoteManifest | None]  # a weak reference, which returns None later

    @property
    def engine_id(self) -> EngineId:
        """Return the engine's id."""
        return self.spec.engine_id

    @property
    def generation(self) -> Generation:
        """Return the generation that is registered."""
        return self.spec.generation

    @property
    def plan(self) -> Plan | None:
        """Return the plan; None where the cache of plans has evicted it."""
        return self.kept.plan
