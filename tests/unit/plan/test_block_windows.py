"""Windows of block lists, and pages of them that a reader puts together, are read as the whole list is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.errors import Code, PeerError
from kvxferd.ids import Rank
from kvxferd.layout import BlocksByGroup, PackedBlocks, RankLayout, append_ids, pack_ids, unpack_ids
from kvxferd.plan import Expander, Plan, SourceLists, block_rules, check_request, list_rules, make_plan
from tests.support.attention_engines import layout_of, spec

NUM_BLOCKS = 4096
SIZES = st.sampled_from([1, 2, 3, 4, 8, 12, 16])
BASES = {"kv": 1 << 20}


def plan_between(local_size: int, remote_size: int) -> tuple[Plan, RankLayout]:
    """Return the plan of blocks of these tokens, and the remote layout."""
    own = spec(heads=2)
    local = layout_of(own, block_tokens=local_size, num_blocks=NUM_BLOCKS)
    remote = layout_of(own, block_tokens=remote_size, num_blocks=NUM_BLOCKS, layout="NHD")
    return make_plan(own, local, own, {Rank(0, 0): remote}), remote


def packed(first_id: int, last_id: int, first_token: int = 0) -> PackedBlocks:
    return PackedBlocks(pack_ids(list(range(first_id, last_id))), first_token)


def fetch(
    plan: Plan, remote: RankLayout, theirs: BlocksByGroup, mine: BlocksByGroup, most: int
) -> BlocksByGroup:
    """Ask for pages of so many ids until there are no more."""
    starts = {name: listed.first_token for name, listed in mine.items() if listed.ids}
    rules, lists, kept = list_rules(block_rules(remote))["full"], SourceLists(plan), {}
    while True:
        wanted = lists.missing(starts, kept)
        page = {name: rules.window(theirs[name], token, max_ids=most) for name, token in wanted.items()}
        for name, added in lists.added(kept, page).items():
            kept[name] = append_ids(kept[name], added.ids) if name in kept else added
        if not page or rules.geometry.end_of(page["full"]) == rules.geometry.end_of(theirs["full"]):
            return kept


def runs(plan: Plan, mine: BlocksByGroup, theirs: BlocksByGroup, num_tokens: int) -> list[list[int]]:
    found = Expander(plan).expand(mine, theirs, num_tokens, BASES, {Rank(0, 0): BASES})
    return [
        sorted(map(list, zip(r.local.tolist(), r.remote.tolist(), r.length.tolist(), strict=True)))
        for r in found.values()
    ]


@given(SIZES, SIZES, st.integers(1, 300), st.integers(0, 200), st.integers(8, 64))
def test_pages_are_the_list_from_where_the_pull_begins(
    local_size: int, remote_size: int, num_tokens: int, skipped: int, most: int
) -> None:
    plan, remote = plan_between(local_size, remote_size)
    first = min(skipped, num_tokens - 1) // local_size * local_size
    mine = {"full": packed(0, -(-(num_tokens - first) // local_size), first)}
    theirs = {"full": packed(100, 100 - (-num_tokens // remote_size))}
    kept = fetch(plan, remote, theirs, mine, most)
    windows = SourceLists(plan).windows(kept, mine, num_tokens)
    check_request(plan, mine, windows, num_tokens)
    assert len(kept["full"]) <= -(-(num_tokens - first) // remote_size) + 1
    assert runs(plan, mine, windows, num_tokens) == runs(plan, mine, theirs, num_tokens)


def test_a_piece_needs_a_window_of_the_list() -> None:
    plan, _ = plan_between(4, 2)
    windows = SourceLists(plan).windows({"full": packed(0, 1000)}, {"full": packed(7, 9, 40)}, 48)
    assert unpack_ids(windows["full"].ids).tolist() == [20, 21, 22, 23]
    assert windows["full"].first_token == 40


def test_of_a_list_that_the_pull_does_not_have_nothing_is_asked() -> None:
    plan, _ = plan_between(4, 4)
    assert SourceLists(plan).missing({}, {}) == {}
    assert SourceLists(plan).missing({}, {"full": packed(0, 3)}) == {}
    assert SourceLists(plan).missing(None, {}) == {"full": 0}
    assert SourceLists(plan).missing({"full": 8}, {"full": packed(0, 3, 8)}) == {"full": 20}


@pytest.mark.parametrize(
    "page",
    [
        packed(3, 5, 16),
        packed(3, 5, 10),
        PackedBlocks(b"\0" * 5, 12),
        packed(3, 5, -4),
        packed(3, 5, 1 << 63),
    ],
    ids=["behind a gap", "inside a block", "half an id", "before all", "behind all"],
)
def test_a_page_that_does_not_continue_is_refused(page: PackedBlocks) -> None:
    plan, _ = plan_between(4, 4)
    with pytest.raises(PeerError) as raised:
        SourceLists(plan).added({"full": packed(0, 3)}, {"full": page})
    assert raised.value.code is Code.BAD_FRAME


def test_ids_that_are_here_already_are_not_added_again() -> None:
    plan, _ = plan_between(4, 4)
    added = SourceLists(plan).added(
        {"full": packed(0, 3)}, {"full": packed(2, 5, 8), "unknown": packed(0, 9)}
    )
    assert added == {"full": packed(3, 5, 12)}
    assert SourceLists(plan).added({"full": packed(0, 3)}, {"full": packed(1, 2, 4)})["full"].ids == b""


def test_of_a_list_that_begins_behind_the_window_there_is_nothing() -> None:
    _, remote = plan_between(4, 4)
    rules = list_rules(block_rules(remote))["full"]
    assert rules.window(packed(0, 9, 40), 0, 8) == PackedBlocks(b"", 40)
