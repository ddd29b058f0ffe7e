"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

pytest_plugins = ["tests.support.nodes.fixtures"]

# The machines are shared: how long one example takes says nothing about the code. A test run draws the
# same examples each time; `make proofs` draws new ones, and more (--hypothesis-profile=proofs).
settings.register_profile("test", deadline=None, derandomize=True)
settings.register_profile("proofs", deadline=None, derandomize=False, max_examples=2000)
settings.load_profile("test")

# What a slow or busy machine adds to a test's processor time is less than this factor.
SLOW_MACHINE = 5
_PROCESSOR_S: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-pairs", type=int, default=40, help="deployments, for each way to read")
    parser.addoption(
        "--max-quick-s",
        type=float,
        default=0.0,
        help="name the tests that take more processor time than this; fail the run where one takes "
        f"{SLOW_MACHINE} times as much",
    )


def pytest_configure() -> None:
    """Let SIGINT end the programs that tests start, also where a shell runs the tests in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # programs would inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take the imports of all tests out of every later collection: 0.35 to 1.6 s for each `gc.collect()`."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """Likewise what earlier modules left."""
    gc.collect()
    gc.freeze()


# --- quick tests stay quick: processor time, so that a busy machine fails none


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = _processor_s()
    try:
        return (yield)
    finally:
        item.user_properties.append(("processor_s", _processor_s() - before))


def _processor_s() -> float:
    """Return this process's seconds of processor time, and those of its children that have ended."""
    spent = os.times()
    return time.process_time() + spent.children_user + spent.children_system


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _PROCESSOR_S[report.nodeid] += sum(s for name, s in report.user_properties if name == "processor_s")


def pytest_sessionfinish(session: pytest.Session) -> None:
    limit_s = session.config.getoption("--max-quick-s")
    if limit_s and max(_PROCESSOR_S.values(), default=0.0) > SLOW_MACHINE * limit_s:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    limit_s = config.getoption("--max-quick-s")
    for name, spent_s in _PROCESSOR_S.most_common() if limit_s else ():
        if spent_s > limit_s:
            terminalreporter.write_line(f"not quick, mark it slow: {name}: {spent_s:.1f} s of processor time")
