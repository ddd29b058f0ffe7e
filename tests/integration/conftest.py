"""Daemons and rank processes: those that a session shares, and those that are gone with their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nodes.fleet import Fleet, Machines


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    machines = Machines(tmp_path_factory.mktemp("machines"))
    try:
        yield machines
    finally:
        machines.stop()


@pytest.fixture
def fleet(tmp_path: Path, machines: Machines) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, machines)
    try:
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture(scope="module")
def module_fleet(tmp_path_factory: pytest.TempPathFactory, machines: Machines) -> Iterator[Fleet]:
    """One for all tests of a module."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), machines)
    try:
        yield fleet
    finally:
        fleet.stop()
