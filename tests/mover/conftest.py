"""Every test must leave the machine as it found it: no process, no descriptor, no shared memory."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import rig


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def orphaned_directories() -> list[str]:
    """Shared memory directories whose owner is gone."""
    return [
        made.name
        for made in Path("/dev/shm").glob("kvxferd-movers-*")
        if not Path("/proc", made.name.rpartition("-")[2]).exists()
    ]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = num_descriptors()
    yield
    assert rig.marked_processes() == []
    assert num_descriptors() <= before
    assert orphaned_directories() == []


@pytest.fixture
def make_worker() -> Iterator[Callable[..., rig.Worker]]:
    made: list[rig.Worker] = []

    def make(*args: str, **shape: int) -> rig.Worker:
        made.append(rig.worker(*args, **shape))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=["cma", "tcp"])
def transport_environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """What selects the transport in a pool's movers."""
    return {"UCX_TLS": "tcp"} if request.param == "tcp" else {}


@pytest.fixture
async def node() -> AsyncIterator[rig.Node]:
    async with rig.Node("here") as made:
        yield made


@pytest.fixture
async def pair(transport_environment: dict[str, str]) -> AsyncIterator[tuple[rig.Node, rig.Node]]:
    """A node with sources and a node with sinks."""
    async with (
        rig.Node("there", environment=transport_environment) as there,
        rig.Node("here", environment=transport_environment) as here,
    ):
        yield there, here
