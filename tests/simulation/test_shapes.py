"""What the simulation's engines hold: legal, readable by one another, and filled as brute force has it."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from kvxferd.client.arguments import pack_blocks
from kvxferd.ids import GroupName, Rank, RegionId
from kvxferd.layout import BlockList, GroupKind, PackedBlocks
from kvxferd.layout.presets import LayerKind
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import (
    BlockRules,
    Expander,
    PieceRules,
    SourceLists,
    block_rules,
    check_blocks,
    check_engine,
    check_open_blocks,
    check_request,
    engine_rules,
    has_all_blocks,
    make_plan,
)
from tests.simulation.contents import Contents, Memories, least_reads
from tests.simulation.shapes import (
    Deployment,
    Lists,
    RankShape,
    draw_deployment,
    draw_model,
    draw_request,
    own_lists,
    split_publish,
)
from tests.support import brute_force

NUM_PAIRS = 300
REQUEST = 7


class Pull(NamedTuple):
    """One model's engines, and a request of which the sink pulls what the source has published."""

    seed: int
    source: Deployment
    sink: Deployment
    published: Lists
    pulled: Lists
    num_tokens: int

    def rng(self) -> random.Random:
        """Return a new generator: draws of one test change none of another's."""
        return random.Random(self.seed)

    def steps(self, rng: random.Random) -> list[int]:
        """Return how many tokens are written at each step."""
        return sorted({rng.randint(0, self.num_tokens) for _ in range(3)} | {self.num_tokens})


@cache
def draw_pull(seed: int) -> Pull:
    rng = random.Random(seed)
    model = draw_model(rng)
    source, sink = draw_deployment(rng, model, "source"), draw_deployment(rng, model, "sink")
    while True:
        num_tokens = rng.randint(1, 24)
        published = draw_request(rng, source, num_tokens, list(range(source.num_blocks)))
        pulled = draw_request(rng, sink, num_tokens, list(range(sink.num_blocks)), is_pull=True)
        if published is not None and pulled is not None:
            return Pull(seed, source, sink, published, pulled, num_tokens)


def draw_pulls(num_pulls: int = NUM_PAIRS) -> Iterator[Pull]:
    return map(draw_pull, range(num_pulls))


def pack(lists: Mapping[str, BlockList]) -> dict[GroupName, PackedBlocks]:
    return pack_blocks(lists, None, "test")


def noise(shape: RankShape, seed: int) -> Memories:
    rng = random.Random(seed)
    return shape.views([bytearray(rng.randbytes(size)) for size in shape.memory_bytes])


def rules_of(engine: Deployment) -> BlockRules:
    return engine_rules(block_rules(layout) for layout in engine.layouts.values())


def test_engines_of_one_model_read_each_other() -> None:
    for pull in draw_pulls():
        for engine, other in ((pull.source, pull.sink), (pull.sink, pull.source)):
            check_engine({rank: (shape.spec, shape.layout) for rank, shape in engine.ranks.items()})
            for shape in engine.ranks.values():
                validate_layout(shape.spec, shape.layout)
                make_plan(shape.spec, shape.layout, other.ranks[Rank(0, 0)].spec, other.layouts)


def test_every_kind_is_drawn_as_often_as_it_should_be() -> None:
    seen: Counter[str] = Counter()
    for pull in draw_pulls():
        kinds = [group.kind for group in pull.source.groups.values()]
        seen[f"{kinds.count(GroupKind.ATTENTION)} attention"] += 1
        seen["a state"] += GroupKind.STATE in kinds
        engines = (pull.source, pull.sink)
        block_tokens = [
            {g.block_tokens for g in engine.groups.values() if g.block_tokens} for engine in engines
        ]
        seen["unequal blocks"] += block_tokens[0] != block_tokens[1]
        seen["a hit"] += any(len(one.ids) and one.first_token for one in pull.pulled.values())
        seen["nothing to pull"] += not any(len(one.ids) for one in pull.pulled.values())
        for engine in engines:
            layouts, groups = engine.layouts.values(), engine.groups.values()
            tensors = [tensor for layout in layouts for tensor in layout.tensors]
            seen["a window"] += any(group.sliding_window for group in groups)
            seen["shared tokens"] += any(group.token_shard.count > 1 for group in groups)
            seen["kernel blocks"] += any(group.physical_blocks_per_logical > 1 for group in groups)
            seen["granules"] += any(tensor.granule_tokens > 1 for tensor in tensors)
            seen["chunks"] += any(tensor.num_chunks > 1 for tensor in tensors)
            states = {(t.region, t.offset) for t in tensors if t.component in ("conv.x", "conv.Q")}
            seen["groups overlay"] += any((t.region, t.offset) in states for t in tensors if t.token_stride)
            seen["stages lack groups"] += any(len(layout.groups) < len(groups) for layout in layouts)
            shape = engine.ranks[Rank(0, 0)]
            seen[f"{len(shape.places)} regions in {len(shape.memory_bytes)}"] += 1
            seen[f"pp {shape.spec.pp_size}"] += 1
            seen[f"tp {shape.spec.tp_size}"] += 1
    assert seen["1 attention"] > seen["2 attention"] > NUM_PAIRS // 5, seen
    assert NUM_PAIRS // 10 < seen["a state"] < NUM_PAIRS // 3, seen
    assert min(seen.values()) >= 3, seen
    assert len(seen) == 27, seen


def test_groups_that_overlay_one_another_share_no_byte_of_two_block_ids() -> None:
    rng = random.Random(0)
    hybrids = [m for m in (draw_model(rng) for _ in range(NUM_PAIRS)) if LayerKind.STATE in m.kinds]
    engines = [draw_deployment(rng, model, "hybrid") for model in hybrids for _ in range(4)]
    for shape in (shape for engine in engines for shape in engine.ranks.values()):
        contents, memories = Contents(shape.layout), noise(shape, 0)
        blocks = [(group.name, block) for group in shape.layout.groups for block in range(group.num_blocks)]
        for group, block in blocks:
            contents.overwrite(memories, group, [block], block)
        for group, block in blocks:
            assert set(contents.block_bytes(memories, group, block)) <= {block}


def test_daemons_take_the_lists_of_publishes_and_pulls() -> None:
    for pull in draw_pulls():
        published, num_tokens = pack(pull.published), pull.num_tokens
        check_blocks(rules_of(pull.source), published, num_tokens)
        for shape in pull.sink.ranks.values():
            own = pack(own_lists(shape.layout, pull.pulled))
            check_blocks(block_rules(shape.layout), own, num_tokens)
            plan = make_plan(
                shape.spec, shape.layout, pull.source.ranks[Rank(0, 0)].spec, pull.source.layouts
            )
            check_request(plan, own, published, num_tokens)


def test_requests_take_blocks_once_and_only_where_there_are_enough() -> None:
    for pull in draw_pulls(100):
        rng, free = pull.rng(), list(range(pull.sink.num_blocks))
        taken: list[int] = []
        while (lists := draw_request(rng, pull.sink, pull.num_tokens, free)) is not None:
            taken += [block for listed in lists.values() for block in listed.ids]
        assert sorted(taken + free) == list(range(pull.sink.num_blocks))


def test_daemons_take_a_publish_that_grows() -> None:
    for pull in draw_pulls():
        rng, rules = pull.rng(), rules_of(pull.source)
        published, is_whole = dict[GroupName, PackedBlocks](), False
        for number, part in enumerate(split_publish(rng, pull.source, pull.published, pull.steps(rng))):
            assert not (part and is_whole), "blocks are added to lists that are whole"
            extend(published, part)
            check_open_blocks(rules, published, pull.num_tokens, pack(part) if number else None)
            is_whole = has_all_blocks(rules, published, pull.num_tokens)
        assert is_whole
        assert published == pack(pull.published)


def extend(published: dict[GroupName, PackedBlocks], part: Lists) -> None:
    """Add blocks behind those that are published, or a state in the former's place, as a daemon does."""
    for name, added in pack(part).items():
        before = published.get(name)
        is_first = before is None or not before.ids or added.state_at >= 0  # a state in its former place
        published[name] = added if is_first else PackedBlocks(before.ids + added.ids, before.first_token)


def test_content_lies_where_brute_force_finds_it() -> None:
    """Equal coordinates hold equal bytes on every rank of both engines, and no other byte is written."""
    num_equal, num_neighbours = Counter[int](), Counter[int]()
    for pull in draw_pulls(40):
        values: dict[brute_force.Coordinate, int] = {}
        for engine, lists in ((pull.source, pull.published), (pull.sink, pull.pulled)):
            for shape in engine.ranks.values():
                memories, before = noise(shape, 1), noise(shape, 1)
                contents = Contents(shape.layout)
                contents.write(memories, lists, REQUEST)
                for coordinate, (region, at) in brute_force.places(shape.layout, pack(lists)).items():
                    found = memories[region][at]
                    assert values.setdefault(coordinate, found) == found, coordinate
                    memories[region][at] = before[region][at]
                assert all((memories[region] == before[region]).all() for region in memories)
        for (layer, component, *place), found in values.items():
            for axis in range(3):  # unit, token and byte
                place[axis] += 1
                if (other := values.get((layer, component, *place))) is not None:
                    num_neighbours[axis] += 1
                    num_equal[axis] += other == found
                place[axis] -= 1
    assert all(num_equal[axis] < 0.02 * num_neighbours[axis] for axis in range(3)), (
        num_equal,
        num_neighbours,
    )


def test_a_request_is_written_in_steps_and_no_step_writes_what_is_not_computed() -> None:
    for pull in draw_pulls(100):
        rng = pull.rng()
        shape, step = rng.choice(list(pull.source.ranks.values())), rng.randint(0, pull.num_tokens)
        contents, before, whole, memories = Contents(shape.layout), *(noise(shape, 1) for _ in range(3))
        contents.write(whole, pull.published, REQUEST)
        contents.write(memories, pull.published, REQUEST, 0, step)
        granules = {(t.layer, t.component): t.granule_tokens for t in shape.layout.tensors}
        for coordinate, (region, at) in brute_force.places(shape.layout, pack(pull.published)).items():
            token = coordinate[3]
            end = pull.num_tokens if token == brute_force.STATE else token + granules[coordinate[:2]]
            right = whole if end <= step else before
            assert memories[region][at] == right[region][at]
        contents.write(memories, pull.published, REQUEST, step)
        assert all((memories[region] == whole[region]).all() for region in memories)


@pytest.mark.parametrize("is_progressive", [False, True])
def test_a_planned_pull_delivers_what_is_expected_and_nothing_else(is_progressive: bool) -> None:
    num_required = num_of_others = 0
    for pull in draw_pulls(200):
        rng = pull.rng()
        shape = rng.choice(list(pull.sink.ranks.values()))
        layout, mine = shape.layout, own_lists(shape.layout, pull.pulled)
        contents, memories, before = Contents(layout), noise(shape, 0), noise(shape, 0)
        moved = read(rng, pull, shape, memories, pull.steps(rng) if is_progressive else [pull.num_tokens])
        sources = map(Contents, pull.source.layouts.values())
        assert moved == least_reads(contents, sources, mine, pull.published)[0]
        wrong = contents.check(memories, mine, REQUEST, pull.num_tokens)
        assert wrong.count == 0, wrong.first
        num_required += contents.check(before, mine, REQUEST, pull.num_tokens).count
        num_of_others += contents.check(memories, mine, REQUEST + 1, pull.num_tokens).count
        for name, listed in mine.items():
            for held in (memories, before):
                contents.overwrite(held, name, listed.ids, 0xEE)
            assert all(set(contents.block_bytes(memories, name, block)) <= {0xEE} for block in listed.ids)
        assert all((memories[region] == before[region]).all() for region in memories)
    assert num_required > 10_000
    assert num_of_others > 0.98 * num_required


def read(rng: random.Random, pull: Pull, shape: RankShape, memories: Memories, steps: list[int]) -> int:
    """Write the request step by step, and carry out what is read of it for one rank; return the bytes."""
    source, mine = pull.source, pack(own_lists(shape.layout, pull.pulled))
    plan = make_plan(shape.spec, shape.layout, source.ranks[Rank(0, 0)].spec, source.layouts)
    rules, expander = PieceRules(plan), Expander(plan)
    remote = {rank: noise(held, 1 + number) for number, (rank, held) in enumerate(source.ranks.items())}
    contents = {rank: Contents(layout) for rank, layout in source.layouts.items()}
    theirs = dict.fromkeys(map(GroupName, source.groups), PackedBlocks(b""))
    num_bytes = num_written = num_read = 0
    for tokens, part in zip(steps, split_publish(rng, source, pull.published, steps), strict=True):
        extend(theirs, part)
        is_last = tokens == pull.num_tokens
        for rank, one in contents.items():
            one.write(remote[rank], pull.published, REQUEST, num_written, None if is_last else tokens)
        num_written = tokens
        end = tokens if is_last else tokens - tokens % (rules.step_tokens or tokens + 1)
        piece = rules.slice(mine, num_read, None if is_last else end)
        windows = SourceLists(plan).windows(theirs, piece, end)
        check_request(plan, piece, windows, end)
        bases = {rank: addresses(held) for rank, held in remote.items()}
        for runs in expander.expand(piece, windows, end, addresses(memories), bases).values():
            for to, at, size in np.stack(runs, axis=1).tolist():
                ctypes.memmove(to, at, size)
                num_bytes += size
        num_read = end
    return num_bytes


def addresses(memories: Memories) -> dict[RegionId, int]:
    return {region: memory.ctypes.data for region, memory in memories.items()}


def test_one_wrong_byte_is_found_and_named() -> None:
    for pull in draw_pulls(100):
        rng = pull.rng()
        shape = rng.choice(list(pull.sink.ranks.values()))
        contents, memories = Contents(shape.layout), noise(shape, 0)
        contents.write(memories, pull.pulled, REQUEST)
        mine = pack(own_lists(shape.layout, pull.pulled))
        windows = {group.name: group.sliding_window or pull.num_tokens for group in shape.layout.groups}
        window_of = {(t.layer, t.component): windows[t.group] for t in shape.layout.tensors}
        required = [
            (coordinate, place)
            for coordinate, place in brute_force.places(shape.layout, mine).items()
            if coordinate[3] == brute_force.STATE
            or pull.num_tokens - window_of[coordinate[:2]] <= coordinate[3] < pull.num_tokens
        ]
        if not required:
            continue
        (layer, component, unit, token, byte), (region, at) = rng.choice(required)
        memories[region][at] ^= 0x40
        wrong = contents.check(memories, pull.pulled, REQUEST, pull.num_tokens)
        token = pull.num_tokens - 1 if token == brute_force.STATE else token
        assert wrong.count == 1
        assert wrong.first.startswith(
            f"layer {layer}, {component}, unit {unit}, byte {byte}, token {token}, "
        )
