"""The token ranges that two block lists have in common, as items of their blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.layout import GroupKind, PackedBlocks, TokenShard
from kvxferd.plan.block_list_checks import ids_as_int32
from kvxferd.plan.plan import BlockGeometry, GroupRead
from kvxferd.plan.run_shapes import Int64s, distinct

_UNSHARDED = TokenShard()


class Segments(NamedTuple):
    """Maximal ranges of items that lie inside one kernel block on each side; five arrays of one length.

    `is_uniform`: the last three are known to hold one value each.
    """

    local_block: Int64s
    remote_block: Int64s
    local_item: Int64s  # the first item's index in its block
    remote_item: Int64s
    num_items: Int64s
    is_uniform: bool = False


class _KernelBlocks(NamedTuple):
    """One side's list as kernel blocks: block j holds the tokens from ``first + j * block_tokens`` on."""

    blocks: Int64s
    first: int
    block_tokens: int
    shard: TokenShard

    @property
    def end(self) -> int:
        """Return the token after the last one listed."""
        return self.first + len(self.blocks) * self.block_tokens * self.shard.count


def kernel_blocks(side: BlockGeometry, blocks: PackedBlocks) -> Int64s:
    """Return the kernel blocks of a list: each id stands for `blocks_per_id` consecutive ones."""
    ids = ids_as_int32(blocks).astype(np.int64)
    if side.blocks_per_id == 1:
        return ids
    inside = np.arange(side.blocks_per_id, dtype=np.int64)
    return (ids[:, None] * side.blocks_per_id + inside).ravel()


def common_segments(read: GroupRead, local: PackedBlocks, remote: PackedBlocks) -> Segments:
    """Return what a request's two block lists have in common in a group read, in token order.

    The lists have passed `check_request`. Blocks are taken whole as far as both lists reach.
    """
    if read.local.kind is GroupKind.STATE or not (local.ids and remote.ids):
        return _state_segment(local, remote)  # an empty list's first_token means nothing
    mine = _KernelBlocks(
        kernel_blocks(read.local, local), local.first_token, read.local.block_tokens, read.local.shard
    )
    theirs = _KernelBlocks(
        kernel_blocks(read.remote, remote), remote.first_token, read.remote.block_tokens, read.remote.shard
    )
    if mine.shard == theirs.shard:
        # Both hold the same tokens: count only those, and any interleaving is gone.
        mine, theirs = _without_interleaving(mine), _without_interleaving(theirs)
        if mine.block_tokens == theirs.block_tokens and (theirs.first - mine.first) % mine.block_tokens == 0:
            return _aligned_segments(mine, theirs, mine.block_tokens // read.granule_tokens)
    return _segments_between(_bounds(mine, theirs), mine, theirs, read.granule_tokens)


def _state_segment(local: PackedBlocks, remote: PackedBlocks) -> Segments:
    """Return the request's state as one segment: the last id listed. An empty list moves nothing."""
    size = 1 if local.ids and remote.ids else 0
    zero = np.zeros(size, dtype=np.int64)
    return Segments(
        ids_as_int32(local)[-1:].astype(np.int64)[:size],
        ids_as_int32(remote)[-1:].astype(np.int64)[:size],
        zero,
        zero,
        np.ones(size, dtype=np.int64),
    )


def _without_interleaving(listed: _KernelBlocks) -> _KernelBlocks:
    """Return a sharded list with its tokens numbered by the rank's own tokens alone."""
    return _KernelBlocks(listed.blocks, listed.first // listed.shard.count, listed.block_tokens, _UNSHARDED)


def _aligned_segments(mine: _KernelBlocks, theirs: _KernelBlocks, items: int) -> Segments:
    """Return segments of whole blocks, for lists with blocks of one size that begin at the same tokens."""
    skip = (theirs.first - mine.first) // mine.block_tokens
    start, stop = max(0, skip), min(len(mine.blocks), len(theirs.blocks) + skip)
    size = max(0, stop - start)
    zero = np.zeros(size, dtype=np.int64)
    return Segments(
        mine.blocks[start : start + size],
        theirs.blocks[start - skip : start - skip + size],
        zero,
        zero,
        zero + items,
        is_uniform=True,
    )


def _bounds(mine: _KernelBlocks, theirs: _KernelBlocks) -> Int64s:
    """Return the tokens where a block or an interleave begins on either side, and both ends.

    They are those within what both lists hold, ascending; fewer than two where that is nothing.
    """
    low, high = max(mine.first, theirs.first), min(mine.end, theirs.end)
    bounds = [np.array([low, high], dtype=np.int64)]
    for side in (mine, theirs):
        step = side.block_tokens * side.shard.count
        bounds.append(np.arange(low - (low - side.first) % step, high, step, dtype=np.int64))
        if side.shard.count > 1:
            step = side.shard.interleave
            bounds.append(np.arange(low // step * step, high, step, dtype=np.int64))
    found = distinct(np.concatenate(bounds))
    return found[found >= low]


def _segments_between(bounds: Int64s, mine: _KernelBlocks, theirs: _KernelBlocks, granule: int) -> Segments:
    """Return the ranges between neighbouring bounds that both sides hold."""
    begins, sizes = bounds[:-1], np.diff(bounds)
    held = _holds(mine.shard, begins) & _holds(theirs.shard, begins)
    begins, sizes = begins[held], sizes[held]
    sides = []
    for side in (mine, theirs):
        own = _held_positions(side, begins)
        sides.append((side.blocks[own // side.block_tokens], own % side.block_tokens // granule))
    (local_block, local_item), (remote_block, remote_item) = sides
    return Segments(local_block, remote_block, local_item, remote_item, sizes // granule)


def _holds(shard: TokenShard, tokens: Int64s) -> npt.NDArray[np.bool_]:
    held: npt.NDArray[np.bool_] = tokens // shard.interleave % shard.count == shard.index
    return held


def _held_positions(side: _KernelBlocks, tokens: Int64s) -> Int64s:
    """Return each token's position among those of the list that this side's rank holds."""
    shard = side.shard
    if shard.count == 1:
        return tokens - side.first
    period = shard.interleave * shard.count
    return (tokens - side.first) // period * shard.interleave + tokens % shard.interleave
