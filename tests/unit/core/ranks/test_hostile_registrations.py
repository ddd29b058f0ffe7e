"""What a remote engine that breaks its contract costs the rank that reads it, and the node."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kvxferd.core import Settings
from kvxferd.core.context import NodeContext
from kvxferd.core.peers.remote_engine import RemoteEngine
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.core.sink.plans import Plans
from kvxferd.errors import Code, EngineError
from kvxferd.ids import AgentName, BootId, Endpoint, EngineId, Incarnation, SessionId
from kvxferd.plan import PlanJob, PlannedReads, TransferTopology
from kvxferd.plan.plan import GroupRead
from kvxferd.wire.common import Binding, RankManifest
from tests.support.attention_engines import engine
from tests.support.fetched_engine import learnt, plan_now

HOME, REMOTE = Endpoint("tcp://p:9441"), EngineId("remote")
MAX_HOLD_S = 60.0


def remote(**facts: int) -> RemoteEngine:
    """Return an engine as fetched; all have one generation."""
    binding = Binding(AgentName("a"), b"", (), Incarnation("i"))
    ranks = {
        rank: RankManifest(msgspec.structs.replace(spec, engine_id=REMOTE), layout, binding)
        for rank, (spec, layout) in engine(**facts).items()
    }
    return learnt(ranks)


def reader(**facts: int) -> tuple[NodeContext, LocalRank]:
    """Return a node, and its one rank."""
    settings = Settings(max_hold_s=MAX_HOLD_S)
    context = NodeContext(
        boot=BootId("b"), endpoint=Endpoint("tcp://d:9441"), settings=settings, new_token=str
    )
    ((spec, layout),) = engine(**facts).values()
    return context, LocalRank(SessionId(1), spec, layout, (), Incarnation("i"), 0)


def test_refusals_of_other_facts_end_when_the_first_ones_expire() -> None:
    """Also for a rank that reads nothing else, whose every registration is refused."""
    context, rank = reader()
    plans = Plans(context)
    plan_now(plans, context, rank, HOME, remote(block_tokens=4))
    changed = remote(block_tokens=8)
    for context.now in (1.0, MAX_HOLD_S):
        with pytest.raises(EngineError) as caught:
            plan_now(plans, context, rank, HOME, changed)
        assert caught.value.code is Code.SHAPE_MISMATCH
    context.now = MAX_HOLD_S + 1.0
    plan_now(plans, context, rank, HOME, changed)
    assert rank.topology.get_engine_info(REMOTE, home=HOME).remote_block_size == 8


class Reads(tuple[GroupRead, ...]):
    """The group reads of a plan, which may not be walked as a whole once for each stage."""

    num_walks = 0

    def __iter__(self) -> Iterator[GroupRead]:
        type(self).num_walks += 1
        return super().__iter__()


def test_a_stage_is_reported_without_a_walk_through_the_whole_plan() -> None:
    """The reports of 2,048 stages, with a rank each or two, took 9 s of the event loop."""
    stages, layers = 8, 16
    ((spec, layout),) = engine(layers=layers, heads=2).values()
    source = remote(pp=stages, tp=2, layers=layers, heads=2)
    topology = TransferTopology(spec, layout)

    def planned(job: PlanJob) -> PlannedReads:
        plan = job.make().plan
        reads = PlannedReads(job.key, msgspec.structs.replace(plan, group_reads=Reads(plan.group_reads)))
        Reads.num_walks = 0
        return reads

    made = topology.register_remote_engine(source, planned, home=HOME)
    assert made is not None
    read = [topology.target_remote_ranks(REMOTE, stage, home=HOME) for stage in range(stages)]
    assert Reads.num_walks == 1, "that all lies inside its stage"
    assert read == [[r.tp_rank for r in made.sources if r.pp_rank == stage] for stage in range(stages)]
    assert read == [[0, 1]] * stages
