"""What holds for every test."""

from __future__ import annotations

import gc
import signal

import pytest
from hypothesis import settings

pytest_plugins = ["tests.support.nodes.fixtures"]

# The machines are shared: how long one example takes says nothing about the code. Each run draws the same
# examples, and `make proofs` more of them. --hypothesis-profile=default draws new ones.
settings.register_profile("test", deadline=None, derandomize=True)
settings.register_profile("proofs", deadline=None, derandomize=True, max_examples=2000)
settings.load_profile("test")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-pairs", type=int, default=40, help="deployments, for each way to read")


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
