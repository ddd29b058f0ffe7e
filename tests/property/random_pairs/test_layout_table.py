"""Every kind of cache that engines keep, between unlike deployments, both ways, through real movers.

What cannot be read is refused by name, field by field with both values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from kvxferd.errors import LayoutError, PlanError
from kvxferd.ids import GroupName, Rank
from kvxferd.layout import Group, GroupKind, PackedBlocks, pack_ids
from kvxferd.layout.presets import MODELS
from kvxferd.layout.presets.deploy import Ranks, deploy, with_kv_dtype
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import check_blocks, check_engine, make_plan
from tests.support.checked_pull import transfer
from tests.support.mover_pair import Movers

NUM_BLOCKS, NUM_TOKENS = 48, 37
DENSE, QUANTISED, MLA = "tiny-dense", "tiny-quantised", "tiny-mla"

# model, one deployment, the other; each reads the other
TABLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "TP wider": (DENSE, {"tp": 1}, {"tp": 4}),
    "TP equal": (DENSE, {"tp": 2}, {"tp": 2}),
    "TP 3 and 2": (DENSE, {"tp": 3}, {"tp": 2}),
    "TP 6 and 4": (DENSE, {"tp": 6}, {"tp": 4}),
    "TP beyond the heads on one side": (DENSE, {"tp": 8}, {"tp": 2}),
    "TP beyond the heads on both": (DENSE, {"tp": 8}, {"tp": 16}),
    "PP any to any": (DENSE, {"pp": 3}, {"pp": 2, "tp": 2}),
    "PP with uneven stages": (DENSE, {"pp": 2, "stages": (1, 3)}, {"pp": 3, "stages": (2, 1, 1)}),
    "block sizes, one a multiple": (DENSE, {"block_tokens": 16}, {"block_tokens": 4}),
    "block sizes 12 and 16": (DENSE, {"block_tokens": 12}, {"block_tokens": 16}),
    "HND and NHD": (DENSE, {"layout": "HND"}, {"layout": "NHD"}),
    "K/V split first and blocks first": (DENSE, {"layout": "kv-first"}, {"layout": "blocks-first"}),
    "cross-layer and packed per head": (DENSE, {"layout": "cross-layer"}, {"layout": "packed", "tp": 2}),
    "padded pages": (DENSE, {"page_bytes": 8192}, {"tp": 2}),
    "vectorised K": (DENSE, {"layout": "vectorised"}, {"layout": "NHD", "tp": 2}),
    "MLA with an indexer": (MLA, {"tp": 4}, {"tp": 2, "pp": 2, "block_tokens": 8}),
    "sliding windows beside full attention": ("tiny-sliding", {"tp": 2}, {"tp": 1, "layout": "NHD"}),
    "Mamba2 hybrid": ("tiny-mamba2", {"tp": 1}, {"tp": 2, "block_tokens": 8}),
    "Mamba2, groups fewer than TP": ("tiny-mamba2", {"tp": 4}, {"tp": 2}),
    "Mamba2, DS and SD": ("tiny-mamba2", {"layout": "HND+SD", "tp": 2}, {"layout": "NHD+DS", "tp": 1}),
    "Mamba2, own pages": ("tiny-mamba2", {"shared_pages": False}, {"tp": 2}),
    "Mamba2, logical blocks of other physical ones": (
        "tiny-mamba2",
        {"tp": 1, "block_tokens": 2},
        {"tp": 2, "block_tokens": 4},
    ),
    "Mamba1": ("tiny-mamba1", {"tp": 1}, {"tp": 2, "pp": 2}),
    "GDN": ("tiny-gdn", {"tp": 2}, {"tp": 1, "pp": 2}),
    "GDN, SD on both": ("tiny-gdn", {"tp": 2, "layout": "HND+SD"}, {"tp": 1, "layout": "NHD+SD"}),
    "context parallelism on one side": (DENSE, {"cp": 2, "interleave": 2}, {"tp": 2}),
    "context parallelism on both": (DENSE, {"cp": 2, "interleave": 1}, {"cp": 3, "interleave": 4}),
    "context parallelism of a latent": (MLA, {"cp": 2, "interleave": 4}, {"tp": 2}),
    "quantised with scales": (QUANTISED, {"tp": 2}, {"tp": 1, "layout": "NHD", "block_tokens": 8}),
}


def engine(model: Any, **choices: Any) -> Ranks:
    ranks = deploy(model, num_blocks=NUM_BLOCKS, **({"block_tokens": 4} | choices))
    for spec, layout in ranks.values():
        validate_layout(spec, layout)
    check_engine(ranks)
    return ranks


def lists(ranks: Ranks, seed: int, first_token: int = 0) -> dict[GroupName, PackedBlocks]:
    """A request's lists. Groups of a hybrid share pages, so no id stands in two lists."""
    groups: dict[GroupName, Group] = {g.name: g for _, layout in ranks.values() for g in layout.groups}
    free = [(11 * i + seed) % NUM_BLOCKS for i in range(NUM_BLOCKS)]
    found = {}
    for name, group in sorted(groups.items()):
        if group.kind is GroupKind.STATE:
            found[name] = PackedBlocks(pack_ids([free.pop()]), state_at=NUM_TOKENS)
            continue
        span = group.block_tokens * group.token_shard.count
        first = first_token // span * span
        ids = [free.pop() for _ in range(-(-(NUM_TOKENS - first) // span))]
        found[name] = PackedBlocks(pack_ids(ids), first_token=first)
    return found


def read_all(movers: Movers, sink: Ranks, source: Ranks, first_token: int = 0) -> int:
    """Every rank of the sink reads the source; returns all bytes moved."""
    mine, theirs = lists(sink, 1, first_token), lists(source, 5)
    remote = {rank: held[1] for rank, held in source.items()}
    moved = 0
    for spec, layout in sink.values():
        own = {group.name: mine[group.name] for group in layout.groups}
        check_blocks(layout, own, NUM_TOKENS)
        moved += transfer(
            movers,
            spec,
            layout,
            source[Rank(0, 0)][0],
            remote,
            mine=own,
            theirs=theirs,
            num_tokens=NUM_TOKENS,
        )
    return moved


@pytest.mark.parametrize("row", TABLE)
def test_a_row_works_both_ways(movers: Movers, row: str) -> None:
    model, one, other = TABLE[row]
    first, second = engine(model, **one), engine(model, **other)
    assert read_all(movers, first, second) > 0
    assert read_all(movers, second, first) > 0


def test_a_draft_models_layers_travel_beside_the_targets(movers: Movers) -> None:
    draft = dataclasses.replace(MODELS[DENSE], name="draft", kinds=MODELS[DENSE].kinds[:1])
    first = engine(DENSE, draft=draft)
    assert read_all(movers, first, engine(DENSE, draft=draft, tp=2, layout="NHD")) > 0


def test_a_prefix_hit_moves_only_the_missing_tokens(movers: Movers) -> None:
    sink, source = engine(DENSE), engine(DENSE, tp=2)
    whole = read_all(movers, sink, source)
    blocks = -(-NUM_TOKENS // 4)
    assert read_all(movers, sink, source, first_token=20) == whole * (blocks - 5) // blocks


def other(model: str, **changes: Any) -> Any:
    return dataclasses.replace(MODELS[model], **changes)


REFUSED = {
    "dtype": (with_kv_dtype(MODELS[DENSE], "float8_e4m3fn", 1), ["bfloat16", "float8_e4m3fn"]),
    "missing layers": (other(DENSE, kinds=MODELS[DENSE].kinds[:-1]), ["layer"]),
    "another model": (MODELS[MLA], ["fingerprint", "tiny-dense", "tiny-mla", "num_kv_heads"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused_with_both_values(what: str) -> None:
    model, named = REFUSED[what]
    sink, source = engine(DENSE), engine(model)
    remote = {rank: held[1] for rank, held in source.items()}
    spec, layout = sink[Rank(0, 0)]
    with pytest.raises(PlanError) as raised:
        make_plan(spec, layout, source[Rank(0, 0)][0], remote)
    assert all(word in raised.value.message for word in named), raised.value.message


@pytest.mark.parametrize(
    ("model", "component", "change", "named"),
    [
        (
            DENSE,
            "k",
            {"encoding": "swizzled-32"},
            ["encoding", "swizzled-32"],
        ),  # equal strides, other meaning
        (DENSE, "v", {"chunk_bytes": 2}, ["content", "2"]),  # bytes of a head
        (DENSE, "v", {"itemsize": 1}, ["itemsize"]),
        (MLA, "indexer.scale", {"granule_tokens": 2}, ["granule"]),
        ("tiny-mamba2", "conv.x", {"num_chunks": 1, "chunk_bytes": 8}, ["conv.x", "8"]),  # speculative rows
    ],
)
def test_a_component_that_differs_is_named_with_both_values(
    model: str, component: str, change: dict[str, Any], named: list[str]
) -> None:
    sink, source = engine(model), engine(model)
    spec, layout = source[Rank(0, 0)]
    tensors = tuple(
        msgspec.structs.replace(t, **change) if t.component == component else t for t in layout.tensors
    )
    remote = {Rank(0, 0): msgspec.structs.replace(layout, tensors=tensors)}
    with pytest.raises(PlanError) as raised:
        make_plan(*sink[Rank(0, 0)], spec, remote)
    assert all(word in raised.value.message for word in [component, *named]), raised.value.message


def test_overlap_is_refused_inside_a_group_and_legal_between_groups() -> None:
    hybrid = engine("tiny-mamba2", shared_pages=True)  # validated: attention and states overlay one another
    spec, layout = hybrid[Rank(0, 0)]
    groups = {t.group for t in layout.tensors}
    assert len(groups) > 1
    first, second = (t for t in layout.tensors if t.component in ("k", "v") and t.layer == 2)
    onto = msgspec.structs.replace(second, offset=first.offset)
    tensors = tuple(onto if t is second else t for t in layout.tensors)
    with pytest.raises(LayoutError, match="overlap"):
        validate_layout(spec, msgspec.structs.replace(layout, tensors=tensors))
