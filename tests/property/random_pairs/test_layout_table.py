"""Every kind of cache that engines keep, between unlike deployments, both ways, through real movers."""

from __future__ import annotations

from typing import Any

import pytest

from kvxferd.ids import GroupName, Rank
from kvxferd.layout import Group, GroupKind, PackedBlocks, pack_ids
from kvxferd.layout.presets.deploy import Ranks, deploy
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import block_rules, check_blocks, check_engine
from tests.property.random_pairs.checked_pulls import Movers

pytestmark = pytest.mark.process

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
    "K/V split first and blocks first": (DENSE, {"layout": "HND"}, {"layout": "HND-blocks-first"}),
    "cross-layer and packed per head": (
        DENSE,
        {"layout": "HND-cross-layer"},
        {"layout": "HND-packed", "tp": 2},
    ),
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
    "compressed caches and rings": (
        "tiny-sparse",
        {"tp": 2},
        {"tp": 1, "pp": 2, "block_tokens": 8, "layout": "NHD"},
    ),
    "compressed caches, layers in one page": (
        "tiny-sparse",
        {"layout": "BLHNC"},
        {"layout": "BHLNC", "tp": 2},
    ),
    "vLLM's layouts": (DENSE, {"layout": "LHBNC", "tp": 2}, {"layout": "BLNHC"}),
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
        check_blocks(block_rules(layout), own, NUM_TOKENS)
        request = {"mine": own, "theirs": theirs, "num_tokens": NUM_TOKENS}
        moved += movers.transfer(spec, layout, source[Rank(0, 0)][0], remote, **request)
    return moved


@pytest.mark.parametrize("row", TABLE)
def test_a_row_works_both_ways(movers: Movers, row: str) -> None:
    model, one, other = TABLE[row]
    first, second = engine(model, **one), engine(model, **other)
    assert read_all(movers, first, second) > 0
    assert read_all(movers, second, first) > 0


def test_a_prefix_hit_moves_only_the_missing_tokens(movers: Movers) -> None:
    sink, source = engine(DENSE), engine(DENSE, tp=2)
    whole = read_all(movers, sink, source)
    blocks = -(-NUM_TOKENS // 4)
    assert read_all(movers, sink, source, first_token=20) == whole * (blocks - 5) // blocks
