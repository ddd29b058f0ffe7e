"""The engines are dear: a session starts what several tests need once. A failed test shows their logs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proofs.sglang.environment import PYTHON_VARIABLE
from tests.support.sglang_servers.engines import ENVIRONMENT, Engine
from tests.support.sglang_servers.pairs import Llama
from tests.support.site_fixtures import SITE, new_prompt, pytest_runtest_makereport, whole_llama  # noqa: F401
from tests.support.vllm_servers.site import Site

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(900))  # the first test of a fixture waits for its engines


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
