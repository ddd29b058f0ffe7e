"""The example request of 1,000 tokens, and the made-up block lists over which its runs are counted."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvxferd.ids import GroupName
from kvxferd.layout import GroupKind, PackedBlocks, pack_ids
from kvxferd.plan.plan import BlockGeometry

REQUEST_TOKENS = 1000  # tokens of the example request
# Runs are counted over whole blocks of both sides if those have at most MAX_SAMPLE_TOKENS tokens.
MAX_SAMPLE_TOKENS = 8192


def tokens_moved(window: int | None) -> int:
    """Return how many of the request's tokens a group moves: of a sliding window only its own."""
    return REQUEST_TOKENS if window is None else min(REQUEST_TOKENS, window)


def sample_tokens(sides: Iterable[BlockGeometry]) -> int:
    """Return the tokens after which the blocks of all sides begin together, or those of the largest block.

    Ids without neighbours merge nothing, so a sample of so many tokens is as good as a whole request.
    """
    spans = [side.id_tokens for side in sides if side.id_tokens]
    if not spans:
        return 1
    step = math.lcm(*spans)
    return step if step <= MAX_SAMPLE_TOKENS else max(spans)


def sample_lists(sides: Iterable[BlockGeometry], tokens: int, stride: int) -> dict[GroupName, PackedBlocks]:
    """Return block lists of ids `stride` apart; the ids need not exist, as nothing is moved."""
    return {side.group: _sample_block_ids(side, tokens, stride) for side in sides}


def _sample_block_ids(side: BlockGeometry, tokens: int, stride: int) -> PackedBlocks:
    if side.kind is GroupKind.STATE:
        return PackedBlocks(pack_ids([0]), state_at=tokens)
    return PackedBlocks(pack_ids([stride * i for i in range(-(-tokens // side.id_tokens))]))
