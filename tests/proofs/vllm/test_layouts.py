"""Layouts of the cache: those that vLLM's CPU kernels take read from each other; another one is a preference.

`CPUAttentionBackend` of vLLM 0.32 declares LBHNC alone. `CPUMLABackend` declares none, so that vLLM gives its
caches any that is asked for; but `CPUMLAImpl.do_kv_cache_update` (cpu_mla.py:209) needs blocks that follow
one another, and the engine ends at its first request in a layout whose first axis is not the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from kvxferd.integrations.vllm.options import LayoutName
from tests.support.nodes.daemon import Daemon
from tests.support.site_fixtures import NewPrompt
from tests.support.vllm_servers.engines import Engine, Served, kvxferd_connector
from tests.support.vllm_servers.site import LEASE_S, Llama, Nodes, Site, check_moved

VLLMS_CHOICE = "LBNHC"
OTHERS = [name for name in get_args(LayoutName) if name[0] == "L" and name != VLLMS_CHOICE]
CPU_LAYOUT, NOT_TAKEN = "LBHNC", "BLHNC"
LATENTS: dict[str, Any] = {"block_tokens": 16, "flags": ("--attention-backend=CPU_MLA",)}


def uses(layout: str) -> str:
    """Return the line of vLLM's log on the layout that a cache has."""
    return f"Using {layout} KV cache layout."


def start(site: Site, node: Daemon, name: str, kind: str, layout: str, **served: Any) -> Engine:
    """Start an engine that prefills and decodes; the caller waits for it."""
    connector = kvxferd_connector(node.worker_socket, "kv_both", kv_cache_layout=layout, lease_s=LEASE_S)
    return site.engine(name, Served(site.model(kind), connector, **served))


@pytest.fixture(scope="module")
def ordinary(site: Site, nodes: Nodes) -> Iterator[Engine]:
    """An engine of latents in the layout that vLLM chooses by itself."""
    nodes.heal()
    engine = start(site, nodes.prefill, "latents", "mla", "engine", **LATENTS).wait()
    assert engine.said(uses(VLLMS_CHOICE))
    yield engine
    site.end(engine)


@pytest.fixture(scope="module", params=OTHERS)
def other(request: pytest.FixtureRequest, site: Site, nodes: Nodes) -> Iterator[Engine]:
    """One in each other layout."""
    layout = request.param
    engine = start(site, nodes.decode, f"latents-{layout}", "mla", layout, **LATENTS).wait()
    assert engine.said(uses(layout))
    yield engine
    site.end(engine)


@pytest.mark.parametrize("length", [2, 33, 300, 1000])
def test_latents_of_each_layout_give_equal_tokens_both_ways(
    ordinary: Engine, other: Engine, new_prompt: NewPrompt, length: int
) -> None:
    for source, sink in ((ordinary, other), (other, ordinary)):
        check_moved(source, sink, new_prompt(length), source.tokens)


def test_a_layout_that_the_kernel_does_not_take_is_a_preference(
    site: Site, nodes: Nodes, llama: Llama, new_prompt: NewPrompt
) -> None:
    engine = start(site, nodes.prefill, "prefers", "llama", NOT_TAKEN).wait()
    assert engine.said(f"KV connector cache layout {NOT_TAKEN} does not satisfy every supported set")
    assert engine.said(uses(CPU_LAYOUT))
    for length in (33, 300):
        check_moved(engine, llama.decode, new_prompt(length), llama.right_tokens)
    site.end(engine)


def test_the_variable_is_no_preference(site: Site, nodes: Nodes) -> None:
    nodes.heal()
    environ = {"VLLM_KV_CACHE_LAYOUT": NOT_TAKEN}
    engine = start(site, nodes.prefill, "refused", "llama", "auto", environ=environ)
    with pytest.raises(AssertionError, match="refused ended"):
        engine.wait()
    assert engine.said(f"VLLM_KV_CACHE_LAYOUT={NOT_TAKEN} does not satisfy every supported set")
    site.end(engine)
