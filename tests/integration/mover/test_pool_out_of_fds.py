"""A pool that has no descriptor left for a mover is usable again as soon as there is one."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvxferd.errors import Code, MoverError
from kvxferd.ids import AgentName, MoverId
from kvxferd.mover.backends import DEFAULT_BACKEND
from kvxferd.mover.supervisor.forkserver_client import ForkserverClient
from tests.support.mover_harness import DEADLINE_S, Node, wait_until


class Exhausted:
    """A movers' parent for which there is no descriptor, `failures` times."""

    def __init__(self, parent: ForkserverClient, failures: int) -> None:
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
    await wait_until(lambda: bool(node.pool.status().library), "the parent forks")
    assert node.pool._forkserver is not None
    exhausted = Exhausted(node.pool._forkserver, failures)
    node.pool._forkserver = exhausted  # type: ignore[assignment]
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
                await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)
            assert raised.value.code is Code.MOVER_LOST
            assert "Too many open files" in raised.value.message
        assert node.pool.status().num_starting == 0
        assert not node.pool._decisions._waiters
        assert (await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)).is_alive


async def test_a_pool_that_could_not_be_filled_is_filled_later() -> None:
    async with Node("here", size=0) as node:
        exhausted = await exhaust(node, 3)
        node.pool.resize(2)
        await wait_until(lambda: node.pool.status().num_warm == 2, "two are warm")
        assert exhausted.failures == 0


async def test_a_fork_for_the_stock_that_fails_refuses_nobody_whose_mover_is_on_its_way() -> None:
    async with Node("here", size=0) as node:
        exhausted = await exhaust(node, 0)
        taking = asyncio.ensure_future(node.pool.acquire())
        await asyncio.sleep(0)
        exhausted.failures = 1
        node.pool.resize(1)
        assert (await asyncio.wait_for(taking, DEADLINE_S)).is_alive


async def test_without_any_descriptor_takers_are_refused_until_there_are_some() -> None:
    async with Node("here", size=0) as node:
        await exhaust(node, 0)
        with no_descriptor_left():
            for _ in range(3):
                with pytest.raises(MoverError):
                    await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)
        assert (await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)).is_alive


class Failing:
    """`os.pidfd_open` without descriptors, `failures` times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.pids: list[int] = []
        self._real = os.pidfd_open

    def __call__(self, pid: int) -> int:
        if self.failures:
            self.failures -= 1
            self.pids.append(pid)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._real(pid)


async def test_a_parent_that_cannot_be_watched_is_ended_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = Failing(1)
    monkeypatch.setattr(os, "pidfd_open", failing)
    gc.collect()  # what earlier tests dropped is closed now, not between two counts
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Too many open files"):
        ForkserverClient(
            {}, "auto", DEFAULT_BACKEND, (), lambda *_: None, lambda: None, lambda _: None, lambda: None
        )
    assert os.listdir("/proc/self/fd") == before
    assert not os.path.exists(f"/proc/{failing.pids[0]}")  # reaped too


async def test_a_pool_whose_parent_cannot_be_watched_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(2)
    monkeypatch.setattr(os, "pidfd_open", failing)
    async with Node("here", size=0) as node:
        await wait_until(lambda: bool(node.pool.status().library), "the parent forks")
        assert (await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)).is_alive
    assert not [pid for pid in failing.pids if os.path.exists(f"/proc/{pid}")]


def children_of(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


async def test_a_mover_whose_pidfd_has_no_room_is_a_failed_launch_and_the_others_live_on() -> None:
    async with Node("here", size=0) as node:
        parent = (await exhaust(node, 0)).parent
        first = await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)
        taking = asyncio.ensure_future(node.pool.acquire())
        await asyncio.sleep(0)  # it has asked for one
        with no_descriptor_left(), pytest.raises(MoverError, match="no descriptor is left"):
            await asyncio.wait_for(taking, DEADLINE_S)
        await wait_until(lambda: children_of(parent.pid) == [str(first.pid)], "the second is gone")
        second = await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)
        assert first.is_alive
        assert {str(first.pid), str(second.pid)} == set(children_of(parent.pid))


async def test_a_parent_without_descriptors_forks_later_and_keeps_its_movers() -> None:
    async with Node("here", size=0) as node:
        parent = (await exhaust(node, 0)).parent
        first = await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)
        limits = resource.prlimit(parent.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(parent.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            node.pool.resize(1)
            await wait_until(lambda: node.pool._decisions._num_failed_forks >= 2, "two forks have failed")
        finally:
            resource.prlimit(parent.pid, resource.RLIMIT_NOFILE, limits)
        await wait_until(lambda: node.pool.status().num_warm == 1, "one is warm")
        assert first.is_alive
        assert node.pool._decisions._num_failed_forks == 0
