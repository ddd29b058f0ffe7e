"""Other kinds of cache: Mamba2 states, multi-head latent attention, sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from completions import complete, decode, prefill
from engines import Engine
from site_under_test import Nodes, Site, num_external_tokens, through, wait_until_settled

NewPrompt = Callable[[int], list[int]]
# What vLLM's CPU backend asks of each, found out by trying; docs/vllm.md has it in words. A prompt and a
# single token go through different kernels for latents and states, whose roundings choose other tokens.
EXACT = "--dtype=float32"
KINDS: dict[str, dict[str, Any]] = {
    "mamba": {"flags": (EXACT, "--no-enable-prefix-caching")},
    "mla": {"block_tokens": 16, "flags": (EXACT,)},
    "window": {},
}


@dataclass
class Pair:
    """A prefill and a decode engine of one model."""

    kind: str
    nodes: Nodes
    prefill: Engine
    decode: Engine

    def question(self, prompt: list[int], max_tokens: int = 12) -> tuple[list[int], tuple[int, ...]]:
        """A prompt that begins with this one, and what the prefill engine answers to it by itself.

        The decode engine computes the last token of a prompt as it computes the tokens of an answer.
        vLLM's CPU kernels for latents do that and prompts differently: alone they contradict
        themselves. So the prompt's last token is there one that the engine itself has just said.
        """
        if self.kind != "mla":
            return prompt, complete(self.prefill.url, prompt, max_tokens).tokens
        first, *others = complete(self.prefill.url, prompt[:-1] or prompt, max_tokens + 1).tokens
        return [*(prompt[:-1] or prompt), first], tuple(others)


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
    prompt, right = pair.question(new_prompt(length))
    before = num_external_tokens(pair.decode)
    assert through(pair.prefill, pair.decode, prompt).tokens == right
    assert num_external_tokens(pair.decode) - before in (length, length - 1)


def test_another_prompts_cache_gives_other_tokens(pair: Pair, new_prompt: NewPrompt) -> None:
    theirs, right_of_theirs = pair.question(new_prompt(250))
    ours = [*new_prompt(249), theirs[-1]]
    swapped = decode(pair.decode.url, ours, prefill(pair.prefill.url, theirs))
    assert swapped.tokens == right_of_theirs
    again = [*new_prompt(249), theirs[-1]]
    assert through(pair.prefill, pair.decode, again).tokens != right_of_theirs


def test_what_the_decode_engine_has_cached(pair: Pair, new_prompt: NewPrompt) -> None:
    prompt, right = pair.question(new_prompt(420))
    complete(pair.decode.url, prompt[:200])
    assert through(pair.prefill, pair.decode, prompt).tokens == right


def test_eight_at_once_and_all_blocks_back(pair: Pair, new_prompt: NewPrompt) -> None:
    prompts, right = zip(*(pair.question(new_prompt(40 + 70 * n), 20) for n in range(8)), strict=True)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda p: through(pair.prefill, pair.decode, p, 20).tokens, prompts)
    assert tuple(answers) == right
    wait_until_settled(pair.nodes, pair.prefill, pair.decode)
