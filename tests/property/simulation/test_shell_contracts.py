"""The promises of the simulated pool of movers, held against it and against real processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import select
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvxferd.errors import Code, MoverError
from kvxferd.ids import MoverId
from tests.property.simulation.agenda import Actor, Agenda
from tests.property.simulation.shells.mover_pool import SimulatedHandle, SimulatedPool
from tests.support.mover_harness import Node

DEADLINE_S = 20.0


class Request:
    """What a pool has answered."""

    def __init__(self) -> None:
        self.result: Any = None

    def set(self, result: Any) -> None:
        assert self.result is None, "answered twice"
        self.result = result


class ModelPool:
    """The simulated pool, by a seed."""

    def __init__(self, size: int, seed: int) -> None:
        self.agenda = Agenda(seed)
        self.exits: list[MoverId] = []
        self.pool = SimulatedPool(
            Actor(self.agenda, "daemon"),
            random.Random(seed),
            size=size,
            mover_ids=itertools.count(1),
            on_exit=self.exits.append,
        )
        self.pool.start()

    async def until(self, holds: Callable[[], bool]) -> None:
        if not holds():
            self.agenda.run(self.agenda.now + DEADLINE_S, holds)
        assert holds()

    def request(self) -> Request:
        request = Request()
        self.pool.request(request.set)
        return request

    def status(self) -> Any:
        return self.pool.decisions.status()

    def num_early_deaths(self) -> int:
        return self.pool.decisions.num_died_unassigned

    def ready_mover(self) -> SimulatedHandle:
        return self.pool.handles[self.pool.decisions.warm()[0]]

    def signal_mover(self, handle: SimulatedHandle, number: int) -> None:
        self._signal(handle.process, number)

    def signal_forkserver(self, number: int) -> None:
        assert self.pool.forkserver is not None
        self._signal(self.pool.forkserver, number)

    def _signal(self, process: Any, number: int) -> None:
        {signal.SIGKILL: process.kill, signal.SIGSTOP: process.stop, signal.SIGCONT: process.resume}[number]()

    async def stop(self) -> None:
        self.pool.stop()
        await self.until(lambda: self.pool.is_stopped)


class RealPool:
    """A pool of real processes."""

    def __init__(self, size: int) -> None:
        self.node = Node("contract", size=size)
        self.exits = self.node.exits

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    def request(self) -> Request:
        request = Request()
        self.node.pool.request(request.set)
        return request

    def status(self) -> Any:
        return self.node.pool.status()

    def num_early_deaths(self) -> int:
        return self.node.pool.num_died_unassigned

    def ready_mover(self) -> Any:
        return self.node.pool._handles[self.node.pool._decisions.warm()[0]]

    def signal_mover(self, handle: Any, number: int) -> None:
        os.kill(handle.pid, number)

    def signal_forkserver(self, number: int) -> None:
        assert self.node.pool.forkserver_pid is not None
        os.kill(self.node.pool.forkserver_pid, number)

    async def stop(self) -> None:
        await asyncio.wait_for(self.node.pool.stop(), DEADLINE_S)


Pool = ModelPool | RealPool


@pytest.fixture(params=["real", *range(5)])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    """A pool that keeps one mover ready, and has it."""
    made: Pool
    if request.param == "real":
        made = RealPool(1)
        await made.node.pool.start()
    else:
        made = ModelPool(1, request.param)
    try:
        await made.until(lambda: made.status().num_warm == 1)
        yield made
    finally:
        await made.stop()


async def assigned(pool: Pool) -> Any:
    request = pool.request()
    await pool.until(lambda: request.result is not None)
    assert not isinstance(request.result, MoverError)
    return request.result


async def test_movers_and_a_forkserver_that_stop_and_die(pool: Pool) -> None:
    """One test, as a real pool takes a second to start."""
    await check_that_sigkill_ends_a_stopped_mover(pool)
    await pool.until(lambda: pool.status().num_warm == 1)
    await check_that_a_dead_ready_mover_is_not_assigned(pool)
    await check_that_a_stopped_forkserver_answers_once_it_goes_on(pool)


def requests_that_wait(pool: Pool, number: int) -> list[Request]:
    """Return requests behind those for which movers are ready: one may be, however soon this comes."""
    return [pool.request() for _ in range(pool.status().num_warm + number)][-number:]


async def check_that_sigkill_ends_a_stopped_mover(pool: Pool) -> None:
    first = await assigned(pool)
    second = await assigned(pool)
    pool.signal_mover(first, signal.SIGSTOP)
    pool.signal_mover(first, signal.SIGKILL)
    await pool.until(lambda: bool(pool.exits))
    pool.signal_mover(second, signal.SIGKILL)
    await pool.until(lambda: len(pool.exits) == 2)
    assert pool.exits == [first.mover_id, second.mover_id]


async def check_that_a_dead_ready_mover_is_not_assigned(pool: Pool) -> None:
    dead = pool.ready_mover()
    pool.signal_mover(dead, signal.SIGKILL)
    if isinstance(pool, RealPool):  # the event loop does not come to it before the request
        select.select([dead.pidfd], [], [], DEADLINE_S)
    else:
        await pool.until(lambda: not dead.process.is_alive)
    got = await assigned(pool)
    assert got.mover_id != dead.mover_id
    assert pool.num_early_deaths() == 1


async def test_the_forkservers_death_ends_stopped_movers_and_refuses_what_waits(pool: Pool) -> None:
    mover = await assigned(pool)
    pool.signal_mover(mover, signal.SIGSTOP)
    pool.signal_forkserver(signal.SIGSTOP)  # so that the fork is pending
    (waiting,) = requests_that_wait(pool, 1)
    pool.signal_forkserver(signal.SIGKILL)
    await pool.until(lambda: mover.mover_id in pool.exits and waiting.result is not None)
    assert isinstance(waiting.result, MoverError)
    assert waiting.result.code is Code.MOVER_LOST
    assert (await assigned(pool)).mover_id != mover.mover_id


async def check_that_a_stopped_forkserver_answers_once_it_goes_on(pool: Pool) -> None:
    await assigned(pool)
    pool.signal_forkserver(signal.SIGSTOP)
    waiting = requests_that_wait(pool, 2)
    assert [one.result for one in waiting] == [None, None]
    pool.signal_forkserver(signal.SIGCONT)
    await pool.until(lambda: all(one.result is not None for one in waiting))
    first, second = (one.result for one in waiting)
    assert first.mover_id != second.mover_id


async def test_a_pool_with_a_stopped_forkserver_and_mover_stops(pool: Pool) -> None:
    mover = await assigned(pool)
    pool.signal_mover(mover, signal.SIGSTOP)
    pool.signal_forkserver(signal.SIGSTOP)
    await pool.stop()
    assert pool.exits == [mover.mover_id]
