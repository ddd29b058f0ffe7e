"""A remote engine's manifest as a registry takes it, made of layouts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from kvxferd.core.peers.remote_engine import RemoteEngine
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.core.sink.held_grant import HeldGrant
from kvxferd.errors import PlanError
from kvxferd.ids import Digest, Endpoint, GrantId, Rank, TransferId
from kvxferd.layout import EngineSpec, RankLayout, digest_of
from kvxferd.plan import Plan, PlanJob, PlannedReads, TransferTopology, digest_of_layouts
from kvxferd.wire.common import RankManifest, TransferRef

HOME = Endpoint("tcp://10.0.0.2:9441")


@dataclass(frozen=True, eq=False)
class FetchedEngine:
    """An engine that a peer has: it alone keeps its layouts."""

    spec: EngineSpec  # of its first rank
    ranks: Mapping[Rank, RankLayout]

    @functools.cached_property
    def layouts_digest(self) -> Digest:
        """The digest of all ranks' layouts."""
        return digest_of_layouts({rank: digest_of(layout) for rank, layout in self.ranks.items()})

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
    """Register a deployment; return the plan, made here and now."""
    return topology.plan_remote_engine(fetched(engine), home=home)


def learnt(ranks: dict[Rank, RankManifest]) -> RemoteEngine:
    """Return an engine as a node has learnt it."""
    digest = digest_of_layouts({rank: digest_of(manifest.layout) for rank, manifest in ranks.items()})
    return RemoteEngine(ranks[min(ranks)].spec, ranks, digest)


def grant_of(rank: LocalRank, remote: RemoteEngine | FetchedEngine, home: Endpoint = HOME) -> HeldGrant:
    """Return a grant that the rank is to read the engine by."""
    ref = TransferRef(
        endpoint=home,
        engine_id=remote.spec.engine_id,
        generation=remote.spec.generation,
        transfer_id=TransferId("t"),
        nonce="0" * 32,
    )
    return HeldGrant(GrantId("g"), rank, ref, 1.0, 0.0)


def outcome_of(job: PlanJob) -> PlannedReads | PlanError:
    """Return what a shell says that became of a job."""
    try:
        return job.make()
    except PlanError as error:
        return error
