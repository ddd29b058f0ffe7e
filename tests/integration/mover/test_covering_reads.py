"""Covering reads by real movers: the right bytes, and what a source that stops or dies means."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack

import numpy as np
import pytest

from kvxferd.errors import Code
from kvxferd.wire.mover import AbortPull, PullDone, ReadWay
from tests.support.mover_harness import Node, Served, Sink, Worker, serve, sink

WORD = bytes(range(16))
TOKENS_A_BLOCK = 16
Make = Callable[..., Worker]


class Pair:
    """Two sources of TP 2, heads first, and a reader of TP 1, tokens first."""

    def __init__(self, sources: list[Served], reader: Sink) -> None:
        self.sources = sources
        self.reader = reader
        for seed, source in enumerate(sources):
            source.worker.fill(seed)
            source.page.write(0, WORD)

    @classmethod
    async def make(cls, there: Node, here: Node, make_worker: Make, **shape: int) -> Pair:
        sources = [await serve(there, make_worker("P", tp=2, tp_rank=rank, **shape)) for rank in (0, 1)]
        return cls(sources, await sink(here, make_worker("D", layout="NHD", **shape), sources))

    def start(self, ours: list[int] | range, theirs: list[int] | range) -> int:
        return self.reader.start(self.sources, self.sources[0].place(0, WORD), ours, theirs)

    def check(self, ours: list[int] | range, theirs: list[int] | range) -> None:
        """Each head of each token is its rank's; blocks that were not named hold zeros."""
        worker = self.reader.worker
        num_blocks = worker.layout.groups[0].num_blocks
        mine = worker.array.reshape(-1, num_blocks, TOKENS_A_BLOCK, 2, 128)
        for rank, source in enumerate(self.sources):
            held = source.worker.array.reshape(-1, num_blocks, TOKENS_A_BLOCK, 128)
            assert np.array_equal(mine[..., rank, :][:, list(ours)], held[:, list(theirs)])
        rest = np.ones(num_blocks, dtype=bool)
        rest[list(ours)] = False
        assert not mine[:, rest].any()

    def close(self) -> None:
        for source in self.sources:
            source.close()


async def test_every_byte_arrives_through_chunks(
    transport_environment: dict[str, str], make_worker: Make
) -> None:
    async with (
        Node("there", size=2, environment=transport_environment) as there,
        Node("here", environment=transport_environment, read_way=ReadWay.COVERING) as here,
    ):
        pair = await Pair.make(there, here, make_worker, blocks=2048)
        order = np.random.default_rng(3).permutation(2048)
        ours, theirs = order[:1000].tolist(), order[::-1][:1000].tolist()
        assert (await pair.reader.outcome(pair.start(ours, theirs))).delivered  # and memory is granted
        outcome = await pair.reader.outcome(pair.start(ours, theirs))
        assert outcome.delivered, outcome
        assert outcome.covered_bytes == outcome.bytes == 1000 * 4 * 2 * TOKENS_A_BLOCK * 128
        pair.check(ours, theirs)
        pair.close()


async def test_without_a_grant_of_memory_every_byte_arrives_directly(make_worker: Make) -> None:
    async with (
        Node("there", size=2) as there,
        Node("here", chunk_memory=0, read_way=ReadWay.COVERING) as here,
    ):
        pair = await Pair.make(there, here, make_worker)
        outcome = await pair.reader.outcome(pair.start(range(9), range(20, 29)))
        assert (outcome.delivered, outcome.covered_bytes) == (True, 0)
        pair.check(range(9), range(20, 29))
        pair.close()


async def test_auto_covers_what_is_scattered_and_not_what_is_long(make_worker: Make) -> None:
    async with AsyncExitStack() as nodes:
        there = await nodes.enter_async_context(Node("there", size=3))
        here = await nodes.enter_async_context(Node("here", size=2, read_way=ReadWay.AUTO))
        pair = await Pair.make(there, here, make_worker, blocks=2048)
        assert (await pair.reader.outcome(pair.start(range(500), range(500)))).delivered
        outcome = await pair.reader.outcome(pair.start(range(500), range(500)))
        assert outcome.covered_bytes == outcome.bytes
        assert outcome.predicted_s > 0
        whole = await serve(there, make_worker("Q", blocks=2048))
        whole.page.write(0, WORD)
        equal = await sink(here, make_worker("E", blocks=2048), [whole])
        outcome = await equal.outcome(equal.start([whole], whole.place(0, WORD), range(500), range(500)))
        assert (outcome.delivered, outcome.covered_bytes) == (True, 0)
        whole.close()
        pair.close()


async def test_an_aborted_pull_is_over_though_its_source_is_stopped(make_worker: Make) -> None:
    """Over TCP the source's process sends the bytes, at any later time: into the mover's chunk."""
    environment = {"UCX_TLS": "tcp"}
    async with (
        Node("there", size=2, environment=environment) as there,
        Node("here", environment=environment, read_way=ReadWay.COVERING) as here,
    ):
        pair = await Pair.make(there, here, make_worker, blocks=2048)
        assert (await pair.reader.outcome(pair.start([0], [0]))).delivered
        stopped = pair.sources[1].mover.pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            number = pair.start(range(1000), range(1000))
            with pytest.raises(TimeoutError):
                await here.heard(pair.reader.mover, PullDone, 0.3)
            pair.reader.mover.send(AbortPull(pull=number))
            outcome = await pair.reader.outcome(number, 2.0)
            assert (outcome.code, outcome.finished) == (Code.CANCELLED, True)
            ours = pair.reader.worker.array
            before = ours.copy()
        finally:
            os.kill(stopped, signal.SIGCONT)
        again = pair.start(range(1000, 2000), range(1000))
        assert (await pair.reader.outcome(again)).delivered
        num_blocks = 2048
        untouched = ours.reshape(-1, num_blocks, 4096)[:, :1000]
        assert np.array_equal(untouched, before.reshape(-1, num_blocks, 4096)[:, :1000])
        pair.close()


async def test_a_killed_source_fails_its_pulls_and_no_other(
    transport_environment: dict[str, str], make_worker: Make
) -> None:
    async with (
        Node("there", size=2, environment=transport_environment) as there,
        Node("here", environment=transport_environment, read_way=ReadWay.COVERING) as here,
    ):
        pair = await Pair.make(there, here, make_worker, blocks=2048)
        assert (await pair.reader.outcome(pair.start([0], [0]))).delivered
        pair.sources[1].mover.kill()
        outcome = await pair.reader.outcome(pair.start(range(1000), range(1000)))
        assert (outcome.code, outcome.finished) == (Code.TRANSPORT, True)
        pair.close()
