"""The advice of explain is true: the pair that it advises has as many fewer runs when it is planned."""

from __future__ import annotations

import re

import pytest

from kvxferd.explain import advice as advice_module
from kvxferd.explain.advice import advise
from kvxferd.layout.presets import LAYOUT_NAMES, MODELS
from tests.support.explained_pairs import explained


@pytest.mark.parametrize(
    ("prefill", "decode", "begin"),
    [
        ("llama-3-8b", "llama-3-8b,layout=NHD", "with HND at decode: 128 times fewer reads"),
        ("llama-3-8b,block_tokens=12", "llama-3-8b", "with blocks of 16 tokens at prefill: 16 times fewer"),
        ("llama-3-8b,layout=NHD", "llama-3-8b,tp=4,layout=NHD", "with HND at both: 16 times fewer reads"),
        ("llama-3-8b,layout=vectorised", "llama-3-8b", "with HND at prefill"),
        (
            "gpt-oss-20b,layout=NHD-blocks-first",
            "gpt-oss-20b,layout=HND-blocks-first",
            "with NHD-blocks-first at",
        ),
        # GOLDEN: 10,000 runs of equal engines, 62 blocks of 1,000 tokens
        (
            "llama-3-70b,layout=NHD",
            "llama-3-70b,layout=NHD",
            "with BLHNC at both: 161 times fewer reads (10,000 runs become 62)",
        ),
        # four decode ranks of 320,000 runs each, and of 20,000
        (
            "llama-3-70b,tp=8,layout=NHD",
            "llama-3-70b,tp=4,layout=NHD",
            "with HND at decode: 16 times fewer reads (1,280,000 runs become 80,000)",  # prefill: one head
        ),
        ("llama-3-8b", "llama-3-8b", "with BLHNC at both: 65 times fewer reads (4,000 runs become 62)"),
        ("llama-3-8b,layout=HND-cross-layer", "llama-3-8b", "with HND-cross-layer at decode: "),
        ("deepseek-v3,tp=8", "deepseek-v3,tp=4", "with BLHNC at both: "),
        ("glm-5-next,tp=8,layout=HND", "glm-5-next,tp=4", "with BLHNC at prefill: "),
    ],
)
def test_a_layout_or_a_block_size_is_advised_with_what_it_gains(
    prefill: str, decode: str, begin: str
) -> None:
    advice = advise(explained(prefill, decode))
    assert advice.startswith(begin)
    assert re.search("kv_cache_layout, a preference, or from VLLM_KV_CACHE_LAYOUT", advice) or (
        "with blocks of" in begin and "LAYOUT" not in advice
    )


def test_the_advised_pair_has_as_many_runs_as_promised() -> None:
    before = explained("llama-3-70b,tp=8,layout=NHD", "llama-3-70b,tp=4,layout=NHD")
    for prefill, decode in (("NHD", "HND"), ("BHLNC", "BHLNC")):
        after = explained(f"llama-3-70b,tp=8,layout={prefill}", f"llama-3-70b,tp=4,layout={decode}")
        assert f"({before.num_runs:,} runs become {after.num_runs:,})" in advise(before)
        assert after.predicted_s <= before.predicted_s
        assert after.num_bytes == before.num_bytes


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("llama-3-8b,layout=BLHNC", "llama-3-8b,layout=BLHNC"),
        ("llama-3-8b,tp=4,layout=HND-cross-layer", "llama-3-8b,tp=4,layout=HND-cross-layer"),
        ("nemotron-h-8b", "nemotron-h-8b,tp=4"),  # its states share pages with single layers
        ("deepseek-v3,tp=8,layout=BLHNC", "deepseek-v3,tp=4,layout=BLHNC"),
        ("deepseek-v4,tp=8", "deepseek-v4,tp=4"),
        ("glm-5-next,tp=8", "glm-5-next,tp=4"),
    ],
)
def test_where_nothing_gains_nothing_is_advised(prefill: str, decode: str) -> None:
    assert advise(explained(prefill, decode)).startswith("nothing to change: ")


@pytest.mark.parametrize("model", [model.name for model in MODELS.values() if model.layouts])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_only_layouts_that_the_kernels_take_are_advised(model: str, layout: str) -> None:
    advice = advise(explained(f"{model},layout={layout}", f"{model},tp=2"))
    advised = set(re.findall("|".join(sorted(LAYOUT_NAMES, key=len, reverse=True)), advice))
    assert advised
    assert advised <= set(MODELS[model].layouts)


def test_large_engines_are_not_planned_over_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found = explained("llama-3-8b", "llama-3-8b,layout=NHD")
    monkeypatch.setattr(advice_module, "MAX_DECODE_RANKS", 0)
    assert advise(found) == "none: other layouts are tried for at most 0 decode ranks"
