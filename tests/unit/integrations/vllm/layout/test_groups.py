"""vLLM's block lists as lists of a transfer. The lists in the tables are those that vLLM makes."""

from __future__ import annotations

import pytest

from kvxferd.errors import Code, EngineError
from kvxferd.integrations.vllm.layout.facts import CacheGroup, CacheKind
from kvxferd.integrations.vllm.layout.groups import CacheGroups

FULL = CacheGroup(0, CacheKind.FULL, 16)
SHARDED = CacheGroup(0, CacheKind.FULL, 16, shard_count=4)
SLIDING = CacheGroup(0, CacheKind.SLIDING, 16, kept_tokens=31)  # a window of 32
STATE = CacheGroup(0, CacheKind.STATE, 512)
BY_POSITION = CacheGroup(0, CacheKind.STATE, 16, state_by_position=True)


def seen(group: CacheGroup, ids: list[int], num_tokens: int, computed: int = 0) -> tuple[int, list[int], int]:
    """Return first token, ids and state of the only group's list."""
    groups = CacheGroups((group,), 1)
    (listed,) = groups.select_blocks([ids], num_tokens, computed).values()
    return listed.first_token, list(memoryview(listed.ids)), listed.state_at


@pytest.mark.parametrize(
    ("group", "ids", "num_tokens", "computed", "first_token", "listed"),
    [
        (FULL, [7, 8, 9], 48, 0, 0, [7, 8, 9]),
        (FULL, [7, 8, 9], 33, 0, 0, [7, 8, 9]),  # the last block partly filled
        (FULL, [7, 8, 9, 4], 48, 0, 0, [7, 8, 9]),  # a slot for the token that was generated
        (FULL, [7, 8, 9], 48, 32, 32, [9]),  # two blocks cached
        (FULL, [7, 8, 9], 40, 36, 32, [9]),  # a hit inside a block: the block is read whole
        (FULL, [7, 8, 9], 32, 31, 16, [8]),
        (SHARDED, [7, 8, 9], 150, 0, 0, [7, 8, 9]),  # an id stands for the tokens of all four shards
        (SHARDED, [7, 8, 9], 150, 130, 128, [9]),
        # A sliding window leaves out what nobody will look at
        (SLIDING, [7, 8], 20, 0, 0, [7, 8]),  # shorter than the window
        (SLIDING, [0, 0, 0, 0, 5, 6], 95, 0, 64, [5, 6]),  # tokens 64 on: the next one looks back at 31
        (SLIDING, [0, 0, 0, 4, 5, 6], 94, 0, 48, [4, 5, 6]),  # and here at 63 on
        (SLIDING, [1, 2, 3, 4, 5, 6], 95, 0, 64, [5, 6]),  # a sink with blocks for the whole sequence
        (SLIDING, [0, 0, 0, 0, 5, 6], 95, 80, 80, [6]),  # part of the window is cached
    ],
)
def test_attention(
    group: CacheGroup, ids: list[int], num_tokens: int, *, computed: int, first_token: int, listed: list[int]
) -> None:
    assert seen(group, ids, num_tokens, computed) == (first_token, listed, -1)


@pytest.mark.parametrize(
    ("group", "ids", "num_tokens", "block"),
    [
        (STATE, [3], 70, 3),
        (CacheGroup(0, CacheKind.STATE, 512, speculative_blocks=2), [3, 8, 9], 70, 3),  # scratch behind it
        (CacheGroup(0, CacheKind.STATE, 512, speculative_blocks=2), [3], 70, 3),  # not there yet
        (BY_POSITION, [0, 0, 5], 48, 5),
        (BY_POSITION, [0, 4, 5], 33, 5),  # the one before was the running state a step ago
        (BY_POSITION, [2], 1, 2),
        (CacheGroup(0, CacheKind.STATE, 16, None, 1, 2, True), [0, 0, 5, 8, 9], 48, 5),
    ],
)
def test_a_state_is_one_block(group: CacheGroup, ids: list[int], num_tokens: int, block: int) -> None:
    assert seen(group, ids, num_tokens) == (0, [block], num_tokens)


@pytest.mark.parametrize(
    ("group", "ids", "num_tokens", "why"),
    [
        (FULL, [7, 8], 33, "33 tokens at 16 a block take 3"),
        (FULL, [7, 0, 9], 48, "'0.full': there is none for token 16"),
        (SLIDING, [0, 0, 0, 0, 0, 6], 95, "'0.sliding': there is none for token 64"),
        (STATE, [], 70, "no block for it at token 70"),
        (BY_POSITION, [4, 0], 20, "no block for it at token 20"),
        (BY_POSITION, [4], 20, "no block for it at token 20"),
        (BY_POSITION, [4, 5], 16, "1 blocks follow the one of token 16, and 0 are scratch: it has moved on"),
        (STATE, [4, 5], 16, "it has moved on"),
    ],
)
def test_what_is_not_there_is_refused(group: CacheGroup, ids: list[int], num_tokens: int, why: str) -> None:
    with pytest.raises(EngineError) as caught:
        seen(group, ids, num_tokens)
    assert caught.value.code is Code.BLOCKS_INVALID
    assert why in caught.value.message


def test_each_of_several_groups_has_its_own_list() -> None:
    """By names of place and kind. Groups that take no part have lists in vLLM all the same."""
    groups = CacheGroups(
        (FULL, CacheGroup(2, CacheKind.SLIDING, 8, 7), CacheGroup(3, CacheKind.STATE, 512)), 4
    )
    clipped = groups.select_blocks([[5, 6], [99], [0, 2, 3], [4]], 20)
    assert list(clipped) == ["0.full", "2.sliding", "3.state"]
    assert clipped["0.full"].first_token == 0
    assert clipped["2.sliding"].first_token == 8
    assert clipped["3.state"].state_at == 20
    has_everything = groups.select_blocks([[5, 6], [99], [0, 2, 3], [4]], 20, 20)
    assert [len(memoryview(listed.ids)) for listed in has_everything.values()] == [0, 0, 0]
    with pytest.raises(EngineError, match="3 block lists: the engine has 4 groups"):
        groups.select_blocks([[5, 6], [0, 0, 3], [4]], 20)


@pytest.mark.parametrize(
    ("groups", "prompt", "pulled"),
    [
        (CacheGroups((FULL,), 1), 100, 100),
        (CacheGroups((FULL, STATE), 2), 100, 99),  # the state must stand before the last token
        (CacheGroups((FULL, STATE), 2), 1, 1),
        (CacheGroups((FULL, CacheGroup(1, CacheKind.SLIDING, 16, 39)), 2), 100, 99),
        (CacheGroups((FULL,), 1, lookahead_tokens=3), 100, 97),
        (CacheGroups((FULL, STATE), 2, lookahead_tokens=3), 100, 97),
        (CacheGroups((FULL,), 1, lookahead_tokens=3), 3, 3),
    ],
)
def test_how_much_of_a_prompt_is_prefilled_elsewhere(groups: CacheGroups, prompt: int, pulled: int) -> None:
    assert groups.prefill_tokens(prompt) == pulled
