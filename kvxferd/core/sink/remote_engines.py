"""Remote engines, and the plans by which local ranks read them, each computed once."""

from __future__ import annotations

import contextlib

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import EmitRecord, MakePlan
from kvxferd.core.limits.node_plans import NodePlanCache
from kvxferd.core.peers.remote_engine import RemoteEngine
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.core.sink.held_grant import HeldGrant
from kvxferd.errors import BusyError, KvxferdError, PlanError
from kvxferd.plan import Plan, PlanJob, PlanKey, PlanOwner, RegisteredEngine, require_pp_aware
from kvxferd.records import TopologyRecord


class RemoteEngineRegistry:
    """Registers remote engines with local ranks. Ranks with equal layouts share their plans."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._plan_cache = NodePlanCache()
        self._waiting: dict[PlanKey, list[HeldGrant]] = {}  # for plans that are being made

    def find_plan(self, grant: HeldGrant, remote: RemoteEngine) -> Plan | None:
        """Return the plan by which the grant's rank reads the engine, which its topology has from now on.

        None: it is being made, and `plan_made` returns the grant. Raises PlanError where the layouts cannot
        be read from one another, EngineError where the engine is the rank's own, is too deep for one that is
        not PP-aware, or has other facts than the same generation had before, BusyError where pulls read by
        too many plans.
        """
        rank, home, now = grant.rank, grant.ref.endpoint, self._context.now
        topology = rank.topology
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
        if isinstance(plan, PlanJob):
            self._wait(plan, grant)
            return None
        topology.expire(unused_since)
        after = topology.find(engine_id, home)
        if after is not before:
            self._report(rank, after)
        return plan

    def _wait(self, job: PlanJob, grant: HeldGrant) -> None:
        waiting = self._waiting.setdefault(job.key, [])
        waiting.append(grant)
        if len(waiting) == 1:
            self._context.emit(MakePlan(job, grant.rank.uid))

    def plan_made(self, job: PlanJob, made: Plan | KvxferdError) -> list[HeldGrant]:
        """Keep a plan, for the first user who waits and has room for it; return the grants that waited."""
        waiting = self._waiting.pop(job.key, [])
        if not isinstance(made, Plan | PlanError):
            return waiting
        for grant in waiting:
            owner = PlanOwner(grant.rank.uid, grant.ref.endpoint)
            with contextlib.suppress(PlanError, BusyError):  # which each of them is told when it looks
                self._plan_cache.put(job, made, owner, self._context.now)
                break
        return waiting

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
