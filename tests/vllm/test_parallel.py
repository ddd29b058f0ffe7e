"""Engines that are cut up differently: tensor and pipeline parallel sizes, block sizes, few blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from completions import complete, decode, prefill
from engines import Engine
from site_under_test import Llama, Site, num_external_tokens, through

NewPrompt = Callable[[int], list[int]]
LENGTHS = (2, 33, 64, 300, 1100)


@pytest.fixture(scope="module")
def cut_up(site: Site, shared_llama: Llama) -> Iterator[dict[str, Engine]]:
    """One more prefill engine, two more decode engines."""
    nodes, model = shared_llama.nodes, site.model("llama")
    shared_llama.heal()
    engines = {
        "prefill-pp2": nodes.producer(model, flags=("--pipeline-parallel-size=2",)),
        "decode-tp2": nodes.consumer(model, flags=("--tensor-parallel-size=2",)),
        "decode-blocks-of-16": nodes.consumer(
            model, block_tokens=16, num_blocks=80, flags=("--max-model-len=1200",)
        ),
    }
    started = {name: site.engine(name, served) for name, served in engines.items()}
    for engine in started.values():
        engine.wait()
    yield started
    site.end(*started.values())


PAIRS = [
    ("prefill", "decode-tp2"),
    ("prefill-pp2", "decode"),
    ("prefill-pp2", "decode-tp2"),
    ("prefill", "decode-blocks-of-16"),
    ("prefill-pp2", "decode-blocks-of-16"),
]


@pytest.fixture(params=PAIRS, ids=" to ".join)
def pair(request: pytest.FixtureRequest, llama: Llama, cut_up: dict[str, Engine]) -> tuple[Engine, Engine]:
    engines: dict[str, Any] = {"prefill": llama.prefill, "decode": llama.decode, **cut_up}
    return engines[request.param[0]], engines[request.param[1]]


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_those_of_one_engine(
    llama: Llama, pair: tuple[Engine, Engine], new_prompt: NewPrompt, length: int
) -> None:
    prompt = new_prompt(length)
    before = num_external_tokens(pair[1])
    assert through(*pair, prompt).tokens == llama.right_tokens(prompt)
    assert num_external_tokens(pair[1]) - before in (length, length - 1)


def test_another_prompts_cache_gives_other_tokens(
    llama: Llama, pair: tuple[Engine, Engine], new_prompt: NewPrompt
) -> None:
    ours, theirs = new_prompt(170), new_prompt(170)
    prefill(pair[0].url, ours)
    swapped = decode(pair[1].url, ours, prefill(pair[0].url, theirs))
    assert swapped.tokens == llama.right_tokens([*theirs[:-1], ours[-1]]) != llama.right_tokens(ours)


def test_a_cached_beginning_of_other_blocks(
    llama: Llama, pair: tuple[Engine, Engine], new_prompt: NewPrompt
) -> None:
    prompt = new_prompt(205)
    complete(pair[1].url, prompt[:120])
    before = num_external_tokens(pair[1])
    assert through(*pair, prompt).tokens == llama.right_tokens(prompt)
    assert num_external_tokens(pair[1]) - before <= 205 - 96


def test_requests_that_are_preempted(llama: Llama, cut_up: dict[str, Engine], new_prompt: NewPrompt) -> None:
    """80 blocks of 16 do not hold six requests of 350 tokens: some lose their blocks and start again."""
    small = cut_up["decode-blocks-of-16"]
    prompts = [new_prompt(200 + number) for number in range(6)]
    right = [llama.right_tokens(prompt, 150) for prompt in prompts]
    before = small.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: through(llama.prefill, small, p, 150).tokens, prompts))
    assert answers == right
    assert small.metric("vllm:num_preemptions_total") > before
