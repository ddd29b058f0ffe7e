"""What all producers send is what all consumers read: every byte against brute force, each exactly once."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvxferd.errors import PlanError
from kvxferd.ids import GroupName, Rank, RegionId
from kvxferd.layout import GroupKind, PackedBlocks, RankLayout, TokenShard, pack_ids
from kvxferd.plan import Expander, Plan, Runs, SenderPlan, make_plan, sender_plan
from kvxferd.plan.plan import BlockGeometry, GroupRead
from kvxferd.plan.send_pattern import SendPattern
from kvxferd.plan.send_runs import SendRuns, pattern_runs
from kvxferd.plan.sender import sender_plans
from kvxferd.plan.token_segments import common_segments
from tests.support import brute_force
from tests.support.layout_strategies import (
    Engine,
    Model,
    engines,
    lacks_tokens,
    lists,
    models,
    required_from,
)
from tests.support.layout_table import NUM_TOKENS, TABLE, engine
from tests.support.layout_table import lists as lists_of_table

Lists = Mapping[GroupName, PackedBlocks]
RunTable = list[tuple[int, int, int]]  # (local address, remote address, length), ascending

# A nightly run sets RANDOM_PAIRS to thousands.
NUM_PAIRS = int(os.environ.get("RANDOM_PAIRS", "400"))
pytestmark = pytest.mark.timeout(3600)


def budget(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        deadline=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
    )


def plans(sink: Engine, source: Engine) -> dict[Rank, Plan]:
    """Return every consumer's plan."""
    return {
        rank: make_plan(sink.spec_of(rank), layout, source.spec, source.ranks)
        for rank, layout in sink.ranks.items()
    }


def all_sends(sink: Engine, source: Engine, made: Mapping[Rank, Plan]) -> dict[Rank, SenderPlan]:
    """Return every producer's plan."""
    consumers = {rank: (sink.ranks[rank], plan) for rank, plan in made.items()}
    return {rank: sender_plan(rank, layout, consumers) for rank, layout in source.ranks.items()}


def addressed(
    sent: Iterable[SendRuns],
    consumer: Rank,
    source_at: Mapping[RegionId, int],
    destination_at: Mapping[RegionId, int],
) -> Runs:
    """Return what is sent to one consumer, as the reads of it that have the same addresses."""
    mine = [runs for runs in sent if runs.consumer == consumer]
    none = np.zeros(0, dtype=np.int64)
    columns = (
        [runs.destination_offset + destination_at[runs.destination_region] for runs in mine],
        [runs.source_offset + source_at[runs.source_region] for runs in mine],
        [runs.length for runs in mine],
    )
    return Runs(*(np.concatenate([none, *column]).astype(np.uint64) for column in columns))


def listed(runs: Runs) -> RunTable:
    return sorted(zip(*(column.tolist() for column in runs), strict=True))


def whole_lists(engine: Engine, num_tokens: int) -> dict[GroupName, PackedBlocks]:
    """Return lists of every token from 0 on, of ids without neighbours. The ids need not exist."""
    found = {}
    for name, group in engine.group_facts.items():
        if group.kind is GroupKind.STATE:
            found[name] = PackedBlocks(pack_ids([0]), state_at=num_tokens)
        else:
            size = num_tokens // (group.block_tokens * group.token_shard.count)
            found[name] = PackedBlocks(pack_ids(range(0, 2 * size, 2)))
    return found


@pytest.mark.slow
@budget(NUM_PAIRS // 3)
@given(st.data())
def test_the_producers_together_send_what_the_consumers_read(data: st.DataObject) -> None:
    """Whatever the layouts: all of it, once, in the same runs; the consumers' other bytes stay."""
    model: Model = data.draw(models())
    sink, source = data.draw(engines(model, "sink")), data.draw(engines(model, "source"))
    num_tokens = data.draw(st.integers(1, 40))
    mine = data.draw(lists(sink, num_tokens, latest=num_tokens - 1))
    theirs = data.draw(lists(source, num_tokens, latest=num_tokens - 1))
    made = plans(sink, source)
    senders = all_sends(sink, source, made)
    if lacks_tokens(sink, source, mine, theirs, num_tokens):
        event("the source's lists begin late")
        with contextlib.suppress(PlanError):
            check(sink, source, made, senders, mine=mine, theirs=theirs, num_tokens=num_tokens)
        return
    moved = check(sink, source, made, senders, mine=mine, theirs=theirs, num_tokens=num_tokens)
    event("moved" if moved else "nothing to move")


def check(
    sink: Engine,
    source: Engine,
    made: Mapping[Rank, Plan],
    senders: Mapping[Rank, SenderPlan],
    *,
    mine: Lists,
    theirs: Lists,
    num_tokens: int,
) -> int:
    """Carry out what is sent, on real arrays, and compare it with brute force; return the bytes."""
    sent = {rank: list(sender.runs(theirs, mine, num_tokens)) for rank, sender in senders.items()}
    total = 0
    for consumer, layout in sink.ranks.items():
        destination_at = brute_force.bases(layout, 0)
        at = {r: brute_force.bases(source.ranks[r], i + 1) for i, r in enumerate(sorted(source.ranks))}
        runs = {rank: addressed(sent[rank], consumer, at[rank], destination_at) for rank in sorted(sent)}
        total += brute_force.check_pull(
            local=(layout, mine),
            remote=source.ranks,
            remote_lists=theirs,
            required=required_from(sink, dict(mine), num_tokens),
            num_tokens=num_tokens,
            runs=runs,
        )
        read = Expander(made[consumer]).expand(mine, theirs, num_tokens, destination_at, at)
        assert {rank: listed(some) for rank, some in runs.items() if len(some.length)} == {
            rank: listed(some) for rank, some in read.items()
        }
    for rank, sender in senders.items():
        parts = list(sender.runs(theirs, mine, num_tokens, max_runs=50))
        assert sum(int(p.length.sum()) for p in parts) == sum(int(p.length.sum()) for p in sent[rank])
    return total


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_row_of_the_layout_table_is_sent_as_it_is_read(row: str, is_swapped: bool) -> None:
    """The readers' runs of these rows are checked byte by byte, through movers, in random_pairs."""
    model, *deployments = TABLE[row]
    first, second = (engine(model, **choices) for choices in deployments)
    source, sink = (second, first) if is_swapped else (first, second)
    remote = {rank: layout for rank, (_, layout) in source.items()}
    spec = source[Rank(0, 0)][0]
    made = {rank: make_plan(*own, spec, remote) for rank, own in sink.items()}
    senders = sender_plans(remote, {rank: (sink[rank][1], plan) for rank, plan in made.items()})
    theirs, mine = lists_of_table(source, 5), lists_of_table(sink, 1)
    at = {rank: brute_force.bases(layout, i + 1) for i, (rank, layout) in enumerate(sorted(remote.items()))}
    sent = {rank: list(sender.runs(theirs, mine, NUM_TOKENS)) for rank, sender in senders.items()}
    for consumer, plan in made.items():
        here = brute_force.bases(sink[consumer][1], 0)
        read = Expander(plan).expand(mine, theirs, NUM_TOKENS, here, at)
        runs = {rank: addressed(sent[rank], consumer, at[rank], here) for rank in sent}
        assert {rank: listed(some) for rank, some in runs.items() if len(some.length)} == {
            rank: listed(some) for rank, some in read.items()
        }


@budget(NUM_PAIRS // 6)
@given(st.data())
def test_an_entry_counts_exactly_what_is_sent(data: st.DataObject) -> None:
    """Over whole blocks of both sides: the bytes of so many tokens, in copies of one length."""
    model: Model = data.draw(models())
    sink, source = data.draw(engines(model, "sink")), data.draw(engines(model, "source"))
    sizes = [
        group.block_tokens * group.token_shard.count
        for engine in (sink, source)
        for group in engine.group_facts.values()
        if group.kind is GroupKind.ATTENTION
    ]
    num_tokens = math.lcm(*sizes) if sizes else 1
    if num_tokens > 5000:
        event("block sizes meet too rarely")
        return
    mine, theirs = whole_lists(sink, num_tokens), whole_lists(source, num_tokens)
    for sender in all_sends(sink, source, plans(sink, source)).values():
        for pattern in sender.patterns:
            num_bytes = pattern.num_bytes(num_tokens)
            sent = sum(int(runs.length.sum()) for runs in pattern_runs([pattern], theirs, mine))
            assert num_bytes == sent
            assert all(items % pattern.num_items == 0 for items in segment_items(pattern, theirs, mine))


def segment_items(pattern: SendPattern, theirs: Lists, mine: Lists) -> list[int]:
    """Return the items that lie in one block on both sides, for each pair of blocks that meet."""
    read = GroupRead(Rank(0, 0), pattern.destination, pattern.source, pattern.granule_tokens, ())
    found = common_segments(read, mine[pattern.destination.group], theirs[pattern.source.group])
    return found.num_items.tolist()


@budget(NUM_PAIRS // 6)
@given(st.data())
def test_a_triple_where_there_is_one_sends_the_same_bytes(data: st.DataObject) -> None:
    """Of a kernel block, the triples name the bytes that the runs name; elsewhere there is no triple."""
    model: Model = data.draw(models())
    sink, source = data.draw(engines(model, "sink")), data.draw(engines(model, "source"))
    for rank, sender in all_sends(sink, source, plans(sink, source)).items():
        for pattern in sender.patterns:
            if pattern.copy.axes or not pattern.is_whole_block:
                event("no triple")
                with pytest.raises(ValueError, match="as one offset and one length"):
                    pattern.parts()
                continue
            event("a triple")
            assert in_block_3(pattern, source.ranks[rank], sink.ranks[pattern.consumer]) == named(pattern)


def in_block_3(pattern: SendPattern, source: RankLayout, sink: RankLayout) -> set[tuple[int, int]]:
    """Return (source, destination) of each byte that the triples move between the blocks 3."""
    from_tensor, to_tensor = tensor_offsets(source), tensor_offsets(sink)
    pairs = set()
    for part in pattern.parts():
        at = from_tensor[part.layer, part.component] + 3 * pattern.source_strides.block + part.source_offset
        to = to_tensor[part.layer, part.component] + 3 * pattern.destination_strides.block
        to += part.destination_offset
        pairs |= {(at + byte, to + byte) for byte in range(part.length)}
    return pairs


def named(pattern: SendPattern) -> set[tuple[int, int]]:
    """Return (source, destination) of each byte of the blocks 3 that the pattern's runs move."""
    alone = dataclasses.replace(
        pattern, source=kernel_block(pattern.source), destination=kernel_block(pattern.destination)
    )
    block = PackedBlocks(pack_ids([3]))
    runs = pattern_runs([alone], {alone.source.group: block}, {alone.destination.group: block})
    return {
        (at + byte, to + byte)
        for some in runs
        for at, to, length in zip(*(column.tolist() for column in some[3:]), strict=True)
        for byte in range(length)
    }


def kernel_block(side: BlockGeometry) -> BlockGeometry:
    """Return the geometry in which an id is one kernel block of tokens that nobody shares."""
    return msgspec.structs.replace(side, blocks_per_id=1, shard=TokenShard())


def tensor_offsets(layout: RankLayout) -> dict[tuple[int, str], int]:
    return {(tensor.layer, tensor.component): tensor.offset for tensor in layout.tensors}
