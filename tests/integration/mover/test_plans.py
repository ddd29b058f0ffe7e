"""A mover that is given ever new plans, as a peer that restarts under new layouts has them made."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from kvxferd.errors import Code
from kvxferd.plan import Plan, encode_plan, make_plan
from kvxferd.wire.mover import DropRemote, LoadPlan, PullOutcome
from tests.support.mover_harness import WORD, Node, Served, Sink, Worker, serve, sink
from tests.support.nodes.processes import rss_kib

BLOCK_TOKENS = 4096
NUM_PLANS = 160


def plans_of_many_runs(reader: Sink, theirs: Worker) -> list[Plan]:
    """Return plans that differ in how many blocks the source has. A block is 32,768 runs, of 900 KiB."""
    plans = []
    for number in range(NUM_PLANS):
        (group,) = theirs.layout.groups
        group = msgspec.structs.replace(group, num_blocks=group.num_blocks - number)
        layout = msgspec.structs.replace(theirs.layout, groups=(group,))
        rank = reader.worker
        plans.append(make_plan(rank.spec, rank.layout, theirs.spec, {theirs.spec.rank: layout}))
    return plans


async def read_by(reader: Sink, plan: Plan, source: Served, block: int) -> PullOutcome:
    """Read the source's block 3 into a block, by a plan that the mover is sent."""
    reader.plan = plan
    reader.mover.send(LoadPlan(digest=plan.digest, encoded=encode_plan(plan)))
    fence = source.place(0, WORD)
    return await reader.outcome(reader.start([source], fence, [block], [3], tokens=BLOCK_TOKENS))


async def test_the_memory_of_a_mover_stays_bounded_over_many_plans(
    node: Node, make_worker: Callable[..., Worker]
) -> None:
    """The tables of all would take 140 MiB. A plan whose tables were dropped reads what is right."""
    shape = {"block_tokens": BLOCK_TOKENS, "head_dim": 2, "blocks": NUM_PLANS + 4}
    ours, theirs = make_worker("D", layout="HND", **shape), make_worker("P", layout="NHD", **shape)
    theirs.fill(1)
    source = await serve(node, theirs)
    reader = await sink(node, ours, [source])
    source.page.write(0, WORD)
    plans = plans_of_many_runs(reader, theirs)
    assert (await read_by(reader, plans[0], source, 0)).delivered
    before_kib = rss_kib(reader.mover.pid)
    reader.mover.send(DropRemote(agent=source.mover.agent))
    for plan in plans[1:]:  # expanded, and refused at once: to read so many runs takes 20 s
        outcome = await read_by(reader, plan, source, 0)
        assert outcome.code is Code.TRANSPORT, outcome
        assert not outcome.delivered
    reader.know(source.mover.agent, source.bound.metadata, source.fence.metadata)
    ours.array[:] = 0
    assert (await read_by(reader, plans[0], source, 1)).delivered
    by_head, by_token = ours.blocks([1]), theirs.blocks([3])
    head_bytes = by_head.size // len(by_head) // BLOCK_TOKENS // 2
    assert np.array_equal(
        by_head.reshape(-1, 2, BLOCK_TOKENS, head_bytes),
        by_token.reshape(-1, BLOCK_TOKENS, 2, head_bytes).swapaxes(1, 2),
    )
    assert not np.any(ours.blocks([one for one in range(NUM_PLANS) if one != 1]))
    assert rss_kib(reader.mover.pid) - before_kib < 64 << 10
    source.close()
