"""Pieces of a progressive pull: together they are the whole, each token once, and none too early."""

from __future__ import annotations

import pytest

from kvxferd.errors import EngineError
from kvxferd.layout import Group, PackedBlocks, pack_ids, unpack_ids
from kvxferd.layout.tensors import GroupKind
from kvxferd.plan import PieceRules, check_open_blocks, covered_tokens, has_all_blocks
from kvxferd.plan.block_list_checks import GroupRule
from kvxferd.plan.plan import block_geometry
from tests.support.attention_engines import engine, plan_between

NUM_BLOCKS = 4096
FULL = Group(name="full", num_blocks=NUM_BLOCKS, block_tokens=4)
WINDOW = Group(name="window", num_blocks=NUM_BLOCKS, block_tokens=4, sliding_window=8)
STATE = Group(name="state", num_blocks=NUM_BLOCKS, kind=GroupKind.STATE)
RULES = tuple(GroupRule(block_geometry(group), 1) for group in (FULL, WINDOW, STATE))


def packed(num_ids: int, first: int = 0) -> PackedBlocks:
    return PackedBlocks(pack_ids(list(range(num_ids))), first)


def test_windows_and_states_are_read_with_the_last_piece():
    rules = PieceRules(plan_between(engine(), engine()))
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
