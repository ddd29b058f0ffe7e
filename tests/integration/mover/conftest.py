"""Pools of movers that the tests of a session share, and what every test must leave: nothing.

The pools live on one event loop for the whole session, and so do all asynchronous tests of this folder.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.mover_harness import (
    WORD,
    Connect,
    Node,
    Pools,
    Served,
    Sink,
    Worker,
    leaving_nothing,
    serve,
    sink,
    worker,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pools() -> AsyncIterator[Pools]:
    async with Pools() as made:
        yield made


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def nothing_left(pools: Pools) -> AsyncIterator[None]:
    """No process, no descriptor and no shared memory is left but those of the shared pools."""
    with leaving_nothing(pools.num_fds):
        yield
        await pools.rest()


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(*args: str, **shape: int) -> Worker:
        made.append(worker(*args, **shape))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest_asyncio.fixture(loop_scope="session")
async def connect(make_worker: Callable[..., Worker]) -> AsyncIterator[Connect]:
    """Make a source there and a sink here that reads it; `WORD` is in the source's slot 0."""
    made: list[Served] = []

    async def make(there: Node, here: Node, **shape: int) -> tuple[Served, Sink]:
        made.append(await serve(there, make_worker("P", **shape)))
        reader = await sink(here, make_worker("D", **shape), made[-1:])
        made[-1].page.write(0, WORD)
        return made[-1], reader

    yield make
    for source in made:
        source.close()


@pytest.fixture(params=["cma", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """Over which transport the movers read."""
    return str(request.param)


@pytest.fixture
def read_way() -> str:
    """How the movers of `pair` read. A file or a test may name other ways."""
    return "direct"


@pytest_asyncio.fixture(loop_scope="session")
async def node(pools: Pools) -> Node:
    return await pools.node("here")


@pytest_asyncio.fixture(loop_scope="session")
async def pair(pools: Pools, transport: str, read_way: str) -> tuple[Node, Node]:
    """A node with sources and a node with sinks."""
    return await pools.node("there", transport), await pools.node("here", transport, read_way)
