"""Engines that are cut up differently: tensor and pipeline parallel sizes, block sizes, few blocks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.support.site_fixtures import NewPrompt
from tests.support.vllm_servers.completions import complete
from tests.support.vllm_servers.engines import Engine
from tests.support.vllm_servers.site import Nodes, Site, check_moved, num_external_tokens, through

LENGTHS = (2, 33, 64, 300, 1100)

# With --enforce-eager vLLM's CPU backend refuses a second stage's input.
TWO_STAGES = ("--pipeline-parallel-size=2", "--no-enforce-eager", "-cc.mode=1", "-cc.backend=eager")
FEW_BLOCKS = 20


@dataclass
class CutUp:
    """Two prefill and two decode engines of one model."""

    nodes: Nodes
    engines: dict[str, Engine]

    def right_tokens(self, prompt: list[int], max_tokens: int = 12) -> tuple[int, ...]:
        """What the engine that is not cut up says when nobody asks it to prefill."""
        return self.engines["prefill"].tokens(prompt, max_tokens)


@pytest.fixture(scope="module")
def cut_up(site: Site, nodes: Nodes) -> Iterator[CutUp]:
    nodes.heal()
    model = site.model("llama")
    few = {"block_tokens": 64, "num_blocks": FEW_BLOCKS, "flags": ("--max-model-len=1200",)}
    served = {
        "prefill": nodes.producer(model),
        "prefill-pp2": nodes.producer(model, flags=TWO_STAGES),
        "decode-tp2": nodes.consumer(model, flags=("--tensor-parallel-size=2",)),
        "decode-few-of-64": nodes.consumer(model, **few),
    }
    engines = {name: site.engine(f"cut-up-{name}", one) for name, one in served.items()}
    for engine in engines.values():
        engine.wait()
    yield CutUp(nodes, engines)
    site.end(*engines.values())


PAIRS = [
    ("prefill", "decode-tp2"),
    ("prefill-pp2", "decode-tp2"),
    ("prefill", "decode-few-of-64"),
    ("prefill-pp2", "decode-few-of-64"),
]


@pytest.fixture(params=PAIRS, ids=" to ".join)
def pair(request: pytest.FixtureRequest, cut_up: CutUp) -> tuple[Engine, Engine]:
    return cut_up.engines[request.param[0]], cut_up.engines[request.param[1]]


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_those_of_one_engine(
    cut_up: CutUp, pair: tuple[Engine, Engine], new_prompt: NewPrompt, length: int
) -> None:
    check_moved(*pair, new_prompt(length), cut_up.right_tokens)


def test_a_cached_beginning_of_other_blocks(
    cut_up: CutUp, pair: tuple[Engine, Engine], new_prompt: NewPrompt
) -> None:
    prompt = new_prompt(205)
    complete(pair[1].url, prompt[:120])
    before = num_external_tokens(pair[1])
    assert through(*pair, prompt).tokens == cut_up.right_tokens(prompt)
    assert num_external_tokens(pair[1]) - before <= 205 - 64


def test_requests_that_are_preempted(cut_up: CutUp, new_prompt: NewPrompt) -> None:
    """20 blocks of 64 do not hold six requests of 350 tokens: some lose their blocks and start again."""
    small = cut_up.engines["decode-few-of-64"]
    prompts = [new_prompt(200 + number) for number in range(6)]
    right = [cut_up.right_tokens(prompt, 150) for prompt in prompts]
    before = small.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda p: through(cut_up.engines["prefill"], small, p, 150).tokens, prompts))
    assert replies == right
    assert small.metric("vllm:num_preemptions_total") > before
