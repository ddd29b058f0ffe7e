"""Engines on a real daemon that are gone when their test is over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "end_to_end"))

from fleet import DaemonUnderTest, Fleet
from sides import EngineUnderTest


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    try:
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture
def daemon(fleet: Fleet) -> DaemonUnderTest:
    return fleet.daemon("node")


@pytest.fixture
def engine(daemon: DaemonUnderTest) -> Iterator[Callable[..., EngineUnderTest]]:
    """Make engines on the daemon."""
    with ExitStack() as stack:

        def make(engine_id: str, **facts: Any) -> EngineUnderTest:
            made = EngineUnderTest(daemon, engine_id, **facts)
            stack.callback(made.close)
            return made

        yield make
