"""Deployments of small models in every way that a deployment may choose, byte by byte."""

from __future__ import annotations

import pytest

from kvxferd.ids import GroupName, Rank
from kvxferd.layout import EngineSpec, Group, GroupKind, PackedBlocks, RankLayout, pack_ids
from kvxferd.layout.presets import MODELS, DeploymentOptions, deploy
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import Expander, check_blocks, check_engine, check_request, make_plan
from tests.support import brute_force

Engine = dict[Rank, tuple[EngineSpec, RankLayout]]

NUM_BLOCKS, NUM_TOKENS = 14, 21
DRAFT = MODELS["tiny-quantised"]


def engine(name: str, choices: DeploymentOptions) -> Engine:
    """Return every rank, valid and complete."""
    ranks = deploy(MODELS[name], choices)
    for spec, layout in ranks.values():
        validate_layout(spec, layout)
    check_engine(ranks)
    return ranks


def lists_for(ranks: Engine, seed: int) -> dict[GroupName, PackedBlocks]:
    """Return a request's lists, scattered; groups share pages, so each id is listed once."""
    groups: dict[GroupName, Group] = {g.name: g for _, layout in ranks.values() for g in layout.groups}
    found = {}
    every = [(5 * i + seed) % NUM_BLOCKS for i in range(NUM_BLOCKS)]
    free = list(every)
    in_shared_pages = {n for n in groups if n == "full" or groups[n].kind is GroupKind.STATE}
    for name, group in sorted(groups.items()):
        pool = free if name in in_shared_pages else list(every)
        if group.kind is GroupKind.STATE:
            found[name] = PackedBlocks(pack_ids([pool.pop()]), state_at=NUM_TOKENS)
            continue
        span = group.block_tokens * group.token_shard.count
        found[name] = PackedBlocks(pack_ids([pool.pop() for _ in range(-(-NUM_TOKENS // span))]))
    return found


def check_every_byte(sink: Engine, source: Engine) -> None:
    """Pull into every rank of `sink`; every byte against brute force."""
    mine, theirs = lists_for(sink, 1), lists_for(source, 4)
    remote = {rank: held[1] for rank, held in source.items()}
    at = {rank: brute_force.bases(remote[rank], i + 1) for i, rank in enumerate(sorted(remote))}
    for spec, layout in sink.values():
        plan = make_plan(spec, layout, source[Rank(0, 0)][0], remote)
        own = {group.name: mine[group.name] for group in layout.groups}
        check_blocks(layout, own, NUM_TOKENS)
        check_request(plan, own, theirs, NUM_TOKENS)
        brute_force.check_pull(
            local=(layout, own),
            remote=remote,
            remote_lists=theirs,
            required=dict.fromkeys(own, 0),
            num_tokens=NUM_TOKENS,
            runs=Expander(plan).expand(own, theirs, NUM_TOKENS, brute_force.bases(layout, 0), at),
        )


def choices(**chosen: object) -> DeploymentOptions:
    """Return small blocks unless told otherwise."""
    return DeploymentOptions(**({"block_tokens": 4, "num_blocks": NUM_BLOCKS} | chosen))  # type: ignore[arg-type]


PAIRS = [
    (choices(tp=2, cp=2), choices(tp=3, block_tokens=6)),  # token shards at one side
    (choices(tp=2, cp=3, interleave=2), choices(tp=1, cp=2, interleave=4, layout="NHD")),  # at both
    (choices(tp=2, page_bytes=512), choices(tp=4, layout="NHD", page_bytes=300)),  # padded pages
    (choices(tp=2, shared_pages=False), choices(tp=3, block_tokens=8, layout="NHD+SD")),  # pages of their own
    (choices(tp=4, shared_pages=False, layout="NHD-cross-layer"), choices(shared_pages=False)),
    (choices(draft=DRAFT), choices(tp=2, pp=2, draft=DRAFT, layout="packed")),  # a draft on the last stage
    (choices(tp=2), choices(tp=2)),  # the same
    (choices(), choices(tp=4, pp=2, block_tokens=2, layout="NHD")),  # wider peer, stages, smaller blocks
    # Nothing divides anything; ranks beyond heads and groups, rows to rows.
    (choices(tp=3, block_tokens=6, layout="packed"), choices(tp=2, pp=3, layout="NHD+SD")),
    (choices(tp=2, pp=2, layout="HND+SD"), choices(tp=6, layout="NHD-packed+SD")),
]


@pytest.mark.parametrize("pair", PAIRS, ids=range(len(PAIRS)))
@pytest.mark.parametrize(
    "name",
    [
        "tiny-dense",
        "tiny-quantised",
        "tiny-mla",
        "tiny-sliding",
        "tiny-mamba2",
        "tiny-mamba1",
        "tiny-gdn",
    ],
)
def test_every_choice_between_unlike_deployments(
    name: str, pair: tuple[DeploymentOptions, DeploymentOptions]
) -> None:
    """All ranks of the reader."""
    sink, source = (engine(name, chosen) for chosen in pair)
    check_every_byte(sink, source)


@pytest.mark.parametrize("other", ["HND", "NHD", "kv-first", "blocks-first", "cross-layer", "packed"])
def test_vectorised_keys_both_ways(other: str) -> None:
    """Chunks of 16 bytes against whole heads of 16."""
    vectorised = engine("tiny-dense", choices(tp=2, layout="vectorised"))
    plain = engine("tiny-dense", choices(tp=3, layout=other, block_tokens=8))
    check_every_byte(vectorised, plain)
    check_every_byte(plain, vectorised)


def test_uneven_stages() -> None:
    """Layers 0 to 2 and 3 against a stage for each but one that has none."""
    sink = engine("tiny-dense", choices(pp=2, stages=(3, 1)))
    source = engine("tiny-dense", choices(tp=2, pp=3, stages=(1, 0, 3), layout="NHD"))
    assert [layout.end_layer for _, layout in sink.values()] == [3, 4]
    check_every_byte(sink, source)


def test_groups_with_block_counts_of_their_own() -> None:
    """By name; a group without a number is refused, and pages that are shared have one count."""
    made = engine("tiny-sliding", choices(num_blocks={"full": 9, "sliding": 3}))
    assert {g.name: g.num_blocks for g in made[Rank(0, 0)][1].groups} == {"full": 9, "sliding": 3}
    with pytest.raises(ValueError, match="lacks group 'sliding'"):
        engine("tiny-sliding", choices(num_blocks={"full": 9}))
    apart = {"full": 9, "state.0": 2}
    assert engine("tiny-gdn", choices(num_blocks=apart, shared_pages=False))
    with pytest.raises(ValueError, match="share their pages"):
        engine("tiny-gdn", choices(num_blocks={"full": 9, "state.0": 2, "state.1": 2}))


def test_a_draft_models_layers_come_last_with_heads_of_their_own() -> None:
    """Four layers of the target, then two of the draft, on the last stage alone."""
    ranks = engine("tiny-dense", choices(tp=2, pp=2, draft=DRAFT))
    first, last = ranks[Rank(0, 0)][1], ranks[Rank(1, 0)][1]
    assert (first.start_layer, first.end_layer, last.start_layer, last.end_layer) == (0, 2, 2, 6)
    assert sorted({t.layer for t in last.tensors if t.group == "draft.full"}) == [4, 5]
    assert [g.name for g in first.groups] == ["full", "draft.full"]
    assert {t.dtype for t in last.tensors if t.layer >= 4} == {"int8"}


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"layout": "DNH"}, "'DNH'"),
        ({"layout": "HND+XS"}, "behind the +"),
        ({"tp": 0}, "tp 0"),
        ({"num_blocks": 0}, "num_blocks 0"),
        ({"pp": 2, "stages": (1, 2, 1)}, "3 stages: pp is 2"),
        ({"pp": 2, "stages": (1, 2)}, "the model has 4"),
        ({"cp": 2, "interleave": 3}, "interleave 3"),
    ],
)
def test_what_no_engine_could_be(chosen: dict[str, object], words: str) -> None:
    """Refused with the value."""
    with pytest.raises(ValueError, match=words.replace("+", r"\+")):
        engine("tiny-dense", choices(**chosen))


@pytest.mark.parametrize("layout", ["cross-layer", "BLHNC", "BHLNC", "LHBNC", "vectorised"])
def test_arrangements_that_shared_pages_cannot_have(layout: str) -> None:
    """K and V of one layer share a page with its states."""
    with pytest.raises(ValueError, match="shared pages"):
        engine("tiny-gdn", choices(layout=layout))
