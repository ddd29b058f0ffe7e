"""The engines are dear: a session starts what several tests need once. A failed test shows their logs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proofs.vllm.environment import PYTHON_VARIABLE
from tests.support.site_fixtures import SITE, new_prompt, pytest_runtest_makereport, whole_llama  # noqa: F401
from tests.support.vllm_servers.processors import share_processors
from tests.support.vllm_servers.router_process import RouterProcess
from tests.support.vllm_servers.site import Llama, Nodes, Site

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(600))  # the first test of a fixture waits for its engines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print which cores the engines had, where any ran: results of one core are to be read with care."""
    if config.stash.get(STARTED_ENGINES, False):
        terminalreporter.write_line(f"vLLM: {share_processors(os.sched_getaffinity(0))}")


STARTED_ENGINES = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Site]:
    python = str(Path(os.environ[PYTHON_VARIABLE]).absolute())
    site = Site(tmp_path_factory.mktemp("vllm"), python)
    request.session.stash[SITE] = site
    request.config.stash[STARTED_ENGINES] = True
    try:
        yield site
    finally:
        site.stop()


@pytest.fixture(scope="session")
def nodes(site: Site) -> Nodes:
    return Nodes(site.daemon("node-p"), site.daemon("node-d"))


@pytest.fixture(scope="session")
def shared_llama(site: Site, nodes: Nodes) -> Llama:
    return Llama(site, nodes)


@pytest.fixture
def router(llama: Llama) -> Iterator[RouterProcess]:
    """The example router before the shared engines."""
    router = RouterProcess(llama.prefill.url, llama.decode.url)
    yield router
    router.stop()
