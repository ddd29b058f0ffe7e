"""Small pulls behind a large one: one that is held up until the large one is over counts."""

import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from kvxferd import client
from kvxferd.bench.cases import BlockPattern, Case
from kvxferd.bench.rank_process import BenchRank
from kvxferd.bench.samples import Sample
from kvxferd.bench.shapes import BenchDeployment
from kvxferd.tooling.engine_process import EventWaiter

DEPLOYMENT = BenchDeployment(name="d", shape="qwen3-8b", layers=1, pool_blocks=64)
SMALL = Case(deployment=DEPLOYMENT, lists=BlockPattern.CONTIGUOUS, blocks=1)
LARGE = Case(deployment=DEPLOYMENT, lists=BlockPattern.CONTIGUOUS, blocks=32, first_block=4)


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

    def pull(self, ref: dict[str, Any], **_: Any) -> client.PullTicket:
        ticket = client.PullTicket(len(self.pulled), ref["name"], lambda number: None)
        self.pulled[ref["name"]] = ticket
        self.num_small += ref["name"] == "small"
        return ticket

    def poll(self) -> list[client.Event]:
        return [client.Delivered(self.pulled[self.order.popleft()], 1, 1, 0.0)]

    def close(self) -> None:
        os.close(self._readable)
        os.close(self._writable)


@pytest.fixture
def pulled(request: pytest.FixtureRequest) -> Iterator[tuple[Rank, list[Sample]]]:
    rank = Rank(request.param)
    process = object.__new__(BenchRank)  # without a daemon
    process.rank = rank  # type: ignore[assignment]
    process.layout = DEPLOYMENT.layout()
    process.events = EventWaiter(rank)  # type: ignore[arg-type]
    yield rank, process.pull_behind(LARGE, {"name": "large"}, SMALL, [{"name": "small"}] * 3)
    rank.close()


@pytest.mark.parametrize(
    ("pulled", "num_small"),
    [
        (["large", "small"], 1),  # starved: it is the only one there is
        (["small", "large", "small"], 2),
        (["small", "small", "small", "large"], 3),  # all of them, and the large one last
    ],
    indirect=["pulled"],
)
def test_all_that_began_behind_the_large_one_count(pulled: tuple[Rank, list[Sample]], num_small: int) -> None:
    rank, (large, *small) = pulled
    assert rank.num_small == len(small) == num_small
    assert all(large.began < one.began for one in small)
    assert not rank.order
