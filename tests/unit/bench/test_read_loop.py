"""How baselines move: never more than the window, each in its slot, times in order."""

from typing import Any

import pytest

from kvxferd.bench.cases import BlockPattern, Case
from kvxferd.bench.read_loop import PostedRead, run_reads
from kvxferd.bench.rounds import Round, order_in_round
from kvxferd.bench.samples import Sample
from kvxferd.bench.shapes import BenchDeployment

CASE = Case(
    deployment=BenchDeployment(name="d", shape="qwen3-8b", layers=1, pool_blocks=64),
    lists=BlockPattern.CONTIGUOUS,
    blocks=4,
    slots=3,
)


class Library:
    """Reads that are done when they have been asked `patience` times; 0: at once."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.posted: list[int] = []
        self.under_way: dict[int, int] = {}
        self.most = 0
        self.released = 0
        self.prepared: Case | None = None

    def prepare(self, case: Case) -> None:
        self.prepared = case

    def post(self, slot: int) -> PostedRead:
        number = len(self.posted)
        self.posted.append(slot)
        self.under_way[number] = self.patience
        self.most = max(self.most, len(self.under_way))
        return PostedRead(number, slot, number, number + 0.25, number + 0.5, self.patience == 0)

    def is_done(self, handle: Any) -> bool:
        self.under_way[handle] -= 1
        return self.under_way[handle] <= 0

    def release(self, handle: Any) -> None:
        del self.under_way[handle]
        self.released += 1

    def slot_size(self, slot: int) -> tuple[int, int]:
        return 100 + slot, 1


@pytest.mark.parametrize(("patience", "window"), [(0, 1), (1, 1), (5, 1), (5, 2), (5, 7), (3, 100)])
def test_all_are_moved_in_their_slots_and_the_window_is_kept(patience: int, window: int) -> None:
    library = Library(patience)
    samples = run_reads(library, CASE, 7, window)
    assert library.prepared == CASE
    assert library.posted == [0, 1, 2, 0, 1, 2, 0]
    assert library.released == 7
    assert library.most == min(window, 7)
    assert [sample.began for sample in samples] == list(range(7))
    assert [sample.bytes for sample in samples] == [100, 101, 102, 100, 101, 102, 100]


def sample(built: float, ended: float) -> Sample:
    return Sample(built - 1, built, built, ended, 1000, 1)


def test_one_at_a_time_counts_what_each_took_and_not_the_gaps() -> None:
    one = Round([sample(0, 1), sample(5, 7)], window=1)
    assert one.seconds == 3
    assert one.num_bytes == 2000


def test_several_at_a_time_count_from_first_to_last() -> None:
    assert Round([sample(0, 4), sample(1, 7)], window=2).seconds == 7


def test_nobody_goes_before_the_same_one_in_all_rounds() -> None:
    names: list[Any] = list("abcde")
    orders = [order_in_round(names, number) for number in range(10)]
    assert all(sorted(order) == names for order in orders)
    assert {order[0] for order in orders} == set(names)
    before = [(order[i], order[i + 1]) for order in orders for i in range(4)]
    for one in names:
        for other in names:
            assert before.count((one, other)) <= 4
