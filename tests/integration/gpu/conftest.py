"""The end-to-end tests' fleet. Without a GPU the tests run over the fake driver; the other half skips."""

from __future__ import annotations

import pytest

from tests.support.devices import DRIVERS, driver_or_skip

VERDICTS = pytest.StashKey[list[str]]()


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    driver_or_skip(request.param)
    return request.param


@pytest.fixture
def verdicts(request: pytest.FixtureRequest) -> list[str]:
    """Lines for the end of the run: what this machine's GPU can do."""
    return request.config.stash.setdefault(VERDICTS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how the vLLM connector would place a cache in this machine's GPU memory."""
    for line in config.stash.get(VERDICTS, []):
        terminalreporter.write_line(f"vLLM: {line}")
