"""The connector as one of several, inside vLLM's MultiConnector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT
from tests.support.site_fixtures import NewPrompt
from tests.support.vllm_servers.engines import Engine, Served
from tests.support.vllm_servers.site import Nodes, Site, check_moved, wait_until_settled


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
    wait_until_settled(nodes, prefill_engine, decode_engine)
    site.end(prefill_engine, decode_engine)


@pytest.mark.parametrize("length", [33, 500])
def test_tokens_are_those_of_one_engine(
    pair: tuple[Engine, Engine], new_prompt: NewPrompt, length: int
) -> None:
    check_moved(*pair, new_prompt(length), pair[0].tokens)


PIPELINE = ("--pipeline-parallel-size=2", "--no-enforce-eager", "-cc.mode=1", "-cc.backend=eager")
HANDSHAKING: dict[str, Any] = {
    "kv_connector": "HandshakingConnector",
    "kv_connector_module_path": "tests.support.vllm_servers.handshaking_connector",
    "kv_role": "kv_both",
}


def beside_a_handshake(served: Served, *, first: bool) -> Served:
    """The same engine in two pipeline stages, with another child that exchanges a handshake."""
    assert served.connector is not None
    children = [dict(served.connector), HANDSHAKING]
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children if first else children[::-1]},
    }
    flags, environ = PIPELINE, {"PYTHONPATH": str(ROOT)}
    return replace(served, connector=multi, flags=flags, environ=environ)


@pytest.fixture(scope="module")
def reader(site: Site, nodes: Nodes) -> Iterator[Engine]:
    """A decode engine of one stage, which starts beside the test's prefill engine."""
    nodes.heal()
    engine = site.engine("decode-beside", nodes.consumer(site.model("llama")))
    yield engine
    site.end(engine)


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_the_first_request_of_two_stages_is_published_beside_another_handshake(
    site: Site, nodes: Nodes, reader: Engine, new_prompt: NewPrompt, first: bool
) -> None:
    served = beside_a_handshake(nodes.producer(site.model("llama")), first=first)
    staged = site.engine(f"prefill-beside-{'first' if first else 'last'}", served)
    staged.wait(warm_up=False)
    reader.wait()
    assert staged.said("handshake of ranks ((0, 0), (1, 0))")
    for length in (60, 300):  # the first is this engine's first step
        check_moved(staged, reader, new_prompt(length), staged.tokens)
    assert not staged.said("is not published")
    wait_until_settled(nodes, staged, reader)
    site.end(staged)
