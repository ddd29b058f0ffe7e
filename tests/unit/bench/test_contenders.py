"""How contenders take turns and are checked: who is first, what counts, and that a wrong byte is found."""

from __future__ import annotations

from typing import Any

import pytest

from kvxferd.bench.cases import FIRST_RANK, BlockPattern, Case, equal_engines
from kvxferd.bench.contenders import Contender, Round, interleave, order_in_round
from kvxferd.bench.rank import BenchRank, Sample
from kvxferd.bench.testbed import RunningEngines
from kvxferd.errors import KvxferdError
from kvxferd.tooling import content
from kvxferd.tooling.engine_pair import ROLES

CASE = Case(equal_engines("d", "qwen3-8b", 1, 64), BlockPattern.SCATTERED, blocks=4, slots=2)


class Store:
    def __init__(self, size_bytes: int) -> None:
        self.bytes = content.background(size_bytes)

    def load(self) -> None: ...

    def save(self) -> None: ...


class Local:
    """A rank of no daemon, in this process; it is called as one in a process of its own."""

    def __init__(self, rank: BenchRank) -> None:
        self.rank = rank

    def start(self, method: Any, *args: Any) -> Local:
        self.returned = method(self.rank, *args)
        return self

    def result(self) -> Any:
        return self.returned


def engines_here() -> RunningEngines:
    engines = RunningEngines(None, CASE.pair)  # type: ignore[arg-type]
    for role in ROLES:
        rank = BenchRank()
        _, rank.layout = CASE.pair.engine(role)[FIRST_RANK]
        rank.store = Store(content.region_bytes(rank.layout))  # type: ignore[assignment]
        engines.ranks[role, FIRST_RANK] = Local(rank)  # type: ignore[assignment]
    return engines


class Copies(Contender):
    """Copies requests between the two ranks; `forget` leaves out one block of one slot in the n-th move."""

    def __init__(self, name: str, forget: int = 0) -> None:
        super().__init__(engines_here(), CASE, name)
        self.num_moves, self._forget = 0, forget

    def move(self, count: int, window: int) -> list[Sample]:
        self.num_moves += 1
        source, sink = (self.engines.ranks[role, FIRST_RANK].rank for role in ROLES)  # type: ignore[attr-defined]
        for number in range(count):
            slot = number % CASE.slots
            there, here = (CASE.request(role, slot).ids["full"] for role in ROLES)
            if self.num_moves == self._forget and slot == CASE.slots - 1:
                there, here = there[1:], here[1:]
            views = (content.block_views(rank.store.bytes, rank.layout) for rank in (source, sink))
            for theirs, mine in zip(*views, strict=True):
                mine[here] = theirs[there]
        return [Sample(0.0, 0.0, 0.5, 1.0, 100, 1)] * count


def test_every_move_of_every_contender_is_checked() -> None:
    one, other = Copies("a"), Copies("b")
    found = interleave([one, other], 3, 4)
    assert [round.num_bytes for rounds in found.values() for round in rounds] == [400] * 6
    assert (one.num_moves, other.num_moves) == (4, 4)  # the first onto all slots, every byte compared


@pytest.mark.parametrize("move", [1, 2, 3])
def test_a_block_that_is_not_moved_is_found_in_the_first_move_and_in_any_round(move: int) -> None:
    copies = Copies("a", forget=move)
    with pytest.raises(KvxferdError, match=r"cannot run the bench: \d+ wrong items in .*; moved by a"):
        interleave([copies], 3, 2)
    assert copies.num_moves == move


@pytest.mark.parametrize(
    ("window", "times", "seconds"),
    [(1, [(0, 1), (5, 7)], 3), (2, [(0, 4), (1, 7)], 7)],
    ids=["one at a time: without the gaps", "several: from first to last"],
)
def test_how_long_a_round_took(window: int, times: list[tuple[float, float]], seconds: float) -> None:
    samples = [Sample(built - 1, built, built, ended, 1000, 1) for built, ended in times]
    one = Round(samples, window=window, count=2)
    assert (one.seconds, one.num_bytes) == (seconds, 2000)


def test_nobody_goes_before_the_same_one_in_all_rounds() -> None:
    names: list[Any] = list("abcde")
    orders = [order_in_round(names, number) for number in range(10)]
    assert all(sorted(order) == names for order in orders)
    assert {order[0] for order in orders} == set(names)
    before = [(order[i], order[i + 1]) for order in orders for i in range(4)]
    for one in names:
        for other in names:
            assert before.count((one, other)) <= 4
