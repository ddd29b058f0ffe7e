"""What a local rank reads of a remote engine: worked out once, kept in the rank's topology."""

from __future__ import annotations

import weakref

from kvxferd.core.effects import Observed
from kvxferd.core.moment import Moment
from kvxferd.core.peers import RemoteEngine
from kvxferd.core.registry import LocalRank, Planned
from kvxferd.core.snapshot import TopologyRecord
from kvxferd.plan import Plan, PlanCache, require_pp_aware

# Engines that a rank knows its reads of: it reads from tens. With a hybrid engine's its layouts are kept.
MAX_PLANNED = 256


class Planning:
    """Plans by digest of the layouts; ranks that are laid out alike share the work."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._plans = PlanCache()

    def plan(self, rank: LocalRank, remote: RemoteEngine) -> Plan:
        """Return what the rank reads of the engine, registering the engine in the rank's topology.

        Raises PlanError where the layouts cannot be read from one another, EngineError where the
        engine is the rank's own, is too deep for one that is not PP-aware, or has other facts than
        the same generation had before.
        """
        engine_id = remote.spec.engine_id
        known = rank.planned.get(engine_id)
        if known is not None and known.remote() is remote:
            known.wanted = self._moment.now
            rank.planned[engine_id] = rank.planned.pop(engine_id)  # the last one wanted is the last in order
            return known.plan
        if not rank.spec.pp_aware:
            require_pp_aware(remote.ranks, f"engine {rank.spec.key}")
        layouts = remote.layouts()
        plan = self._plans.get(rank.spec, rank.layout, remote.spec, layouts)
        rank.topology.register_remote_ranks(remote.spec, layouts, plan)
        self._forget_unwanted(rank)
        rank.planned.pop(engine_id, None)
        rank.planned[engine_id] = Planned(weakref.ref(remote), plan, self._moment.now)
        for stage in range(remote.spec.pp_size):
            text = rank.topology.describe(engine_id, stage)
            record = TopologyRecord(
                sink=rank.spec.engine_id, rank=rank.spec.rank, source=engine_id, stage=stage, text=text
            )
            self._moment.do(Observed(record))
        return plan

    def _forget_unwanted(self, rank: LocalRank) -> None:
        while rank.planned:
            engine_id, known = next(iter(rank.planned.items()))
            if len(rank.planned) < MAX_PLANNED and not self._moment.is_unwanted(known.wanted):
                return
            del rank.planned[engine_id]
            rank.topology.unregister_remote_engine(engine_id)
