"""Target: layouts and requests with changed numbers, from validation to the runs that a mover posts."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import msgspec

from kvxferd.errors import KvxferdError
from kvxferd.ids import Rank
from kvxferd.layout import (
    EngineSpec,
    Group,
    GroupKind,
    PackedBlocks,
    RankLayout,
    pack_ids,
)
from kvxferd.layout.presets import deploy
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import (
    Expander,
    TransferTopology,
    block_rules,
    check_blocks,
    check_engine,
    check_request,
    decode_plan,
    encode_plan,
)
from tests.property.fuzz.draw import Draw
from tests.support.fetched_engine import HOME, FetchedEngine

MAX_PARTS = 3
TOKENS = 11
BLOCK_TOKENS = 4


@dataclass(frozen=True)
class Pair:
    """A rank that reads and the engine that it reads: layouts as plain trees, to be changed."""

    spec: Any
    layout: Any
    remote_specs: list[Any]
    remote_layouts: list[Any]


def _pair(model: str, here: dict[str, Any], there: dict[str, Any]) -> Pair:
    """Return two deployments of a model, of so many choices."""
    small = {"block_tokens": BLOCK_TOKENS, "num_blocks": 8}
    local = next(iter(deploy(model, engine_id="a", **small, **here).values()))
    remote = deploy(model, engine_id="b", **small, **there).values()
    trees = msgspec.to_builtins
    return Pair(*map(trees, local), [trees(spec) for spec, _ in remote], [trees(made) for _, made in remote])


@functools.cache
def pairs() -> tuple[Pair, ...]:
    """What the changes start from; every one of them can be read as it is."""
    windows_on_two: dict[str, Any] = {"cp": 2, "interleave": 2}
    states_by_rows: dict[str, Any] = {"tp": 2, "layout": "NHD+SD"}
    return (
        _pair("tiny-dense", {"tp": 2}, {"layout": "NHD"}),
        _pair("tiny-dense", {"layout": "NHD"}, {"tp": 2}),
        _pair("tiny-sliding", {}, windows_on_two),
        _pair("tiny-sliding", windows_on_two, {}),
        _pair("tiny-gdn", {}, states_by_rows),
        _pair("tiny-gdn", states_by_rows, {}),
    )


def try_layouts(source: bytes) -> str:
    """Nothing but KvxferdError is raised, and nothing takes long or much. Return how far it came."""
    draw = Draw(source)
    pair = draw.pick(pairs())
    spec, layout = pair.spec, pair.layout
    specs, layouts = list(pair.remote_specs), list(pair.remote_layouts)
    for _ in range(draw.below(4)):
        target = draw.below(8)
        at = draw.below(len(layouts))
        if target == 0:
            spec = draw.mutated(spec)
        elif target == 1:
            specs[at] = draw.mutated(specs[at])
        elif target < 5:
            layout = draw.mutated(layout)
        else:
            layouts[at] = draw.mutated(layouts[at])
    try:
        mine = msgspec.convert((spec, layout), tuple[EngineSpec, RankLayout])
        theirs = msgspec.convert(list(zip(specs, layouts, strict=True)), list[tuple[EngineSpec, RankLayout]])
    except msgspec.ValidationError:
        return "no structs"
    try:
        return _use(draw, mine, theirs)
    except KvxferdError as error:
        return f"refused: {error.code}"


def _use(draw: Draw, mine: tuple[EngineSpec, RankLayout], theirs: list[tuple[EngineSpec, RankLayout]]) -> str:
    for spec, layout in (mine, *theirs):
        validate_layout(spec, layout)
    ranks = {spec.rank: (spec, layout) for spec, layout in theirs}
    check_engine(ranks)
    remote = {rank: layout for rank, (_, layout) in ranks.items()}
    topology = TransferTopology(*mine)
    plan = topology.plan_remote_engine(FetchedEngine(theirs[0][0], remote), home=HOME)
    topology.describe(theirs[0][0].engine_id)
    num_tokens = draw.pick([TOKENS] * 6 + [0, 1, BLOCK_TOKENS, 2**31, 2**62, 2**64 - 1])
    local_blocks = {group.name: _blocks(draw, group, num_tokens) for group in mine[1].groups}
    first = theirs[0][1]
    remote_blocks = {group.name: _blocks(draw, group, num_tokens) for group in first.groups}
    check_blocks(block_rules(mine[1]), local_blocks, num_tokens)
    if draw.below(2):
        check_blocks(block_rules(first), remote_blocks, num_tokens)  # a hostile source does not
    check_request(plan, local_blocks, remote_blocks, num_tokens)
    return _expand(Expander(decode_plan(encode_plan(plan))), mine[1], remote, local_blocks, remote_blocks)


def _expand(
    expander: Expander,
    layout: RankLayout,
    remote: dict[Rank, RankLayout],
    local_blocks: dict[str, PackedBlocks],
    remote_blocks: dict[str, PackedBlocks],
) -> str:
    bases = {region.region: 0 for region in layout.regions}
    remote_bases = {rank: {r.region: 0 for r in their.regions} for rank, their in remote.items()}
    parts = expander.parts(local_blocks, remote_blocks, TOKENS, bases, remote_bases)
    limit = max((region.size_bytes for region in layout.regions), default=0)
    for part in itertools.islice(parts, MAX_PARTS):
        for runs in part.values():
            assert len(runs.local) == len(runs.remote) == len(runs.length)
            assert not len(runs.local) or int((runs.local + runs.length).max()) <= limit
    return "expanded"


def _blocks(draw: Draw, group: Group, num_tokens: int) -> PackedBlocks:
    """The blocks that the request needs, mostly."""
    tokens = BLOCK_TOKENS if group.kind is GroupKind.STATE else max(1, group.block_tokens)
    shards = group.token_shard.count
    needed = min(-(-num_tokens // (tokens * max(1, shards))), 16)
    ids = list(range(1 if group.kind is GroupKind.STATE else needed))
    if draw.below(8) == 7:
        ids = draw.pick([[], [0], [7, 7], [2**31 - 1], [-1], list(range(64))])
    first = draw.pick([0] * 14 + [tokens * shards, -1, 2**62, -(2**63), 2**63])
    return PackedBlocks(pack_ids(ids), first, num_tokens if group.kind is GroupKind.STATE else -1)
