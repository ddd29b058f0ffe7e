"""An engine of two stages: its home has the first, and a member, another node, the second."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.simulation import IDS, TOKENS, Host, Worker, World, spec_of


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
