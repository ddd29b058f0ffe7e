"""What one local rank reads from one remote engine, and the job that plans it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan.block_windows import SourceLists
from kvxferd.plan.pieces import PieceRules
from kvxferd.plan.plan import Plan, plan_bytes
from kvxferd.plan.planner import make_plan

PlanKey = tuple[object, ...]  # all that a plan depends on


class PlannedReads:
    """A plan with what pulls use of it, computed once for all of them.

    Attributes:
        key: what it was planned from; equal keys have equal plans.
        sources: the remote ranks that are read, ascending.
        source_lists: the source's block lists that are read.
        piece_rules: how the reads may be cut by tokens.
        num_bytes: about how much memory the plan takes.
    """

    def __init__(self, key: PlanKey, plan: Plan) -> None:
        self.key = key
        self.plan = plan
        self.sources = plan.sources
        self.source_lists = SourceLists(plan)
        self.piece_rules = PieceRules(plan)
        self.num_bytes = plan_bytes(plan)


class PlanJob(NamedTuple):
    """Reads that are to be planned, by any thread: it takes up to two seconds."""

    key: PlanKey
    spec: EngineSpec
    layout: RankLayout
    remote_spec: EngineSpec
    remote: Mapping[Rank, RankLayout]

    def make(self) -> PlannedReads:
        """Plan them. Raises what `make_plan` raises."""
        return PlannedReads(self.key, make_plan(self.spec, self.layout, self.remote_spec, self.remote))
