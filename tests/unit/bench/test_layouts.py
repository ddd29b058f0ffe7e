"""Engines whose layouts differ: what is moved is the same on both sides."""

from __future__ import annotations

import pytest

from kvxferd.bench.cases import BLOCKS_PER_RUN, GIB, MIB, BlockPattern, Case, block_lists, footprint
from kvxferd.bench.measures.layouts import ALL_LAYOUTS, Layouts, pair_of, request_tokens
from kvxferd.tooling.engine_pair import ROLES

TOKEN_BYTES = 4 * 2 * 8 * 256  # four layers, K and V, eight heads of 128 in two bytes


@pytest.mark.parametrize("layouts", ALL_LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [4 * MIB, 64 * MIB, GIB])
def test_a_request_is_whole_blocks_of_about_its_size(layouts: Layouts, size: int) -> None:
    tokens = request_tokens(layouts, size)
    for side in layouts[:2]:
        assert tokens % (BLOCKS_PER_RUN * side.block_tokens) == 0
    assert abs(tokens * TOKEN_BYTES - size) <= size // 3  # 12 and 16 tokens have a step of 3 MiB


@pytest.mark.parametrize("layouts", ALL_LAYOUTS, ids=str)
def test_lists_lie_in_the_pool_of_their_side(layouts: Layouts) -> None:
    tokens = request_tokens(layouts, 4 * MIB)
    pair = pair_of("d", layouts, tokens)
    case = Case(pair, BlockPattern.FRAGMENTED, tokens // layouts.prefill.block_tokens)
    assert case.num_tokens == tokens
    for role in ROLES:
        (ids,) = block_lists(case, role, 0).values()
        assert len(ids) == len(set(ids.tolist())) == tokens // pair.shape(role).block_tokens
        assert ids.max() < pair.num_blocks(role)
        assert case.ends_of % footprint(pair, role).block_tokens == 0
