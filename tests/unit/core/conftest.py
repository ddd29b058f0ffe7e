"""One source and one sink on two hosts, the source's memory filled with a request."""

from __future__ import annotations

import pytest

from tests.support.simulation import IDS, TOKENS, Worker, World


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where ends of pulls are tried, workers hear of them from their daemon, or from their movers."""
    chosen = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    both = getattr(metafunc.module, "DELIVERED_BOTH_WAYS", False) and "world" not in chosen
    if both and "world" in metafunc.fixturenames:
        metafunc.parametrize("world", [False, True], indirect=True, ids=["by-daemon", "by-mover"])


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    world = World()
    world.receives_deliveries = getattr(request, "param", False)
    return world


@pytest.fixture
def source(world: World) -> Worker:
    source = world.engine(world.host("p"), "prefill")[0]
    source.fill(IDS, TOKENS, seed=1)
    return source


@pytest.fixture
def sink(world: World) -> Worker:
    return world.engine(world.host("d"), "decode")[0]
