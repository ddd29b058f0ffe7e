"""The engines are dear: a session starts what several tests need once. A failed test shows their logs."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "end_to_end"))

from completions import complete, prompt_of
from engines import Engine, Served
from router_process import RouterProcess
from site_under_test import Nodes, Site, wait_until_settled

PYTHON_VARIABLE = "KVXFERD_VLLM_PYTHON"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    python = os.environ.get(PYTHON_VARIABLE)
    why = f"needs vLLM in an environment of its own: make test-vllm, or its python in {PYTHON_VARIABLE}"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(600))  # the first test of a fixture waits for its engines
            if not python:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed and (site := item.session.stash.get(SITE, None)) is not None:
        for engine in site.engines:
            report.sections.append((f"log of {engine.name}", engine.tail()))
    return report


SITE = pytest.StashKey[Site]()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Site]:
    python = str(Path(os.environ[PYTHON_VARIABLE]).absolute())
    site = Site(tmp_path_factory.mktemp("vllm"), python)
    request.session.stash[SITE] = site
    try:
        yield site
    finally:
        site.stop()


@pytest.fixture(scope="session")
def nodes(site: Site) -> Nodes:
    return Nodes(site.daemon("node-p"), site.daemon("node-d"))


class Llama:
    """The engines that most tests share: one alone, one that prefills, two that decode.

    `decode` computes again what it cannot load, `strict` fails the request.
    """

    def __init__(self, site: Site, nodes: Nodes) -> None:
        model = site.model("llama")
        self.nodes = nodes
        self.alone = site.engine("alone", Served(model))
        self.prefill = site.engine("prefill", nodes.producer(model))
        self.decode = site.engine("decode", nodes.consumer(model, "recompute"))
        self.strict = site.engine("strict", nodes.consumer(model, "fail"))
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    @property
    def all(self) -> tuple[Engine, ...]:
        return (self.alone, self.prefill, self.decode, self.strict)

    def right_tokens(self, prompt: Sequence[int], max_tokens: int = 12) -> tuple[int, ...]:
        """What the engine without a connector says."""
        key = (max_tokens, *prompt)
        if key not in self._known:
            self._known[key] = complete(self.alone.url, prompt, max_tokens).tokens
        return self._known[key]

    def settle(self) -> None:
        """Wait until nothing is published or pulled and all blocks are free."""
        wait_until_settled(self.nodes, self.prefill, self.decode, self.strict)

    def heal(self) -> None:
        """Have everything run, whatever a test did to it."""
        self.nodes.heal()
        dead = [engine for engine in self.all if not engine.lives]
        for engine in dead:
            engine.kill()
            engine.start()
        for engine in self.all:
            engine.wait()


@pytest.fixture(scope="session")
def shared_llama(site: Site, nodes: Nodes) -> Llama:
    return Llama(site, nodes)


@pytest.fixture
def llama(shared_llama: Llama) -> Iterator[Llama]:
    """The shared engines, all alive, and at rest again after the test."""
    shared_llama.heal()
    yield shared_llama
    shared_llama.heal()
    shared_llama.settle()


@pytest.fixture
def router(llama: Llama) -> Iterator[RouterProcess]:
    """The example router before the shared engines."""
    router = RouterProcess(llama.prefill.url, llama.decode.url)
    yield router
    router.stop()


@pytest.fixture
def new_prompt() -> Callable[[int], list[int]]:
    """Prompts of the length asked for, that share nothing with any other test's."""
    return lambda length: prompt_of(length, seed=next(_SEEDS))


_SEEDS = itertools.count(1000)
