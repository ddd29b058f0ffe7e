"""A remote engine's manifest as a registry takes it, made of layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import MakePlan
from kvxferd.core.peers.remote_engine import RemoteEngine
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.core.sink.held_grant import HeldGrant
from kvxferd.core.sink.remote_engines import RemoteEngineRegistry
from kvxferd.ids import Endpoint, GrantId, Rank, TransferId
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan import Plan, PlanCache, TransferTopology
from kvxferd.wire.common import TransferRef

HOME = Endpoint("tcp://10.0.0.2:9441")


@dataclass(frozen=True, eq=False)
class FetchedEngine:
    """An engine that a peer has: it alone keeps its layouts."""

    spec: EngineSpec  # of its first rank
    ranks: Mapping[Rank, RankLayout]

    def layouts(self) -> Mapping[Rank, RankLayout]:
        """Return the layout of each rank."""
        return self.ranks


def fetched(engine: Mapping[Rank, tuple[EngineSpec, RankLayout]]) -> FetchedEngine:
    """Return every rank of a deployment as a peer's engine."""
    return FetchedEngine(engine[min(engine)][0], {rank: layout for rank, (_, layout) in engine.items()})


def register(
    topology: TransferTopology,
    engine: Mapping[Rank, tuple[EngineSpec, RankLayout]],
    home: Endpoint = HOME,
) -> Plan:
    """Register a deployment, with a cache of plans of its own; return the plan."""
    return topology.plan_remote_engine(fetched(engine), PlanCache(), home=home)


def plan_now(
    registry: RemoteEngineRegistry,
    context: NodeContext,
    rank: LocalRank,
    home: Endpoint,
    remote: RemoteEngine,
) -> Plan | None:
    """Have a rank's reads planned, as a node and its shell do it together."""
    ref = TransferRef(
        endpoint=home,
        engine_id=remote.spec.engine_id,
        generation=remote.spec.generation,
        transfer_id=TransferId("t"),
        nonce="0" * 32,
    )
    grant = HeldGrant(GrantId("g"), rank, ref, 1.0, 0.0)
    if (plan := registry.find_plan(grant, remote)) is not None:
        return plan
    (job,) = [effect.job for effect in context.pop_effects() if isinstance(effect, MakePlan)]
    assert registry.plan_made(job, job.make()) == [grant]
    return registry.find_plan(grant, remote)
