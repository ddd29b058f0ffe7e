"""One source and one sink on two hosts, and an engine of two stages: the sources' memory holds a request."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.simulation import IDS, TOKENS, Host, Worker, World, spec_of


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


# --- an engine whose home has its first stage, and a member, another node, the second


@pytest.fixture
def stages(world: World) -> list[Worker]:
    home, member = world.host("p0"), world.host("p1")
    spec = spec_of("prefill", pp=2, layers=4, home=home.endpoint)
    stages = [world.register(home, spec), world.register(member, msgspec.structs.replace(spec, pp_rank=1))]
    for stage in stages:
        stage.fill(IDS, TOKENS, seed=1)
    return stages


@pytest.fixture
def home(stages: list[Worker]) -> Host:
    return stages[0].host


@pytest.fixture
def member(stages: list[Worker]) -> Host:
    return stages[1].host


@pytest.fixture
def reader(stages: list[Worker], world: World) -> Worker:
    """A rank on a third node."""
    return world.engine(world.host("d"), "decode", layout="NHD", layers=4)[0]
