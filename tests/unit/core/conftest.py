"""One source and one sink on two hosts, the source's memory filled with a request."""

from __future__ import annotations

import pytest

from tests.support.simulation import IDS, TOKENS, Worker, World


@pytest.fixture(params=["by-daemon", "by-mover"])
def world(request: pytest.FixtureRequest) -> World:
    """Workers hear of what is delivered from their daemon, or from their movers."""
    world = World()
    world.receives_deliveries = request.param == "by-mover"
    return world


@pytest.fixture
def source(world: World) -> Worker:
    source = world.engine(world.host("p"), "prefill")[0]
    source.fill(IDS, TOKENS, seed=1)
    return source


@pytest.fixture
def sink(world: World) -> Worker:
    return world.engine(world.host("d"), "decode")[0]
