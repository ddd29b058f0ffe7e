"""A pool that has no descriptor left for a mover is usable again as soon as there is one."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvxferd.errors import MoverError
from kvxferd.mover.supervisor.forkserver_client import ForkserverClient
from tests.support.mover_harness import DEADLINE_S, Node, is_alive, wait_until


async def parent_of(node: Node) -> ForkserverClient:
    """Return the movers' parent once it forks."""
    await wait_until(lambda: bool(node.pool.decisions.library), "the parent forks")
    assert node.pool.processes._forkserver is not None
    return node.pool.processes._forkserver


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_without_any_descriptor_takers_are_refused_until_there_are_some() -> None:
    async with Node("here", size=0) as node:
        await parent_of(node)
        with no_descriptor_left():
            for _ in range(3):
                with pytest.raises(MoverError):
                    await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)
        assert is_alive((await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)).pid)


async def test_a_pool_whose_parent_cannot_be_watched_starts_another_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pids: list[int] = []
    pidfd_open = os.pidfd_open

    def fail_twice(pid: int) -> int:
        if len(pids) == 2:
            return pidfd_open(pid)
        pids.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", fail_twice)
    async with Node("here", size=0) as node:
        await wait_until(lambda: bool(node.pool.decisions.library), "the parent forks")
        assert is_alive((await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)).pid)
    assert not [pid for pid in pids if is_alive(pid)]  # they are reaped too


def children_of(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


async def test_a_mover_whose_pidfd_has_no_room_is_a_failed_launch_and_the_others_live_on() -> None:
    async with Node("here", size=0) as node:
        parent = await parent_of(node)
        first = await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)
        taking = asyncio.ensure_future(node.pool.acquire())
        await asyncio.sleep(0)  # it has asked for one
        with no_descriptor_left(), pytest.raises(MoverError, match="no descriptor is left"):
            await asyncio.wait_for(taking, DEADLINE_S)
        await wait_until(lambda: children_of(parent.pid) == [str(first.pid)], "the second is gone")
        second = await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)
        assert is_alive(first.pid)
        assert {str(first.pid), str(second.pid)} == set(children_of(parent.pid))


async def test_a_parent_without_descriptors_forks_later_and_keeps_its_movers() -> None:
    async with Node("here", size=0) as node:
        parent = await parent_of(node)
        first = await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)
        limits = resource.prlimit(parent.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(parent.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            node.pool.resize(1)
            await wait_until(lambda: node.pool.decisions._num_failed_forks >= 2, "two forks have failed")
        finally:
            resource.prlimit(parent.pid, resource.RLIMIT_NOFILE, limits)
        await wait_until(lambda: node.pool.decisions.num_ready == 1, "one is warm")
        assert is_alive(first.pid)
        assert node.pool.decisions._num_failed_forks == 0
