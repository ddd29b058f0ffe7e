"""The baselines: how they move, and what the in-engine connector's registers of each layout."""

from __future__ import annotations

from typing import Any

import pytest

from kvxferd.bench.baselines import PostedRead, SlotReader, block_ranges
from kvxferd.bench.cases import BlockPattern, Case, equal_engines
from kvxferd.ids import Rank
from kvxferd.layout.presets import deploy

HEAD, BLOCKS = 4 * 16, 8  # four tokens of 8 elements; the model has four layers of four heads
PAGE = 4 * 2 * HEAD  # of one layer


@pytest.mark.parametrize(
    ("layout", "want"),
    [
        ("HND", [(layer * BLOCKS * PAGE + half * BLOCKS * PAGE // 2, PAGE // 2, PAGE // 2)
                 for layer in range(4) for half in (0, 1)]),
        ("HND-blocks-first", [(layer * BLOCKS * PAGE + half * PAGE // 2, PAGE, PAGE // 2)
                              for layer in range(4) for half in (0, 1)]),
        ("LBNHC", [(layer * BLOCKS * PAGE, PAGE, PAGE) for layer in range(4)]),
        ("BLHNC", [(0, 4 * PAGE, 4 * PAGE)]),
        ("BHLNC", [(0, 4 * PAGE, 4 * PAGE)]),
    ],
)  # fmt: skip
def test_what_is_one_piece_of_a_block_is_one_descriptor(
    layout: str, want: list[tuple[int, int, int]]
) -> None:
    ranks = deploy("tiny-dense", num_blocks=BLOCKS, block_tokens=4, layout=layout)
    found = block_ranges(ranks[Rank(0, 0)][1])
    assert [(one.offset, one.block_stride, one.length) for one in found] == want
    assert {(one.group, one.num_blocks) for one in found} == {("full", BLOCKS)}


CASE = Case(equal_engines("d", "qwen3-8b", 1, 64), BlockPattern.CONTIGUOUS, blocks=4, slots=3)


class Reader(SlotReader):
    """Reads that are done when they have been polled `patience` times; 0: at once."""

    def __init__(self, patience: int) -> None:
        super().__init__(None)
        self.patience = patience
        self.posted: list[int] = []
        self.under_way: dict[int, int] = {}
        self.most = self.released = 0
        self.prepared: list[Case] = []

    def prepare(self, case: Case) -> list[tuple[int, int]]:
        self.prepared.append(case)
        return [(100 + slot, 1) for slot in range(case.slots)]

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

    def close(self) -> None: ...


@pytest.mark.parametrize(("patience", "window"), [(0, 1), (1, 1), (5, 1), (5, 2), (5, 7), (3, 100)])
def test_all_are_moved_in_their_slots_and_the_window_is_kept(patience: int, window: int) -> None:
    reader = Reader(patience)
    samples = reader.move(CASE, 7, window)
    assert reader.posted == [0, 1, 2, 0, 1, 2, 0]
    assert reader.released == 7
    assert reader.most == min(window, 7)
    assert [sample.began for sample in samples] == list(range(7))
    assert [sample.bytes for sample in samples] == [100, 101, 102, 100, 101, 102, 100]
    reader.move(CASE, 1, window)
    assert reader.prepared == [CASE]
