"""Engines on a real daemon that are gone when their test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.connector_harness import EngineUnderTest, engines_on
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet


@pytest.fixture
def daemon(request: pytest.FixtureRequest, fleet: Fleet) -> Daemon:
    """One for all tests but those that are parametrized with "own": they kill it."""
    return fleet.daemon("node") if getattr(request, "param", "") == "own" else fleet.shared("node")


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Callable[..., EngineUnderTest]]:
    """Make engines on the daemon."""
    with engines_on(daemon) as make:
        yield make
