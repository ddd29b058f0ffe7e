"""Movers and a forkserver that are stopped: SIGKILL ends them, and nobody waits for them for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvxferd.errors import Code, MoverError
from tests.support.mover_harness import DEADLINE_S, Node, wait_until


@pytest_asyncio.fixture(loop_scope="session")
async def node() -> AsyncIterator[Node]:
    """A pool that keeps one mover ready, and has it."""
    async with Node("stopped") as made:
        await wait_until(lambda: made.pool.decisions.num_ready == 1, "a mover is ready")
        yield made


def signal_forkserver(node: Node, number: int) -> None:
    assert node.pool.processes.forkserver_pid is not None
    os.kill(node.pool.processes.forkserver_pid, number)


async def test_the_forkservers_death_ends_stopped_movers_and_refuses_what_waits(node):
    mover = await node.pool.acquire()
    os.kill(mover.pid, signal.SIGSTOP)
    signal_forkserver(node, signal.SIGSTOP)  # so that the fork is pending
    # One is behind those for which movers are ready: one may be, however soon this comes.
    requests = [asyncio.ensure_future(node.pool.acquire()) for _ in range(node.pool.decisions.num_ready + 1)]
    await asyncio.sleep(0)  # they are made
    signal_forkserver(node, signal.SIGKILL)
    with pytest.raises(MoverError) as refused:
        await asyncio.wait_for(requests[-1], DEADLINE_S)
    assert refused.value.code is Code.MOVER_LOST
    await node.gone(mover)
    assert (await node.pool.acquire()).mover_id != mover.mover_id


async def test_a_pool_with_a_stopped_forkserver_and_mover_stops(node):
    mover = await node.pool.acquire()
    os.kill(mover.pid, signal.SIGSTOP)
    signal_forkserver(node, signal.SIGSTOP)
    await asyncio.wait_for(node.pool.stop(), DEADLINE_S)
    assert node.exits == [mover.mover_id]
