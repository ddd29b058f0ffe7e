"""Gathered reads by real movers: the right bytes, refusals, and what a stopped or dead side means."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import numpy as np
import pytest

from kvxferd.errors import Code
from kvxferd.layout.areas import block_areas
from kvxferd.mover.process.gathered_reads import REPLY_TIMEOUT_S
from kvxferd.mover.read_ways import READ_VARIABLE
from kvxferd.mover.ucx_settings import tls_with_cuda
from kvxferd.wire.mover import AbortPull, GrantBlocks, PullDone, RevokeBlocks
from tests.support.mover_harness import (
    TRANSPORTS,
    Node,
    Served,
    Sink,
    Worker,
    packed,
    serve,
    sink,
    wait_until,
)

WORD = bytes(range(16))
TOKENS, HEAD = 16, 128  # of a block; bytes of a token's head
BLOCKS = 2048
Make = Callable[..., Worker]


class FanOut:
    """A source of TP 1, tokens first, and readers of TP 2, of one of its two heads each."""

    def __init__(self, source: Served, readers: list[Sink]) -> None:
        self.source = source
        self.readers = readers
        source.worker.fill(1)
        source.page.write(0, WORD)

    @classmethod
    async def make(cls, there: Node, here: Node, make_worker: Make, num_readers: int = 1) -> FanOut:
        source = await serve(there, make_worker("P", layout="NHD", blocks=BLOCKS))
        ranks = [make_worker("D", tp=2, tp_rank=r, layout="NHD", blocks=BLOCKS) for r in range(num_readers)]
        return cls(source, [await sink(here, rank, [source]) for rank in ranks])

    def grant(self, ids: list[int] | range) -> None:
        areas = block_areas(self.source.worker.layout)
        self.source.mover.send(GrantBlocks(word=WORD, areas=areas, blocks=packed(ids)))

    def start(self, ours: list[int] | range, theirs: list[int] | range, reader: int = 0) -> int:
        fence = self.source.place(0, WORD)
        return self.readers[reader].start([self.source], fence, ours, theirs)

    def check(self, ours: list[int] | range, theirs: list[int] | range, reader: int = 0) -> None:
        held = self.source.worker.array.reshape(-1, BLOCKS, TOKENS, 2, HEAD)
        mine = self.readers[reader].worker.array.reshape(-1, BLOCKS, TOKENS, HEAD)
        assert np.array_equal(mine[:, list(ours)], held[..., reader, :][:, list(theirs)])
        rest = np.ones(BLOCKS, dtype=bool)
        rest[list(ours)] = False
        assert not mine[:, rest].any()

    async def pull_both(self, ours: list[int], theirs: list[int]) -> list[int]:
        """Have both readers pull at once, check every byte, and return how many were packed for each."""
        for reader in self.readers:
            reader.worker.array[:] = 0
        numbers = [self.start(ours, theirs, reader) for reader in (0, 1)]
        packed_bytes = []
        for reader, number in enumerate(numbers):
            outcome = await self.readers[reader].outcome(number)
            assert outcome.delivered, outcome
            assert outcome.bytes == len(ours) * 4 * TOKENS * HEAD
            self.check(ours, theirs, reader)
            packed_bytes.append(outcome.gathered_bytes)
        return packed_bytes

    def close(self) -> None:
        self.source.close()


@pytest.fixture
def gathered(transport: str) -> dict[str, str]:
    return {**TRANSPORTS[transport], READ_VARIABLE: "gathered"}


async def test_two_readers_get_their_heads_packed(gathered: dict[str, str], make_worker: Make) -> None:
    async with Node("there", environment=gathered) as there, Node("here", 2, gathered) as here:
        pair = await FanOut.make(there, here, make_worker, 2)
        order = np.random.default_rng(3).permutation(BLOCKS)
        ours, theirs = order[:1000].tolist(), order[::-1][:1000].tolist()
        pair.grant(theirs)
        for reader in (0, 1):
            assert (await pair.readers[reader].outcome(pair.start(ours[:1], theirs[:1], reader))).delivered
        for _ in range(10):  # a source on a busy machine may reply too late, and is read otherwise
            packed_bytes = await pair.pull_both(ours, theirs)
            if all(packed_bytes):
                break
        assert all(packed_bytes)
        pair.close()


async def test_what_is_not_granted_is_read_directly(make_worker: Make) -> None:
    """At once: no reader finds out by waiting."""
    gathered = {READ_VARIABLE: "gathered"}
    async with Node("there", environment=gathered) as there, Node("here", environment=gathered) as here:
        pair = await FanOut.make(there, here, make_worker)
        pair.grant(range(100))
        took_s = []
        for _ in range(5):  # a busy machine may delay some, and a reply that is waited for delays all
            for ours, theirs in ((range(100), range(50, 150)), (range(200, 300), range(300, 400))):
                outcome = await pair.readers[0].outcome(pair.start(ours, theirs))
                assert (outcome.delivered, outcome.gathered_bytes) == (True, 0)
                took_s.append(outcome.wire_s)
        assert min(took_s) < REPLY_TIMEOUT_S, "no reply was waited for"
        pair.source.mover.send(RevokeBlocks(word=WORD))
        pair.close()


@pytest.mark.parametrize("there_way", ["direct", "covering"])
async def test_a_source_that_does_not_gather_is_never_asked(there_way: str, make_worker: Make) -> None:
    """As one of the last version, whose daemon names no rank that gathers."""
    async with (
        Node("there", environment={READ_VARIABLE: there_way}) as there,
        Node("here", environment={READ_VARIABLE: "gathered"}) as here,
    ):
        pair = await FanOut.make(there, here, make_worker)
        assert not pair.source.bound.gathers
        outcome = await pair.readers[0].outcome(pair.start(range(50), range(50)))
        assert (outcome.delivered, outcome.gathered_bytes) == (True, 0)
        pair.check(range(50), range(50))
        pair.close()


async def test_without_memory_for_chunks_every_byte_arrives_directly(make_worker: Make) -> None:
    gathered = {READ_VARIABLE: "gathered"}
    async with (
        Node("there", environment=gathered, chunk_memory=0) as there,
        Node("here", environment=gathered) as here,
    ):
        pair = await FanOut.make(there, here, make_worker)
        pair.grant(range(50))
        outcome = await pair.readers[0].outcome(pair.start(range(50), range(50)))
        assert (outcome.delivered, outcome.gathered_bytes) == (True, 0)
        pair.check(range(50), range(50))
        pair.close()


async def test_a_released_transfer_is_not_delivered(gathered: dict[str, str], make_worker: Make) -> None:
    """The word is found changed, though the mover still packs."""
    async with Node("there", environment=gathered) as there, Node("here", environment=gathered) as here:
        pair = await FanOut.make(there, here, make_worker)
        pair.grant(range(BLOCKS))
        pair.source.page.write(0, bytes(16))
        outcome = await pair.readers[0].outcome(pair.start(range(500), range(500)))
        assert (outcome.delivered, outcome.code, outcome.finished) == (False, Code.RELEASED, True)
        pair.close()


async def test_a_stopped_source_delays_a_pull_and_an_abort_ends_it(make_worker: Make) -> None:
    """Over TCP, where a stopped process sends nothing. What it sends later reaches no block."""
    gathered = {"UCX_TLS": tls_with_cuda("tcp"), READ_VARIABLE: "gathered"}
    async with Node("there", environment=gathered) as there, Node("here", environment=gathered) as here:
        pair = await FanOut.make(there, here, make_worker)
        pair.grant(range(BLOCKS))
        assert (await pair.readers[0].outcome(pair.start([0], [0]))).delivered
        os.kill(pair.source.mover.pid, signal.SIGSTOP)
        number = pair.start(range(1, 1000), range(1, 1000))
        with pytest.raises(TimeoutError):
            await here.heard(pair.readers[0].mover, PullDone, 0.2)
        pair.readers[0].mover.send(AbortPull(pull=number))
        outcome = await pair.readers[0].outcome(number, 2.0)
        assert (outcome.code, outcome.finished, outcome.started) == (Code.CANCELLED, True, False)
        os.kill(pair.source.mover.pid, signal.SIGCONT)
        again = await pair.readers[0].outcome(pair.start(range(1000, 2000), range(1000)))
        assert again.delivered
        mine = pair.readers[0].worker.array.reshape(-1, BLOCKS, TOKENS * HEAD)
        assert not mine[:, 1:1000].any()
        pair.close()


async def test_a_killed_source_fails_its_pulls(gathered: dict[str, str], make_worker: Make) -> None:
    async with Node("there", environment=gathered) as there, Node("here", environment=gathered) as here:
        pair = await FanOut.make(there, here, make_worker)
        pair.grant(range(BLOCKS))
        assert (await pair.readers[0].outcome(pair.start([0], [0]))).delivered
        pair.source.mover.kill()
        outcome = await pair.readers[0].outcome(pair.start(range(1000), range(1000)))
        assert (outcome.code, outcome.finished) == (Code.TRANSPORT, True)
        pair.close()


async def test_a_reader_that_dies_with_chunks_leaves_the_source_to_others(
    gathered: dict[str, str], make_worker: Make
) -> None:
    async with Node("there", environment=gathered) as there, Node("here", 2, gathered) as here:
        pair = await FanOut.make(there, here, make_worker, 2)
        pair.grant(range(BLOCKS))
        for reader in (0, 1):
            assert (await pair.readers[reader].outcome(pair.start([0], [0], reader))).delivered
        dying = pair.readers[0].mover
        os.kill(dying.pid, signal.SIGSTOP)
        pair.start(range(1000), range(1000))
        os.kill(dying.pid, signal.SIGCONT)
        dying.kill()
        await wait_until(lambda: dying.mover_id in here.exits, "the reader's end")
        for _ in range(3):
            outcome = await pair.readers[1].outcome(pair.start(range(1000), range(1000), 1))
            assert outcome.delivered
            pair.check(range(1000), range(1000), 1)
        pair.close()
