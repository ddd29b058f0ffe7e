"""The engines are dear: a session starts what several tests need once. A failed test shows their logs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.proofs.sglang.environment import PYTHON_VARIABLE
from tests.support.sglang_servers.engines import ENVIRONMENT, Engine
from tests.support.sglang_servers.pairs import Llama
from tests.support.vllm_servers.completions import prompt_of
from tests.support.vllm_servers.site import Site

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(900))  # the first test of a fixture waits for its engines


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed and (site := item.session.stash.get(SITE, None)) is not None:
        for engine in site.engines:
            report.sections.append((f"log of {engine.name}", engine.tail()))
    return report


SITE = pytest.StashKey[Site]()


@pytest.fixture(scope="session")
def python() -> str:
    return str(Path(os.environ[PYTHON_VARIABLE]).absolute())


@pytest.fixture(scope="session")
def site(
    tmp_path_factory: pytest.TempPathFactory, python: str, request: pytest.FixtureRequest
) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("sglang"), python, Engine, ENVIRONMENT)
    request.session.stash[SITE] = site
    try:
        yield site
    finally:
        site.stop()


@pytest.fixture(scope="session")
def shared_llama(site: Site) -> Iterator[Llama]:
    llama = Llama(site)
    yield llama
    llama.close()


@pytest.fixture
def llama(shared_llama: Llama) -> Iterator[Llama]:
    """The shared engines, all alive, and at rest again after the test."""
    shared_llama.heal()
    yield shared_llama
    shared_llama.heal()
    shared_llama.settle()


@pytest.fixture
def new_prompt() -> Callable[[int], list[int]]:
    """Prompts of the length asked for, that share nothing with any other test's."""
    return lambda length: prompt_of(length, seed=next(_SEEDS))


_SEEDS = itertools.count(1000)
