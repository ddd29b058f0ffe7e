"""Describes how long the runs of a read are, and why they are not longer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvxferd.layout import GroupKind
from kvxferd.plan.plan import GroupRead, StridePattern
from kvxferd.tooling.output import format_bytes

Lengths = npt.NDArray[np.uint64]

MAX_LENGTHS = 4  # of runs in a sentence, the most frequent first


def describe_runs(group_reads: Sequence[GroupRead], run_lengths: Lengths) -> str:
    """Return a sentence on the runs of group reads, and on why they are no longer inside a block."""
    lengths, counts = np.unique(run_lengths, return_counts=True)
    usual = [
        length for _, length in sorted(zip(counts.tolist(), lengths.tolist(), strict=True), reverse=True)
    ]
    sentence = "runs of " + ", ".join(format_bytes(length) for length in usual[:MAX_LENGTHS])
    if len(usual) > MAX_LENGTHS:
        sentence += f", {len(usual) - MAX_LENGTHS} more lengths up to {format_bytes(int(lengths[-1]))}"
    is_state = group_reads[0].local.kind is GroupKind.STATE
    return sentence if is_state else sentence + _why_runs_are_short(group_reads)


def _why_runs_are_short(group_reads: Sequence[GroupRead]) -> str:
    """Return the reason for short runs inside a block: the order of axes, or chunks."""
    patterns = [(group_read, pattern) for group_read in group_reads for pattern in group_read.patterns]
    sides = [
        side
        for side, at in (("prefill", 1), ("decode", 0))
        if any(_has_gaps_between_tokens(group_read, pattern, at) for group_read, pattern in patterns)
    ]
    reasons = [
        f"tokens are dealt out {turn} at a time"
        for turn in sorted({_common_interleave(group_read) for group_read in group_reads})
        if turn and turn < min(group_reads[0].local.block_tokens, group_reads[0].remote.block_tokens)
    ]
    if any(_is_transposed(group_read, pattern) for group_read, pattern in patterns):
        reasons.append("heads and tokens lie in a different order on the two sides")
    elif sides:
        reasons.append(f"between two tokens of a head lie other bytes at {' and at '.join(sides)}")
    if any(_is_chunked(pattern) for _, pattern in patterns):
        reasons.append("a head's content lies in chunks")
    return f" ({', and '.join(reasons)})" if reasons else ""


def _items_per_block(group_read: GroupRead) -> int:
    """Return the items in sequence: those in one block on both sides and in one interleave of the shards."""
    stretch = min(group_read.local.block_tokens, group_read.remote.block_tokens)
    return min(stretch, _common_interleave(group_read) or stretch) // group_read.granule_tokens


def _common_interleave(group_read: GroupRead) -> int:
    """Return how many consecutive tokens both ranks hold; 0 if tokens are not sharded differently."""
    if group_read.local.shard == group_read.remote.shard:
        return 0
    return min(
        side.shard.interleave for side in (group_read.local, group_read.remote) if side.shard.count > 1
    )


def _is_transposed(group_read: GroupRead, pattern: StridePattern) -> bool:
    """Whether one side has tokens inside heads and the other heads inside tokens, both more than one."""
    if pattern.num_units < 2 or _items_per_block(group_read) < 2:
        return False
    return (pattern.local.unit < pattern.local.token) != (pattern.remote.unit < pattern.remote.token)


def _has_gaps_between_tokens(group_read: GroupRead, pattern: StridePattern, at: int) -> bool:
    """Whether there are gaps between the bytes of neighbouring tokens on the local (0) or remote (1) side."""
    side = (pattern.local, pattern.remote)[at]
    content = side.num_chunks * side.chunk_bytes
    read = content * pattern.num_units if side.unit == content or pattern.num_units == 1 else content
    return _items_per_block(group_read) > 1 and side.token > read


def _is_chunked(pattern: StridePattern) -> bool:
    return max(pattern.local.num_chunks, pattern.remote.num_chunks) > 1
