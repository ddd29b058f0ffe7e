"""What the tests of real engines share: fixtures and hooks that their conftest.py imports."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.vllm_servers.completions import prompt_of
from tests.support.vllm_servers.site import Site

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
def new_prompt() -> Callable[[int], list[int]]:
    """Prompts of the length asked for, that share nothing with any other test's."""
    return lambda length: prompt_of(length, seed=next(_SEEDS))
