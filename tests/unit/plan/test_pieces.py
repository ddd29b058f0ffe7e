"""Pieces of a progressive pull: together they are the whole, each token once, and none too early."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.errors import EngineError
from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, Group, PackedBlocks, pack_ids, unpack_ids
from kvxferd.layout.presets import attention_layout
from kvxferd.layout.tensors import GroupKind
from kvxferd.plan import (
    PieceRules,
    check_open_blocks,
    check_request,
    covered_tokens,
    has_all_blocks,
    make_plan,
)
from kvxferd.plan.block_list_checks import GroupRule

NUM_BLOCKS = 4096
SIZES = st.sampled_from([1, 2, 3, 4, 8, 12, 16])
FULL = Group(name="full", num_blocks=NUM_BLOCKS, block_tokens=4)
WINDOW = Group(name="window", num_blocks=NUM_BLOCKS, block_tokens=4, sliding_window=8)
STATE = Group(name="state", num_blocks=NUM_BLOCKS, kind=GroupKind.STATE)
RULES = tuple(GroupRule(group, 1) for group in (FULL, WINDOW, STATE))


def layout_of(block_tokens: int, order: str) -> tuple[EngineSpec, Any]:
    spec = EngineSpec("e", "g", 2, num_kv_heads=2)
    facts = {"num_kv_heads": 2, "head_dim": 2, "num_blocks": NUM_BLOCKS, "block_tokens": block_tokens}
    return spec, attention_layout(spec=spec, layout=order, **facts)


def packed(num_ids: int, first: int = 0) -> PackedBlocks:
    return PackedBlocks(pack_ids(list(range(num_ids))), first)


@given(SIZES, SIZES, st.integers(1, 400), st.integers(0, 200), st.lists(st.integers(0, 400)))
def test_pieces_are_the_whole(
    local_size: int, remote_size: int, num_tokens: int, first: int, ready: list[int]
):
    """Whatever becomes ready when: each block is read once, in order, once the source has its tokens."""
    spec, local = layout_of(local_size, "HND")
    remote_spec, remote = layout_of(remote_size, "NHD")
    plan = make_plan(spec, local, remote_spec, {Rank(0, 0): remote})
    first = first // plan_step(plan) * plan_step(plan)
    first = first if first < num_tokens else 0
    rules = PieceRules(plan)
    mine = {"full": packed(-(-(num_tokens - first) // local_size), first)}
    theirs = {"full": packed(-(-num_tokens // remote_size))}
    read: list[int] = []
    begin = 0
    for tokens in sorted(ready):
        end = min(tokens, num_tokens) // rules.step_tokens * rules.step_tokens
        if end <= begin or end == num_tokens:
            continue
        piece = rules.slice(mine, begin, end)
        check_request(plan, piece, theirs, end)
        if piece["full"].ids:
            assert piece["full"].first_token == max(begin, first)
            assert piece["full"].first_token + len(piece["full"]) * local_size <= tokens
        read += unpack_ids(piece["full"].ids)
        begin = end
    last = rules.slice(mine, begin, None)
    check_request(plan, last, theirs, num_tokens)
    assert read + list(unpack_ids(last["full"].ids)) == list(unpack_ids(mine["full"].ids))


def plan_step(plan: Any) -> int:
    return PieceRules(plan).step_tokens


def test_windows_and_states_are_read_with_the_last_piece():
    layout = layout_of(4, "HND")[1]
    spec, _ = layout_of(4, "HND")
    plan = make_plan(spec, layout, spec, {Rank(0, 0): layout})
    rules = PieceRules(plan)
    assert (rules.step_tokens, rules.reads_all) == (4, True)
    lists = {"full": packed(5), "window": packed(2, 12), "state": PackedBlocks(pack_ids([7]), state_at=20)}
    piece = rules.slice(lists, 4, 12)
    assert list(unpack_ids(piece["full"].ids)) == [1, 2]
    assert not piece["window"].ids
    assert not piece["state"].ids
    last = rules.slice(lists, 12, None)
    assert (last["full"].first_token, last["window"], last["state"]) == (12, lists["window"], lists["state"])


def test_lists_grow_until_each_group_has_all():
    lists = {"full": packed(3)}
    check_open_blocks(RULES, lists, 20)
    assert not has_all_blocks(RULES, lists, 20)
    assert covered_tokens(RULES, lists, 20) == 12
    lists["full"] = packed(5)
    assert covered_tokens(RULES, lists, 20) == 20
    check_open_blocks(RULES, lists, 20)
    assert not has_all_blocks(RULES, lists, 20)
    lists["window"] = packed(2, 12)
    lists["state"] = PackedBlocks(pack_ids([7]), state_at=20)
    check_open_blocks(RULES, lists, 20)
    assert has_all_blocks(RULES, lists, 20)


def test_a_part_is_checked_by_itself_until_its_list_is_complete():
    grown = {"full": PackedBlocks(pack_ids([1, 1, 2]))}  # that 1 stands twice was found before, or will be
    check_open_blocks(RULES, grown, 20, {"full": PackedBlocks(pack_ids([2]))})
    assert not has_all_blocks(RULES, grown, 20)
    complete = {"full": PackedBlocks(pack_ids([1, 1, 2, 3, 4]))}
    with pytest.raises(EngineError, match="cannot use block 1 of group 'full' twice"):
        check_open_blocks(RULES, complete, 20, {"full": PackedBlocks(pack_ids([4]))})


@pytest.mark.parametrize("ids", [[2, 2], [NUM_BLOCKS], [-1]])
def test_a_part_that_does_not_fit_is_refused(ids: list[int]):
    part = PackedBlocks(pack_ids(ids))
    with pytest.raises(EngineError, match="cannot use block"):
        check_open_blocks(RULES, {"full": PackedBlocks(pack_ids([1, *ids]))}, 40, {"full": part})


def test_only_groups_with_full_attention_are_covered():
    assert covered_tokens(RULES[1:], {"window": packed(5)}, 20) == 0
    assert covered_tokens(RULES, {}, 20) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"full": packed(6)},
        {"full": PackedBlocks(pack_ids([1, 1]))},
        {"full": PackedBlocks(pack_ids([NUM_BLOCKS]))},
        {"full": PackedBlocks(b"123")},
        {"other": packed(1)},
        {"state": PackedBlocks(pack_ids([7]), state_at=19)},
    ],
)
def test_lists_that_do_not_fit_are_refused(wrong: dict[str, PackedBlocks]):
    with pytest.raises(EngineError):
        check_open_blocks(RULES, wrong, 20)
