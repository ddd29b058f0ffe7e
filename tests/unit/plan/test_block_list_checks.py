"""What a request may list, and what the source must have published of it."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvxferd.errors import Code, EngineError, PlanError
from kvxferd.ids import GroupName, Rank
from kvxferd.layout import Group, GroupKind, PackedBlocks, RankLayout, TokenShard, pack_ids, unpack_ids
from kvxferd.layout.presets import deploy
from kvxferd.plan import PieceRules, block_list_checks, check_request, covered_tokens
from kvxferd.plan.block_list_checks import (
    GroupRule,
    block_rules,
    check_blocks,
    check_open_blocks,
    engine_rules,
    has_all_blocks,
    ids_as_int32,
)
from kvxferd.plan.plan import block_geometry
from tests.support.attention_engines import FULL, blocks, engine, layout_of, plan_between, spec

PLAIN = layout_of(spec())  # one group, blocks of 4 tokens, ids 0 to 15


def with_group(layout: RankLayout, **changes: object) -> RankLayout:
    """Return the layout with its one group changed."""
    return msgspec.structs.replace(layout, groups=(msgspec.structs.replace(layout.groups[0], **changes),))


@pytest.mark.parametrize(
    ("listed", "num_tokens", "words"),
    [
        ({}, 8, ["blocks of group 'full'"]),
        (blocks([0, 1]) | {GroupName("other"): PackedBlocks(b"")}, 8, ["group 'other'", "'full'"]),
        ({FULL: PackedBlocks(b"\0\0\0")}, 8, ["3 bytes"]),
        (blocks([0, 16]), 8, ["block 16", "0 to 15"]),
        (blocks([-1, 0]), 8, ["block -1", "0 to 15"]),
        (blocks([3, 5, 3]), 12, ["block 3", "twice"]),
        (blocks([0, 1], first_token=-4), 4, ["first_token -4"]),
        (blocks([0, 1]), 9, ["2 blocks", "[0, 9)", "take 3"]),  # too short
        (blocks([0, 1, 2]), 8, ["3 blocks", "take 2"]),  # too long
        (blocks([0], first_token=8), 8, ["take 0"]),  # begins where the request ends
        (blocks([0, 1]), 0, ["num_tokens 0"]),
        (blocks([0, 1], first_token=2**62), 2**62 + 8, [f"token {2**62 + 8}", f"{2**48}"]),
    ],
)
def test_unusable_lists_are_refused(
    listed: dict[GroupName, PackedBlocks], num_tokens: int, words: list[str]
) -> None:
    """Each names the group and the numbers."""
    with pytest.raises(EngineError) as caught:
        check_blocks(block_rules(PLAIN), listed, num_tokens)
    assert caught.value.code is Code.BLOCKS_INVALID
    assert [word for word in words if word not in caught.value.message] == []


def test_a_list_begins_where_an_item_and_a_turn_over_the_shards_do() -> None:
    """Scales of 4 tokens each. Over 3 shards a block of 4 tokens stands for 12."""
    tensors = tuple(msgspec.structs.replace(t, granule_tokens=4) for t in PLAIN.tensors)
    with pytest.raises(EngineError, match="no multiple of its granule, 4 tokens"):
        check_blocks(
            block_rules(msgspec.structs.replace(PLAIN, tensors=tensors)), blocks([0], first_token=6), 8
        )
    sharded = with_group(PLAIN, token_shard=TokenShard(3, 1, 2))
    check_blocks(block_rules(sharded), blocks([0, 1]), 13)
    with pytest.raises(EngineError, match="take 2"):
        check_blocks(block_rules(sharded), blocks([0]), 13)
    with pytest.raises(
        EngineError, match="first_token 8 is no multiple of its turn over the token shards, 6"
    ):
        check_blocks(block_rules(sharded), blocks([0], first_token=8), 13)


@pytest.mark.parametrize(
    ("mine", "theirs", "window", "refused"),
    [
        (blocks([0, 1, 2]), blocks([5, 6, 7]), None, None),
        (blocks([0, 1], first_token=4), blocks([5, 6, 7]), None, None),  # a prefix hit
        (blocks([0, 1, 2]), blocks([5, 6], first_token=4), None, r"\[0, 12\) are needed, and \[4, 12\)"),
        (blocks([0, 1, 2]), blocks([5, 6]), None, r"\[0, 12\) are needed, and \[0, 8\)"),
        (blocks([0, 1, 2]), blocks([]), None, "and none are published"),
        (blocks([0, 1, 2]), {}, None, "and none are published"),
        (blocks([]), blocks([]), None, None),  # nothing is needed
        (blocks([0, 1, 2]), blocks([6, 7], first_token=4), 8, None),  # the window's tail is enough
        (blocks([0, 1, 2]), blocks([7], first_token=8), 5, r"\[7, 12\) are needed, and \[8, 12\)"),
        (blocks([0, 1, 2]), blocks([7, 8], first_token=4), 100, r"\[0, 12\) are needed"),  # window unused
    ],
)
def test_required_tokens_must_be_published(
    mine: dict[GroupName, PackedBlocks],
    theirs: dict[GroupName, PackedBlocks],
    window: int | None,
    refused: str | None,
) -> None:
    """12 tokens; the window is the reader's own."""
    own, layout = engine()[Rank(0, 0)]
    sink = {Rank(0, 0): (own, with_group(layout, sliding_window=window))}
    plan = plan_between(sink, engine())
    if refused is None:
        check_request(plan, mine, theirs, 12)
        return
    with pytest.raises(PlanError, match=refused) as caught:
        check_request(plan, mine, theirs, 12)
    assert caught.value.code is Code.TOKENS_NOT_PUBLISHED
    assert "group 'full'" in caught.value.message


def test_the_sources_ids_are_checked_too() -> None:
    """The reader would otherwise read past the source's region."""
    plan = plan_between(engine(), engine())
    with pytest.raises(EngineError, match="block 16") as caught:
        check_request(plan, blocks([0]), blocks([16]), 4)
    assert caught.value.code is Code.BLOCKS_INVALID
    with pytest.raises(EngineError, match="first_token -4"):
        check_request(plan, blocks([0]), blocks([0, 1], first_token=-4), 4)


def test_a_long_list_is_scanned_once_for_all_ranks_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scan of the longest list takes milliseconds of the daemon's loop, a sort ten times that."""
    scans: list[int] = []

    def counted(listed: PackedBlocks) -> npt.NDArray[np.int32]:
        scans.append(len(listed))
        return ids_as_int32(listed)

    monkeypatch.setattr(block_list_checks, "ids_as_int32", counted)
    layout = engine()[Rank(0, 0)][1]
    rules = engine_rules(block_rules(with_group(layout, num_blocks=number)) for number in range(128, 192))
    assert len(rules) == 64
    long = blocks(range(100))
    check_blocks(rules, long, 400)
    assert len(scans) == 2  # for the extremes, and for what is listed twice
    with pytest.raises(EngineError, match="its ids are 0 to 127"):
        check_blocks(rules, blocks([*range(99), 130]), 400)
    del scans[:]
    check_open_blocks(rules, long, 400)
    assert has_all_blocks(rules, long, 400)
    check_open_blocks(rules, long, 400, blocks([]))  # nothing is added
    assert len(scans) == 2
    source = {
        rank: (held, layout_of(held, num_blocks=128 + rank.tp_rank))
        for rank, (held, _) in engine(tp=4).items()
    }
    plan = plan_between(engine(), source)
    del scans[:]
    check_request(plan, blocks([0]), long, 4)
    assert len(scans) == 1


def test_a_source_cannot_make_a_reader_count_without_end() -> None:
    """16 million ids are one frame's worth each; what they stand for must fit in memory too."""
    own, layout = engine()[Rank(0, 0)]
    huge = with_group(layout, block_tokens=1 << 20, physical_blocks_per_logical=1 << 18)
    plan = plan_between(engine(), {Rank(0, 0): (own, huge)})
    check_request(plan, blocks([0]), blocks(range(16)), 4)
    with pytest.raises(EngineError, match=f"{1 << 18} kernel blocks each"):
        check_request(plan, blocks([0]), blocks([0] * 65), 4)
    with pytest.raises(EngineError, match="end at token"):
        check_request(plan, blocks([0]), blocks([0], first_token=2**63), 4)


def test_a_state_stands_where_the_request_ends() -> None:
    """Only the last id counts: others may repeat. The token must be the request's, at the source too."""
    sizes = {"full": 16, "state.0": 4}
    both = deploy("tiny-gdn", num_blocks=sizes, block_tokens=4, shared_pages=False)
    plan, layout = plan_between(both, both), both[Rank(0, 0)][1]

    def lists(ids: list[int], state_at: int = 8) -> dict[GroupName, PackedBlocks]:
        return blocks([0, 1]) | {GroupName("state.0"): PackedBlocks(pack_ids(ids), state_at=state_at)}

    for own in (lists([0, 0, 3]), lists([])):
        check_blocks(block_rules(layout), own, 8)
        check_request(plan, own, own, 8)
    with pytest.raises(EngineError, match="stands at token 4, and the request has 8 tokens"):
        check_blocks(block_rules(layout), lists([3], 4), 8)
    with pytest.raises(EngineError, match=r"block 4 of group 'state\.0'"):
        check_blocks(block_rules(layout), lists([4]), 8)
    for theirs in (lists([3], 4), lists([])):
        with pytest.raises(PlanError, match="state at token 8 is needed") as caught:
            check_request(plan, lists([3]), theirs, 8)
        assert caught.value.code is Code.TOKENS_NOT_PUBLISHED


# --- pieces of a progressive pull: together they are the whole, each token once, and none too early


NUM_BLOCKS = 4096
FULL_GROUP = Group(name="full", num_blocks=NUM_BLOCKS, block_tokens=4)
WINDOW_GROUP = Group(name="window", num_blocks=NUM_BLOCKS, block_tokens=4, sliding_window=8)
STATE_GROUP = Group(name="state", num_blocks=NUM_BLOCKS, kind=GroupKind.STATE)
RULES = tuple(GroupRule(block_geometry(group), 1) for group in (FULL_GROUP, WINDOW_GROUP, STATE_GROUP))


def packed(num_ids: int, first: int = 0) -> PackedBlocks:
    return PackedBlocks(pack_ids(list(range(num_ids))), first)


def test_windows_and_states_are_read_with_the_last_piece() -> None:
    rules = PieceRules(plan_between(engine(), engine()))
    assert (rules.step_tokens, rules.reads_all) == (4, True)
    lists = {"full": packed(5), "window": packed(2, 12), "state": PackedBlocks(pack_ids([7]), state_at=20)}
    piece = rules.slice(lists, 4, 12)
    assert list(unpack_ids(piece["full"].ids)) == [1, 2]
    assert not piece["window"].ids
    assert not piece["state"].ids
    last = rules.slice(lists, 12, None)
    assert (last["full"].first_token, last["window"], last["state"]) == (12, lists["window"], lists["state"])


def test_lists_grow_until_each_group_has_all() -> None:
    lists = {"full": packed(3)}
    check_open_blocks(RULES, lists, 20)
    assert not has_all_blocks(RULES, lists, 20)
    assert covered_tokens(RULES, lists, 20) == 12
    lists["full"] = packed(5)
    assert covered_tokens(RULES, lists, 20) == 20
    check_open_blocks(RULES, lists, 20)
    assert not has_all_blocks(RULES, lists, 20)
    assert covered_tokens(RULES[1:], {"window": packed(5)}, 20) == 0, "a window is no part of the prompt"
    lists["window"] = packed(2, 12)
    lists["state"] = PackedBlocks(pack_ids([7]), state_at=20)
    check_open_blocks(RULES, lists, 20)
    assert has_all_blocks(RULES, lists, 20)


def test_a_part_is_checked_by_itself_until_its_list_is_complete() -> None:
    grown = {"full": PackedBlocks(pack_ids([1, 1, 2]))}  # that 1 stands twice was found before, or will be
    check_open_blocks(RULES, grown, 20, {"full": PackedBlocks(pack_ids([2]))})
    assert not has_all_blocks(RULES, grown, 20)
    complete = {"full": PackedBlocks(pack_ids([1, 1, 2, 3, 4]))}
    with pytest.raises(EngineError, match="cannot use block 1 of group 'full' twice"):
        check_open_blocks(RULES, complete, 20, {"full": PackedBlocks(pack_ids([4]))})


@pytest.mark.parametrize(
    ("listed", "part"),
    [
        ({"full": packed(6)}, None),
        ({"full": PackedBlocks(pack_ids([1, 1]))}, None),
        ({"full": PackedBlocks(pack_ids([NUM_BLOCKS]))}, None),
        ({"full": PackedBlocks(b"123")}, None),
        ({"other": packed(1)}, None),
        ({"state": PackedBlocks(pack_ids([7]), state_at=19)}, None),
        # of a list that has grown by these
        *(
            ({"full": PackedBlocks(pack_ids([1, *ids]))}, {"full": PackedBlocks(pack_ids(ids))})
            for ids in ([2, 2], [NUM_BLOCKS], [-1])
        ),
    ],
)
def test_lists_and_parts_that_do_not_fit_are_refused(
    listed: dict[str, PackedBlocks], part: dict[str, PackedBlocks] | None
) -> None:
    with pytest.raises(EngineError):
        check_open_blocks(RULES, listed, 20, part)
