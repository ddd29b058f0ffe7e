"""A pool that has no descriptor left for a mover is usable again as soon as there is one."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rig import DEADLINE_S, Node

from kvxferd.errors import Code, MoverError
from kvxferd.ids import AgentName, MoverId
from kvxferd.mover.launch import ParentProcess


class Exhausted:
    """A movers' parent for which there is no descriptor, `failures` times."""

    def __init__(self, parent: ParentProcess, failures: int) -> None:
        self.parent = parent
        self.failures = failures

    def fork(self, mover: MoverId, agent: AgentName, link: socket.socket) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.parent.fork(mover, agent, link)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parent, name)


async def exhaust(node: Node, failures: int) -> Exhausted:
    """Return the node's parent once it forks, from now on without descriptors."""
    async with asyncio.timeout(DEADLINE_S):
        while not node.pool.describe().library:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert node.pool._parent is not None
    exhausted = Exhausted(node.pool._parent, failures)
    node.pool._parent = exhausted  # type: ignore[assignment]
    return exhausted


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_forks_that_fail_take_no_place_and_each_refuses_its_taker() -> None:
    async with Node("here", size=0) as node:
        await exhaust(node, 3)
        for _ in range(3):
            with pytest.raises(MoverError) as raised:
                await asyncio.wait_for(node.pool.take(), DEADLINE_S)
            assert raised.value.code is Code.MOVER_LOST
            assert "Too many open files" in raised.value.message
        assert node.pool.describe().num_starting == 0
        assert not node.pool._waiters
        assert (await asyncio.wait_for(node.pool.take(), DEADLINE_S)).is_alive


async def test_a_pool_that_could_not_be_filled_is_filled_later() -> None:
    async with Node("here", size=0) as node:
        exhausted = await exhaust(node, 3)
        node.pool._size = 2
        node.pool._fill()
        async with asyncio.timeout(DEADLINE_S):
            while node.pool.describe().num_warm != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert exhausted.failures == 0


async def test_a_fork_for_the_stock_that_fails_refuses_nobody_whose_mover_is_on_its_way() -> None:
    async with Node("here", size=0) as node:
        exhausted = await exhaust(node, 0)
        taking = asyncio.ensure_future(node.pool.take())
        await asyncio.sleep(0)
        exhausted.failures, node.pool._size = 1, 1
        node.pool._fill()
        assert (await asyncio.wait_for(taking, DEADLINE_S)).is_alive


async def test_without_any_descriptor_takers_are_refused_until_there_are_some() -> None:
    async with Node("here", size=0) as node:
        await exhaust(node, 0)
        with no_descriptor_left():
            for _ in range(3):
                with pytest.raises(MoverError):
                    await asyncio.wait_for(node.pool.take(), DEADLINE_S)
        assert (await asyncio.wait_for(node.pool.take(), DEADLINE_S)).is_alive
