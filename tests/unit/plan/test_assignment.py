"""Which remote ranks a rank reads: the lowest holder from r*R//L on, else the lowest."""

from __future__ import annotations

import pytest

from kvxferd.ids import Rank
from kvxferd.layout import TokenShard, UnitRange
from kvxferd.plan.assignment import RankShare, assign_units, needed_shards, shared_fraction


def test_the_lowest_holder_where_none_is_high_enough() -> None:
    """Only rank 0 holds it, though the reader looks from rank 3 on."""
    holdings = (RankShare(Rank(0, 0), (UnitRange(0, 1),), TokenShard()),)
    fragments, gap = assign_units((UnitRange(0, 1),), TokenShard(), holdings, 3)
    assert gap is None
    assert fragments[0].rank == Rank(0, 0)


def test_what_one_rank_holds_is_one_fragment_though_another_holds_a_part_of_it() -> None:
    holdings = (
        RankShare(Rank(0, 0), (UnitRange(0, 3),), TokenShard()),
        RankShare(Rank(0, 1), (UnitRange(1, 2),), TokenShard()),
    )
    fragments, _ = assign_units((UnitRange(0, 3),), TokenShard(), holdings, 0)
    assert [(f.rank.tp_rank, f.first_unit, f.num_units) for f in fragments] == [(0, 0, 3)]


def test_fragments_join_only_where_both_sides_go_on() -> None:
    """Units 0, 5, 1 here; 0 and 1 lie side by side there, but not here."""
    ours = (UnitRange(0, 1), UnitRange(5, 6), UnitRange(1, 2))
    holdings = (
        RankShare(Rank(0, 0), (UnitRange(0, 2),), TokenShard()),
        RankShare(Rank(0, 1), (UnitRange(5, 6),), TokenShard()),
    )
    fragments, gap = assign_units(ours, TokenShard(), holdings, 0)
    assert gap is None
    assert [
        (f.rank.tp_rank, f.first_unit, f.num_units, f.local_index, f.remote_index) for f in fragments
    ] == [
        (0, 0, 1, 0, 0),
        (1, 5, 1, 1, 0),
        (0, 1, 1, 2, 1),
    ]


@pytest.mark.parametrize(
    ("local", "remote", "want", "fraction"),
    [
        (TokenShard(), TokenShard(), (0,), 1),
        (TokenShard(), TokenShard(4, 1, 16), (0, 1, 2, 3), 1 / 4),  # a whole reader needs all shards
        (TokenShard(4, 1, 16), TokenShard(4, 1, 16), (1,), 1 / 4),  # equal sharding
        (TokenShard(2, 0, 1), TokenShard(4, 2, 1), (0, 2), 1 / 4),
        (TokenShard(2, 0, 1), TokenShard(2, 0, 2), (0, 1), 1 / 4),  # tokens 0, 2 of 4
        (TokenShard(2, 1, 1), TokenShard(3, 0, 1), (0, 1, 2), 1 / 6),
    ],
)
def test_token_shards_in_common(
    local: TokenShard, remote: TokenShard, want: tuple[int, ...], fraction: float
) -> None:
    """Which shards of the source hold tokens of ours, and how many of all tokens that is."""
    assert needed_shards(local, remote) == want
    assert shared_fraction(local, remote) == pytest.approx(fraction)
