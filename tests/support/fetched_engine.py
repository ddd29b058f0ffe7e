"""A remote engine's manifest as a registry takes it, made of layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvxferd.ids import Endpoint, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan import Plan, PlanCache, TransferTopology

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
    return topology.register_remote_engine(fetched(engine), PlanCache(), home=home)
