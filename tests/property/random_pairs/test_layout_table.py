"""Every kind of cache that engines keep, between unlike deployments, both ways, through real movers."""

from __future__ import annotations

import pytest

from kvxferd.ids import Rank
from kvxferd.layout.presets.deploy import Ranks
from kvxferd.plan import block_rules, check_blocks
from tests.support.checked_pull import transfer
from tests.support.layout_table import DENSE, NUM_TOKENS, TABLE, engine, lists
from tests.support.mover_pair import Movers

pytestmark = pytest.mark.process


def read_all(movers: Movers, sink: Ranks, source: Ranks, first_token: int = 0) -> int:
    """Every rank of the sink reads the source; returns all bytes moved."""
    mine, theirs = lists(sink, 1, first_token), lists(source, 5)
    remote = {rank: held[1] for rank, held in source.items()}
    moved = 0
    for spec, layout in sink.values():
        own = {group.name: mine[group.name] for group in layout.groups}
        check_blocks(block_rules(layout), own, NUM_TOKENS)
        moved += transfer(
            movers,
            spec,
            layout,
            source[Rank(0, 0)][0],
            remote,
            mine=own,
            theirs=theirs,
            num_tokens=NUM_TOKENS,
        )
    return moved


@pytest.mark.parametrize("row", TABLE)
def test_a_row_works_both_ways(movers: Movers, row: str) -> None:
    model, one, other = TABLE[row]
    first, second = engine(model, **one), engine(model, **other)
    assert read_all(movers, first, second) > 0
    assert read_all(movers, second, first) > 0


def test_a_prefix_hit_moves_only_the_missing_tokens(movers: Movers) -> None:
    sink, source = engine(DENSE), engine(DENSE, tp=2)
    whole = read_all(movers, sink, source)
    blocks = -(-NUM_TOKENS // 4)
    assert read_all(movers, sink, source, first_token=20) == whole * (blocks - 5) // blocks
