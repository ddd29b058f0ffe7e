"""Remote engines, and the plans by which local ranks read them, each computed once."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import NO_USER, EmitRecord
from kvxferd.core.registry import LocalRank, RemotePlan
from kvxferd.core.snapshot import TopologyRecord
from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan import Plan, PlanCache, require_pp_aware
from kvxferd.wire.common import RankManifest

# Engines of which a rank keeps a plan: it reads from tens. The layouts of a hybrid engine stay with the plan.
MAX_REMOTE_ENGINES = 256
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
        bindings = [manifest.binding for manifest in self.ranks.values()]
        regions = [region for binding in bindings for region in binding.regions]
        layouts = {id(manifest.layout): manifest.layout for manifest in self.ranks.values()}
        return (
            sum(RANK_BYTES + len(binding.metadata) for binding in bindings)
            + REGION_BYTES * len(regions)
            + PIECE_BYTES * sum(len(region.pieces) for region in regions)
            + TENSOR_BYTES * sum(len(layout.tensors) for layout in layouts.values())
        )

    def layouts(self) -> dict[Rank, RankLayout]:
        """Return the layout of each rank, for the planner."""
        return {rank: manifest.layout for rank, manifest in self.ranks.items()}


class RemoteEngineRegistry:
    """Registers remote engines with local ranks. Ranks with equal layouts share their plans."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._plan_cache = PlanCache()

    def plan(self, rank: LocalRank, remote: RemoteEngine) -> Plan:
        """Return the rank's plan for the engine, and register the engine in the rank's topology.

        Raises PlanError where the layouts cannot be read from one another, EngineError where the
        engine is the rank's own, is too deep for one that is not PP-aware, or has other facts than
        the same generation had before.
        """
        engine_id = remote.spec.engine_id
        known = rank.remote_plans.get(engine_id)
        if known is not None and known.remote() is remote:
            known.last_used = self._context.now
            rank.remote_plans[engine_id] = rank.remote_plans.pop(engine_id)  # the last used is the last
            return known.plan
        if not rank.spec.pp_aware:
            require_pp_aware(remote.ranks, f"engine {rank.spec.key}")
        layouts = remote.layouts()
        plan = self._plan_cache.get(rank.spec, rank.layout, remote.spec, layouts)
        rank.topology.register_remote_ranks(remote.spec, layouts, plan)
        self._forget_stale(rank)
        rank.remote_plans.pop(engine_id, None)
        rank.remote_plans[engine_id] = RemotePlan(weakref.ref(remote), plan, self._context.now)
        for stage in range(remote.spec.pp_size):
            text = rank.topology.describe(engine_id, stage)
            record = TopologyRecord(
                sink=rank.spec.engine_id, rank=rank.spec.rank, source=engine_id, stage=stage, text=text
            )
            self._context.emit(EmitRecord(record))
        return plan

    def _forget_stale(self, rank: LocalRank) -> None:
        while rank.remote_plans:
            engine_id, known = next(iter(rank.remote_plans.items()))
            if len(rank.remote_plans) < MAX_REMOTE_ENGINES and not self._context.is_stale(known.last_used):
                return
            del rank.remote_plans[engine_id]
            rank.topology.unregister_remote_engine(engine_id)
