"""Granules, rings, and several caches in one page: what vLLM 0.33's kernels wrote, another engine reads."""

from __future__ import annotations

import dataclasses

import pytest

from kvxferd.errors import Code, PlanError
from kvxferd.integrations.vllm.layout.opaque import opaque_report
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import make_plan
from tests.support.vllm_families import (
    DEEPSEEK_V4,
    DEEPSEEK_V41,
    FAMILIES,
    GLM,
    MINIMAX,
    QWEN,
    STEP,
    TOKEN_SCALES,
    UNKNOWN,
    random_pair,
)
from tests.support.vllm_pages import Family, How, PagedEngine, pull

LENGTHS = (1, 7, 128, 259)
WIDE = 128  # blocks, where windows of few tokens a block take many


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("padding", [0, 64])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_an_engine_reads_one_like_itself(family: Family, padding: int, num_tokens: int) -> None:
    how = How(tp=2, num_blocks=WIDE, padding=padding)
    sink, source = PagedEngine(family, how), PagedEngine(family, dataclasses.replace(how, padding=0))
    for rank, held in sink.ranks.items():
        validate_layout(sink.spec(rank), held.derived.layout)
    assert pull(sink, source, num_tokens) == []


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize(
    ("family", "sink", "source"),
    [
        (DEEPSEEK_V4, How(tp=4, block_tokens=512), How(tp=2)),
        (DEEPSEEK_V4, How(block_tokens=128, layout="LBHNC"), How(tp=2, block_tokens=384, padding=64)),
        (DEEPSEEK_V4, How(block_tokens=768, kernel_blocks=3, layout="LBHNC"), How(block_tokens=512)),
        (DEEPSEEK_V41, How(tp=2, block_tokens=256), How(tp=4, block_tokens=128)),
        (DEEPSEEK_V41, How(block_tokens=192, kernel_blocks=2, layout="LBHNC"), How(block_tokens=128)),
        (GLM, How(tp=8, block_tokens=256), How(tp=2)),
        (GLM, How(block_tokens=256, kernel_blocks=4, layout="LBHNC"), How(tp=2, padding=64)),
        (STEP, How(tp=4, block_tokens=128), How(tp=2)),
        (STEP, How(tp=1, layout="BLNHC"), How(tp=2, block_tokens=32)),
        (STEP, How(tp=8, layout="BLNHC"), How(tp=2, layout="LBHNC", kernel_blocks=2)),
        (QWEN, How(tp=2), How(tp=1, block_tokens=128, layout="BLNHC")),
        (MINIMAX, How(tp=1), How(tp=4, layout="BLNHC")),
        (TOKEN_SCALES, How(tp=2, layout="BLNHC"), How(tp=1, block_tokens=16)),
        (TOKEN_SCALES, How(tp=1, block_tokens=96, kernel_blocks=6, layout="LBHNC"), How(tp=4)),
    ],
    ids=lambda given: given.name if isinstance(given, Family) else str(given),
)
def test_sizes_and_places_may_differ(family: Family, sink: How, source: How, num_tokens: int) -> None:
    """Any tensor parallelism, block size, kernel block and order of axes, each with pages of its own."""
    wide = [dataclasses.replace(how, num_blocks=WIDE) for how in (sink, source)]
    assert pull(PagedEngine(family, wide[0]), PagedEngine(family, wide[1]), num_tokens) == []


@pytest.mark.slow
def test_random_caches_in_random_places(pytestconfig: pytest.Config) -> None:
    num_pairs = pytestconfig.getoption("--random-pairs")
    assert num_pairs > 0
    for seed in range(num_pairs):
        family, sink, source, num_tokens = random_pair(seed)
        wrong = pull(PagedEngine(family, sink), PagedEngine(family, source), num_tokens)
        assert wrong == [], f"seed {seed}: {sink} from {source}, {num_tokens} tokens of {family}"


def test_one_line_tells_what_is_opaque_and_what_that_forbids() -> None:
    (rank,) = PagedEngine(UNKNOWN, How()).ranks.values()
    assert opaque_report(rank.derived.opaque_layers, "0.33.0", "NVIDIA H100 9.0") == (
        "caches of 4 layers of UnheardOfBackend move as opaque pages: only to an engine with the same "
        "tensor_parallel_size, block size, order of axes, dtype, device (NVIDIA H100 9.0) and vLLM version "
        "(0.33.0; see docs/reference/vllm-support.md)"
    )


def with_facts(family: Family, name: str, **more: object) -> Family:
    """Return the family with other facts of the cache whose name ends so."""
    changed = [
        dataclasses.replace(cache, facts=dataclasses.replace(cache.facts, **more))  # type: ignore[arg-type]
        if cache.name.endswith(name)
        else cache
        for cache in family.caches
    ]
    assert changed != list(family.caches)
    return dataclasses.replace(family, caches=tuple(changed))


WIDER_RING = dataclasses.replace(
    GLM, groups=(GLM.groups[0], dataclasses.replace(GLM.groups[1], block_tokens=16))
)
PLAIN_V4 = dataclasses.replace(
    with_facts(DEEPSEEK_V4, "layers.0.attn", head_size=512, dtype="bfloat16", itemsize=2, encoding=""),
)


@pytest.mark.parametrize(
    ("sink", "source", "why"),
    [
        ((GLM, How()), (WIDER_RING, How()), "encoding of layer 0's component 'ring' is 'ring of 8' here and"),
        ((GLM, How()), (GLM, How(has_mx_scales=True)), "dtype of layer 0's component 'indexer.scale' is"),
        (
            (DEEPSEEK_V4, How(num_blocks=WIDE)),
            (PLAIN_V4, How(num_blocks=WIDE)),
            "content_bytes of layer 0's component 'latent' is 576 here and 1024 at the source",
        ),
        (
            (with_facts(STEP, "summary", tokens_per_state=4), How()),
            (STEP, How()),
            "granule_tokens of layer 0's component 'summary' is 4 here and 8 at the source",
        ),
        (
            (UNKNOWN, How(tp=2)),
            (UNKNOWN, How(tp=4)),
            "HNC of 2 x 32 x 64 bytes, blocks of 32 tokens, cache dtype auto, tp 2, ",
        ),
        ((UNKNOWN, How()), (UNKNOWN, How(version="0.34.0")), "vllm 0.33.0' here and "),
        (
            (UNKNOWN, How()),
            (UNKNOWN, How(device="NVIDIA A100 8.0")),
            "NVIDIA H100 9.0, vllm 0.33.0' here and ",
        ),
        ((UNKNOWN, How()), (UNKNOWN, How(block_tokens=64)), "granule_tokens of layer 0's component 'page'"),
        ((UNKNOWN, How()), (UNKNOWN, How(layout="BLNHC")), "HNC of 4 x 32 x 64 bytes"),
        (
            (UNKNOWN, How()),
            (with_facts(UNKNOWN, "layers.0.attn", dtype="float16"), How()),
            "dtype of layer 0's component 'page' is 'bfloat16' here and 'float16' at the source",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_does_not_fit_is_refused_by_its_field(
    sink: tuple[Family, How], source: tuple[Family, How], why: str
) -> None:
    mine, theirs = PagedEngine(*sink), PagedEngine(*source)
    (held, *_) = mine.ranks.values()
    layouts = {rank: other.derived.layout for rank, other in theirs.ranks.items()}
    with pytest.raises(PlanError) as caught:
        make_plan(mine.spec(), held.derived.layout, theirs.spec(), layouts)
    assert caught.value.code is Code.LAYOUT_INCOMPATIBLE
    assert why in caught.value.message


def test_a_window_that_no_cache_has_is_pulled_whole() -> None:
    """vLLM rebuilds such a window after a hit, unless a load brings all of it."""
    engine = PagedEngine(DEEPSEEK_V41, How(num_blocks=WIDE))
    lists = engine.block_lists(300, 7)
    clipped = engine.select(lists, 300, num_cached=256)
    assert clipped["0.full"].first_token == 256
    assert clipped["2.sliding"].first_token == 160  # of 173, in blocks of 32
    usual = dataclasses.replace(DEEPSEEK_V41.groups[2], is_never_cached=False)
    family = dataclasses.replace(DEEPSEEK_V41, groups=(*DEEPSEEK_V41.groups[:2], usual))
    assert PagedEngine(family, How(num_blocks=WIDE)).select(lists, 300, 256)["2.sliding"].first_token == 256
