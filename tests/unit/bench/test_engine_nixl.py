"""What the baseline of an in-engine connector registers of each layout."""

from __future__ import annotations

import pytest

from kvxferd.bench.engine_nixl import BlockRange, block_ranges
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


def test_states_that_touch_stay_apart() -> None:
    (_, layout) = deploy("tiny-mamba2", num_blocks=BLOCKS)[Rank(0, 0)]
    found: list[BlockRange] = [one for one in block_ranges(layout) if one.group == "state.0"]
    tensors = sorted((t for t in layout.tensors if t.group == "state.0"), key=lambda t: t.offset)
    assert [one.length for one in found] == [t.num_units * t.content_bytes for t in tensors]
