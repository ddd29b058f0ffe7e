"""Movers and a forkserver that are stopped: SIGKILL ends them, and nobody waits for them for ever."""

from __future__ import annotations

import asyncio
import os
import signal

from tests.support.mover_harness import DEADLINE_S, Node


def signal_forkserver(node: Node, number: int) -> None:
    assert node.processes.forkserver_pid is not None
    os.kill(node.processes.forkserver_pid, number)


async def test_the_forkservers_death_ends_stopped_movers_and_what_is_to_be_forked() -> None:
    async with Node("stopped") as node:
        mover = await node.acquire()
        os.kill(mover.pid, signal.SIGSTOP)
        signal_forkserver(node, signal.SIGSTOP)  # so that the fork is pending
        pending = asyncio.ensure_future(node.fork())
        await asyncio.sleep(0)  # it is requested
        assert len(node.processes._handles) == 2
        signal_forkserver(node, signal.SIGKILL)
        await node.gone(mover)
        await node.until(lambda: True if node.processes.forkserver_pid is None else None)
        assert not node.processes._handles
        pending.cancel()
        node.start()
        assert (await node.acquire()).mover_id != mover.mover_id


async def test_stopped_processes_are_gone_when_all_is_stopped() -> None:
    node = Node("stopped")
    node.start()
    mover = await node.acquire()
    os.kill(mover.pid, signal.SIGSTOP)
    signal_forkserver(node, signal.SIGSTOP)
    await asyncio.wait_for(node.processes.stop(), DEADLINE_S)
    assert node.exits == [mover.mover_id]
