"""The connector as one of several, inside vLLM's MultiConnector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_servers.completions import complete, decode, prefill
from tests.support.vllm_servers.engines import Engine, Served
from tests.support.vllm_servers.site import Nodes, Site, num_external_tokens, through, wait_until_settled

NewPrompt = Callable[[int], list[int]]


def beside_another(served: Served, stored: Path) -> Served:
    """The same engine with a second connector, one that stores prompts in files."""
    assert served.connector is not None
    other: dict[str, Any] = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(stored)},
    }
    policy = {k: v for k, v in served.connector.items() if k == "kv_load_failure_policy"}
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [dict(served.connector), other]},
        **policy,
    }
    return replace(served, connector=multi)


@pytest.fixture(scope="module")
def pair(
    site: Site, nodes: Nodes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    nodes.heal()
    model = site.model("llama")
    stored = [tmp_path_factory.mktemp("stored") for _ in range(2)]
    prefill_engine = site.engine("prefill-multi", beside_another(nodes.producer(model), stored[0]))
    decode_engine = site.engine("decode-multi", beside_another(nodes.consumer(model), stored[1]))
    yield prefill_engine.wait(), decode_engine.wait()
    site.end(prefill_engine, decode_engine)


@pytest.mark.parametrize("length", [33, 500])
def test_tokens_are_those_of_one_engine(
    pair: tuple[Engine, Engine], new_prompt: NewPrompt, length: int
) -> None:
    prompt = new_prompt(length)
    before = num_external_tokens(pair[1])
    moved = through(*pair, prompt).tokens
    assert num_external_tokens(pair[1]) - before in (length, length - 1)
    assert moved == complete(pair[0].url, prompt).tokens


def test_another_prompts_cache_gives_other_tokens(
    pair: tuple[Engine, Engine], nodes: Nodes, new_prompt: NewPrompt
) -> None:
    ours, theirs = new_prompt(170), new_prompt(170)
    prefill(pair[0].url, ours)
    swapped = decode(pair[1].url, ours, prefill(pair[0].url, theirs))
    assert swapped.tokens == complete(pair[0].url, [*theirs[:-1], ours[-1]]).tokens
    wait_until_settled(nodes, *pair)  # the other transfer's lease ends too
