"""Movers' processes where no descriptor is left: what cannot be forked is refused, and later forks work."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvxferd.errors import MoverError
from tests.support.mover_harness import Node, wait_until
from tests.support.nodes.processes import children, lives, state_of


@contextmanager
def no_descriptor_left(pid: int = 0) -> Iterator[None]:
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


async def parent_of(node: Node) -> int:
    """Return the movers' parent once it forks."""
    await wait_until(lambda: bool(node.library), "the parent forks")
    assert node.processes.forkserver_pid is not None
    return node.processes.forkserver_pid


async def test_without_any_descriptor_a_mover_is_refused_until_there_are_some() -> None:
    async with Node("here") as node:
        await parent_of(node)
        with no_descriptor_left():
            for _ in range(3):
                with pytest.raises(MoverError):
                    await node.acquire()
        assert lives((await node.acquire()).pid)


async def test_a_parent_that_cannot_be_watched_is_gone_and_another_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pids: list[int] = []

    def fail(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", fail)
        node = Node("here")
        node.start()
    assert len(pids) == 1
    assert not state_of(pids[0])  # it is reaped too
    async with node:
        assert lives((await node.acquire()).pid)


async def test_a_mover_whose_pidfd_has_no_room_is_a_failed_launch_and_the_others_live_on() -> None:
    async with Node("here") as node:
        parent = await parent_of(node)
        first = await node.acquire()
        taking = asyncio.ensure_future(node.acquire())
        await asyncio.sleep(0)  # it has asked for one
        with no_descriptor_left(), pytest.raises(MoverError, match="no descriptor is left"):
            await taking
        await wait_until(lambda: children(parent) == [first.pid], "the second is gone")
        second = await node.acquire()
        assert lives(first.pid)
        assert {first.pid, second.pid} == set(children(parent))


async def test_a_parent_without_descriptors_forks_later_and_keeps_its_movers() -> None:
    async with Node("here") as node:
        parent = await parent_of(node)
        first = await node.acquire()
        with no_descriptor_left(parent), pytest.raises(MoverError, match="cannot fork a mover"):
            await node.acquire()
        assert lives((await node.acquire()).pid)
        assert lives(first.pid)
