"""What the tests of real engines share: fixtures and hooks that their conftest.py imports."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.vllm_servers.completions import prompt_of
from tests.support.vllm_servers.site import Site

NewPrompt = Callable[[int], list[int]]
# What is killed, and how, of the engines of a `Llama` and of their daemons.
VICTIMS: dict[str, Callable[[Any], Any]] = {
    "the-prefill-daemon": lambda llama: llama.nodes.prefill.kill(),
    "the-decode-daemon": lambda llama: llama.nodes.decode.kill(),
    "the-prefill-engine": lambda llama: llama.prefill.kill(),
    "the-decode-engine": lambda llama: llama.decode.kill(),
}
EACH_VICTIM = pytest.mark.parametrize("victim", VICTIMS)
SITE = pytest.StashKey[Site]()
_SEEDS = itertools.count(1000)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Show the engines' logs with a failed test."""
    report = yield
    if report.failed and (site := item.session.stash.get(SITE, None)) is not None:
        for engine in site.engines:
            report.sections.append((f"log of {engine.name}", engine.tail()))
    return report


@pytest.fixture
def new_prompt() -> NewPrompt:
    """Prompts of the length asked for, that share nothing with any other test's."""
    return lambda length: prompt_of(length, seed=next(_SEEDS))


@pytest.fixture(name="llama")
def whole_llama(shared_llama: Any) -> Iterator[Any]:
    """The shared engines, all alive, and at rest again after the test."""
    shared_llama.heal()
    yield shared_llama
    shared_llama.heal()
    shared_llama.settle()
