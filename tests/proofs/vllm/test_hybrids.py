"""Other kinds of cache: Mamba2 states, multi-head latent attention, sliding windows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.site_fixtures import NewPrompt
from tests.support.vllm_servers.completions import complete, decode, prefill
from tests.support.vllm_servers.engines import Engine
from tests.support.vllm_servers.site import Nodes, Site, check_moved, through, wait_until_settled

# What vLLM's CPU backend asks of each, found out by trying; CONTRIBUTING.md has it in words.
KINDS: dict[str, dict[str, Any]] = {
    "mamba": {"flags": ("--no-enable-prefix-caching",)},
    # On a processor with AMX vLLM takes a backend for latents that refuses weights of 32 bits.
    "mla": {"block_tokens": 16, "flags": ("--attention-backend=CPU_MLA",)},
    "window": {},
}


@dataclass
class Pair:
    """A prefill and a decode engine of one model."""

    kind: str
    nodes: Nodes
    prefill: Engine
    decode: Engine

    def right_tokens(self, prompt: list[int], max_tokens: int = 12) -> tuple[int, ...]:
        return self.prefill.tokens(prompt, max_tokens)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, site: Site, nodes: Nodes) -> Iterator[Pair]:
    kind = request.param
    nodes.heal()
    model = site.model(kind)
    engines = [
        site.engine(f"prefill-{kind}", nodes.producer(model, **KINDS[kind])),
        site.engine(f"decode-{kind}", nodes.consumer(model, **KINDS[kind])),
    ]
    for engine in engines:
        engine.wait()
    yield Pair(kind, nodes, *engines)
    site.end(*engines)


@pytest.mark.parametrize("length", [2, 31, 64, 129, 300, 1000])
def test_tokens_are_those_of_one_engine(pair: Pair, new_prompt: NewPrompt, length: int) -> None:
    check_moved(pair.prefill, pair.decode, new_prompt(length), pair.right_tokens)


def test_another_prompts_cache_gives_other_tokens(pair: Pair, new_prompt: NewPrompt) -> None:
    ours, theirs = new_prompt(250), new_prompt(250)
    prefill(pair.prefill.url, ours)
    swapped = decode(pair.decode.url, ours, prefill(pair.prefill.url, theirs))
    assert swapped.tokens != pair.right_tokens(ours)
    assert swapped.tokens == pair.right_tokens([*theirs[:-1], ours[-1]])


def test_what_the_decode_engine_has_cached(pair: Pair, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(420)
    complete(pair.decode.url, prompt[:200])
    assert through(pair.prefill, pair.decode, prompt).tokens == pair.right_tokens(prompt)


def test_eight_at_once_and_all_blocks_back(pair: Pair, new_prompt: NewPrompt) -> None:
    prompts = [new_prompt(40 + 70 * number) for number in range(8)]
    right = [pair.right_tokens(prompt, 20) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda p: through(pair.prefill, pair.decode, p, 20).tokens, prompts))
    assert replies == right
    wait_until_settled(pair.nodes, pair.prefill, pair.decode)
