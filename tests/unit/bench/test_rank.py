"""Small pulls behind a large one: one that is held up until the large one is over counts."""

import os
from collections import deque
from contextlib import closing
from typing import Any

import pytest

from kvxferd import client
from kvxferd.bench.cases import BlockPattern, Case, equal_engines, layout_of
from kvxferd.bench.rank import Batch, BenchRank
from kvxferd.tooling.engine_process import EventWaiter

PAIR = equal_engines("d", "qwen3-8b", 1, 64)
SMALL = Batch(Case(PAIR, BlockPattern.CONTIGUOUS, 1), ["small"] * 3, [{"name": "small"}] * 3)
LARGE = Batch(Case(PAIR, BlockPattern.CONTIGUOUS, 32, first_block=4), ["large"], [{"name": "large"}])


class Rank:
    """Delivers pulls in the order given: "large", "small"."""

    def __init__(self, order: list[str]) -> None:
        self.order = deque(order)
        self.pulled: dict[str, client.PullTicket] = {}
        self.num_small = 0
        self._readable, self._writable = os.pipe()
        os.write(self._writable, b"1")  # always something to read

    def fileno(self) -> int:
        return self._readable

    def pull(self, ref: dict[str, Any], *_: Any, **__: Any) -> client.PullTicket:
        ticket = client.PullTicket(len(self.pulled), ref["name"], lambda number: None)
        self.pulled[ref["name"]] = ticket
        self.num_small += ref["name"] == "small"
        return ticket

    def poll(self) -> list[client.Event]:
        return [client.Delivered(self.pulled[self.order.popleft()], 1, 1, 0.0)]

    def close(self) -> None:
        os.close(self._readable)
        os.close(self._writable)


@pytest.mark.parametrize(
    ("order", "num_small"),
    [
        (["large", "small"], 1),  # starved: it is the only one there is
        (["small", "large", "small"], 2),
        (["small", "small", "small", "large"], 3),  # all of them, and the large one last
    ],
)
def test_all_that_began_behind_the_large_one_count(order: list[str], num_small: int) -> None:
    process = object.__new__(BenchRank)  # without a daemon
    with closing(Rank(order)) as rank:
        process.rank = rank  # type: ignore[assignment]
        process.layout = layout_of(PAIR)
        process.events = EventWaiter(rank)  # type: ignore[arg-type]
        large, *small = process.pull_behind(LARGE, SMALL)
    assert rank.num_small == len(small) == num_small
    assert all(large.began < one.began for one in small)
    assert not rank.order
