"""Covering reads by real movers: the right bytes, and what a source that stops or dies means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.mover_harness import WORD, Node, Pools, Served, Sink, Worker, serve, sink

TOKENS_A_BLOCK = 16
Make = Callable[..., Worker]


class TwoToOne:
    """Two sources of TP 2, heads first, and a reader of TP 1, tokens first."""

    def __init__(self, sources: list[Served], reader: Sink) -> None:
        self.sources, self.reader = sources, reader
        for seed, source in enumerate(sources):
            source.worker.fill(seed)
            source.page.write(0, WORD)

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


async def two_to_one(there: Node, here: Node, make_worker: Make) -> TwoToOne:
    sources = [await serve(there, make_worker("P", tp=2, tp_rank=rank, blocks=2048)) for rank in (0, 1)]
    return TwoToOne(sources, await sink(here, make_worker("D", layout="NHD", blocks=2048), sources))


@pytest.fixture
def read_way() -> str:
    return "covering"


async def test_every_byte_arrives_through_chunks(pair: tuple[Node, Node], make_worker: Make) -> None:
    there, here = pair
    reading = await two_to_one(there, here, make_worker)
    order = np.random.default_rng(3).permutation(2048)
    ours, theirs = order[:1000].tolist(), order[::-1][:1000].tolist()
    assert (await reading.reader.outcome(reading.start(ours, theirs))).delivered  # and memory is granted
    outcome = await reading.reader.outcome(reading.start(ours, theirs))
    assert outcome.delivered, outcome
    assert outcome.covered_bytes == outcome.bytes == 1000 * 4 * 2 * TOKENS_A_BLOCK * 128
    reading.check(ours, theirs)
    reading.close()


async def test_auto_covers_what_is_scattered_and_not_what_is_long(pools: Pools, make_worker: Make) -> None:
    there, here = await pools.node("there"), await pools.node("here", "cma", "auto")
    reading = await two_to_one(there, here, make_worker)
    assert (await reading.reader.outcome(reading.start(range(500), range(500)))).delivered
    outcome = await reading.reader.outcome(reading.start(range(500), range(500)))
    assert outcome.covered_bytes == outcome.bytes
    assert outcome.predicted_s > 0
    whole = await serve(there, make_worker("Q", blocks=2048))
    whole.page.write(0, WORD)
    equal = await sink(here, make_worker("E", blocks=2048), [whole])
    outcome = await equal.outcome(equal.start([whole], whole.place(0, WORD), range(500), range(500)))
    assert (outcome.delivered, outcome.covered_bytes) == (True, 0)
    whole.close()
    reading.close()
