"""Remote engines, and the plans by which local ranks read them, each computed once."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import NO_USER, EmitRecord
from kvxferd.core.limits.node_plans import NodePlanCache
from kvxferd.core.ranks.registry import LocalRank
from kvxferd.ids import Endpoint, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan import Plan, RegisteredEngine, require_pp_aware
from kvxferd.records import TopologyRecord
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
        self._plan_cache = NodePlanCache()

    def plan(self, rank: LocalRank, home: Endpoint, remote: RemoteEngine) -> Plan:
        """Return the rank's plan for the engine of that home, which the rank's topology has from now on.

        Raises PlanError where the layouts cannot be read from one another, EngineError where the
        engine is the rank's own, is too deep for one that is not PP-aware, or has other facts than
        the same generation had before, BusyError where pulls read by too many plans.
        """
        topology, now = rank.topology, self._context.now
        engine_id = remote.spec.engine_id
        in_use = topology.use(engine_id, home, remote, now)
        if in_use is not None:
            return in_use
        if not rank.spec.pp_aware:
            require_pp_aware(remote.ranks, f"engine {rank.spec.key}")
        unused_since = now - self._context.settings.max_hold_s
        topology.expire(unused_since)  # first: a refusal must not keep an unused entry
        before = topology.get(engine_id, home)
        plan = topology.register_remote_engine(remote, self._plan_cache, home=home, now=now, uid=rank.uid)
        topology.expire(unused_since)
        after = topology.find(engine_id, home)
        if after is not before:
            self._report(rank, after)
        return plan

    def _report(self, rank: LocalRank, engine: RegisteredEngine) -> None:
        """Emit a record of each stage that has layers."""
        for stage, info in engine.stages.items():
            if info.start_layer == info.end_layer:
                continue
            record = TopologyRecord(
                sink=rank.spec.engine_id,
                rank=rank.spec.rank,
                source=engine.engine_id,
                stage=stage,
                text=rank.topology.describe(engine.engine_id, stage, home=engine.home),
            )
            self._context.emit(EmitRecord(record))
