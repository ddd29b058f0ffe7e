"""Describes how long the runs of a read are, and why they are not longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.layout import GroupKind
from kvxferd.plan.plan import GroupRead, StridePattern
from kvxferd.tooling.output import format_bytes

Lengths = npt.NDArray[np.uint64]


class _PatternContent(NamedTuple):
    """The bytes of one component of one layer that a pattern moves for a number of consecutive tokens."""

    unit_bytes: int
    num_units: int
    num_items: int
    heads: str  # the phrase for all units: "4 heads", "latent", "32 of ssm"
    head: str  # the phrase for one unit

    @property
    def total(self) -> int:
        return self.unit_bytes * self.num_units * self.num_items


def describe_runs(group_reads: Sequence[GroupRead], scattered: Lengths, in_a_row: Lengths) -> str:
    """Return a sentence on the runs of group reads, from their lengths for scattered and consecutive ids."""
    lengths, counts = np.unique(scattered, return_counts=True)
    contents = [
        _content(group_read, pattern) for group_read in group_reads for pattern in group_read.patterns
    ]
    usual = sorted(zip(counts.tolist(), lengths.tolist(), strict=True), reverse=True)[:4]
    is_state = group_reads[0].local.kind is GroupKind.STATE
    parts = [f"{format_bytes(length)} = {_describe_run(length, contents, is_state)}" for _, length in usual]
    if len(lengths) > len(usual):
        parts.append(f"{len(lengths) - len(usual)} more lengths up to {format_bytes(int(lengths[-1]))}")
    sentence = "runs of " + ", ".join(parts)
    if is_state:
        return sentence
    grown = in_a_row.mean() / scattered.mean()
    if grown > 1.01:
        sentence += f"; blocks in a row merge, up to {format_bytes(int(in_a_row.max()))}"
    else:
        sentence += "; blocks in a row do not merge"
    return sentence + _why_runs_are_short(group_reads)


def _content(group_read: GroupRead, pattern: StridePattern) -> _PatternContent:
    unit_bytes = pattern.local.num_chunks * pattern.local.chunk_bytes
    names = sorted({extent.component for extent in pattern.extents})
    of, count = "/".join(names), pattern.num_units
    if set(names) <= {"k", "v", "kv"}:
        heads, head = f"{count} head{'s' * (count > 1)}", "1 head"
    else:
        heads, head = (f"{count} of {of}", f"1 of {of}") if count > 1 else (of, of)
    items = 1 if group_read.local.kind is GroupKind.STATE else _items_per_block(group_read)
    return _PatternContent(unit_bytes, count, items, heads, head)


def _describe_run(length: int, contents: Sequence[_PatternContent], is_state: bool) -> str:
    """Return the content of a run of this length, by the first interpretation that fits."""
    for c in contents:
        times = "" if is_state else f" x {c.num_items} token{'s' * (c.num_items > 1)}"
        readings = (
            (c.total, f"{c.heads}{times}"),
            (c.unit_bytes * c.num_items, f"{c.head}{times}"),
            (c.unit_bytes * c.num_units, f"{c.heads} x 1 token"),
            (c.unit_bytes, f"{c.head} x 1 token"),
        )
        for num_bytes, sentence in readings:
            if length == num_bytes:
                return sentence
    for c in contents:
        if c.total and length % c.total == 0:
            times = "" if is_state else f" x {c.num_items} tokens"
            return f"{length // c.total} x ({c.heads}{times}) that touch"
    if length < max(c.unit_bytes for c in contents):
        return "a row of a convolution's state" if is_state else "a part of what one token has"
    largest = max((c for c in contents if c.total <= length), key=lambda c: c.total, default=None)
    return "mixed content" if largest is None else f"{largest.heads} and what touches it"


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
