"""Small models of every kind, between deployments that differ in everything, byte by byte."""

from __future__ import annotations

import pytest

from kvxferd.ids import GroupName, Rank
from kvxferd.layout import EngineSpec, Group, GroupKind, PackedBlocks, RankLayout, pack_ids
from kvxferd.layout.presets import MODELS, LayerKind, ModelFacts, TokenComponent, deploy
from kvxferd.layout.presets.model_facts import gdn_states, key_and_value, mamba1_states, mamba2_states
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import Expander, check_blocks, check_engine, check_request, make_plan, plan_reads
from tests.support import brute_force

Engine = dict[Rank, tuple[EngineSpec, RankLayout]]
FULL, SLIDING, STATE, NONE = LayerKind.FULL, LayerKind.SLIDING, LayerKind.STATE, LayerKind.NONE

NUM_BLOCKS, NUM_TOKENS = 12, 21

TINY = {
    "plain": ModelFacts("plain", 4, (FULL,) * 3, key_and_value(4, 2)),
    "quantised": ModelFacts("quantised", 4, (FULL,) * 2, key_and_value(4, 4, "int8", 1, scale_bytes=4)),
    "mla": ModelFacts(
        "mla",
        0,
        (FULL,) * 3,
        (
            (TokenComponent("latent", 1, 6, is_replicated=True),),
            (TokenComponent("indexer.k", 1, 3, "float8_e4m3fn", 1, is_replicated=True),),
            (TokenComponent("indexer.scale", 1, 4, "float32", 4, is_replicated=True, granule_tokens=2),),
        ),
    ),
    "sliding": ModelFacts("sliding", 2, (SLIDING, SLIDING, FULL) * 2, key_and_value(2, 2), sliding_window=6),
    "mamba2": ModelFacts(
        "mamba2",
        2,
        (STATE, NONE, FULL, STATE, STATE, NONE, FULL),
        key_and_value(2, 2),
        mamba2_states(num_heads=6, head_dim=2, num_groups=2, state_size=2),
    ),
    "mamba2 without groups": ModelFacts(
        "mamba2 without groups", 0, (STATE,) * 2, states=mamba2_states(4, 2, 0, 2)
    ),
    "mamba1": ModelFacts("mamba1", 0, (STATE,) * 3, states=mamba1_states(6, 2)),
    "gdn": ModelFacts("gdn", 2, (STATE, FULL, STATE), key_and_value(2, 2), gdn_states(2, 2, 4, 1)),
}

# (tp, pp, kernel block tokens, layout) of the reader, then of the source
PAIRS = [
    ((2, 1, 4, "HND"), (2, 1, 4, "HND")),  # the same
    ((1, 1, 4, "HND"), (4, 2, 2, "NHD")),  # wider peer, stages, smaller blocks
    ((4, 2, 4, "NHD"), (1, 1, 8, "HND")),
    ((3, 1, 6, "HND-packed"), (2, 3, 4, "NHD+SD")),  # nothing divides anything
    ((2, 2, 4, "HND+SD"), (6, 1, 4, "NHD-packed+SD")),  # ranks beyond heads and groups, rows to rows
    ((6, 1, 2, "NHD-blocks-first"), (4, 1, 8, "HND-blocks-first+SD")),
]


def tiny_engine(model: ModelFacts, chosen: tuple[int, int, int, str]) -> Engine:
    """Return every rank, valid and complete."""
    tp, pp, block_tokens, layout = chosen
    ranks = deploy(model, tp=tp, pp=pp, block_tokens=block_tokens, num_blocks=NUM_BLOCKS, layout=layout)
    for spec, made in ranks.values():
        validate_layout(spec, made)
    check_engine(ranks)
    return ranks


def lists_for(engine: Engine, seed: int) -> dict[GroupName, PackedBlocks]:
    """Return a request's lists: ids apart in every group, as groups of a hybrid share their pages."""
    groups: dict[GroupName, Group] = {g.name: g for _, layout in engine.values() for g in layout.groups}
    free = [(7 * i + seed) % NUM_BLOCKS for i in range(NUM_BLOCKS)]
    found = {}
    for name, group in sorted(groups.items(), key=lambda entry: entry[1].kind, reverse=True):
        if group.kind is GroupKind.STATE:
            found[name] = PackedBlocks(pack_ids([free.pop()]), state_at=NUM_TOKENS)
            continue
        ids = [free.pop() for _ in range(-(-NUM_TOKENS // group.block_tokens))]
        if len(groups) > 1 and STATE not in groups:
            free = [*reversed(ids), *free]
        found[name] = PackedBlocks(pack_ids(ids))
    return found


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "from".join(map(str, pair)))
@pytest.mark.parametrize("name", TINY)
def test_every_rank_of_every_model(name: str, pair: tuple[tuple[int, int, int, str], ...]) -> None:
    """All ranks of the reader, every byte."""
    sink, source = (tiny_engine(TINY[name], chosen) for chosen in pair)
    mine, theirs = lists_for(sink, 1), lists_for(source, 5)
    remote = {rank: held[1] for rank, held in source.items()}
    for spec, layout in sink.values():
        plan = make_plan(spec, layout, source[Rank(0, 0)][0], remote)
        own = {group.name: mine[group.name] for group in layout.groups}
        check_blocks(layout, own, NUM_TOKENS)
        check_request(plan, own, theirs, NUM_TOKENS)
        at = {rank: brute_force.bases(remote[rank], i + 1) for i, rank in enumerate(sorted(remote))}
        runs = Expander(plan).expand(own, theirs, NUM_TOKENS, brute_force.bases(layout, 0), at)
        brute_force.check_pull(
            local=(layout, own),
            remote=remote,
            remote_lists=theirs,
            required=dict.fromkeys(own, 0),
            num_tokens=NUM_TOKENS,
            runs=runs,
        )


@pytest.mark.parametrize("name", MODELS)
def test_presets_are_valid_engines(name: str) -> None:
    """Each model in two deployments; each rank can be planned for."""
    sink = deploy(MODELS[name], tp=4, pp=2, layout="NHD", block_tokens=32, num_blocks=64)
    source = deploy(MODELS[name], tp=8, pp=1, num_blocks=64)
    for ranks in (sink, source):
        for spec, layout in ranks.values():
            validate_layout(spec, layout)
        check_engine(ranks)
    remote = {rank: held[1] for rank, held in source.items()}
    for spec, layout in sink.values():
        plan = make_plan(spec, layout, source[Rank(0, 0)][0], remote)
        assert all(layout.start_layer <= read.start_layer for read in plan_reads(plan))
