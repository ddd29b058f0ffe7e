"""Every test must leave the machine as it found it: no process, no descriptor, no shared memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from kvxferd.wire.mover import ReadWay
from tests.support.mover_harness import Node, Worker, leaving_nothing, worker


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with leaving_nothing():
        yield


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(*args: str, **shape: int) -> Worker:
        made.append(worker(*args, **shape))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=["cma", "tcp"])
def transport_environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """What selects the transport in a pool's movers."""
    return {"UCX_TLS": "tcp"} if request.param == "tcp" else {}


@pytest.fixture(params=["direct", "covering"])
def read_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the movers of ranks read that are bound after this."""
    monkeypatch.setattr(Node, "read_way", ReadWay(request.param))
    return str(request.param)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with Node("here") as made:
        yield made


@pytest.fixture
async def pair(
    transport_environment: dict[str, str],
) -> AsyncIterator[tuple[Node, Node]]:
    """A node with sources and a node with sinks."""
    async with (
        Node("there", environment=transport_environment) as there,
        Node("here", environment=transport_environment) as here,
    ):
        yield there, here
