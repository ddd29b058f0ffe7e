"""In words: how long the runs are that a read falls into, and why no longer."""

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
    """What one strip moves of one component of one layer in one stretch of tokens."""

    unit_bytes: int
    num_units: int
    num_items: int
    heads: str  # the words for all units: "4 heads", "latent", "32 of ssm"
    head: str  # for one of them

    @property
    def total(self) -> int:
        return self.unit_bytes * self.num_units * self.num_items


def describe_runs(lanes: Sequence[GroupRead], scattered: Lengths, in_a_row: Lengths) -> str:
    """Return a sentence on the runs of lanes, given their lengths for ids apart and for ids in a row."""
    lengths, counts = np.unique(scattered, return_counts=True)
    contents = [_content(lane, strip) for lane in lanes for strip in lane.patterns]
    usual = sorted(zip(counts.tolist(), lengths.tolist(), strict=True), reverse=True)[:4]
    is_state = lanes[0].local.kind is GroupKind.STATE
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
    return sentence + _why_runs_are_short(lanes)


def _content(lane: GroupRead, strip: StridePattern) -> _PatternContent:
    unit_bytes = strip.local.num_chunks * strip.local.chunk_bytes
    names = sorted({piece.component for piece in strip.extents})
    of, count = "/".join(names), strip.num_units
    if set(names) <= {"k", "v", "kv"}:
        heads, head = f"{count} head{'s' * (count > 1)}", "1 head"
    else:
        heads, head = (f"{count} of {of}", f"1 of {of}") if count > 1 else (of, of)
    items = 1 if lane.local.kind is GroupKind.STATE else _items_per_block(lane)
    return _PatternContent(unit_bytes, count, items, heads, head)


def _describe_run(length: int, contents: Sequence[_PatternContent], is_state: bool) -> str:
    """Return what a run of this length holds, by the first reading that fits."""
    for c in contents:
        times = "" if is_state else f" x {c.num_items} token{'s' * (c.num_items > 1)}"
        readings = (
            (c.total, f"{c.heads}{times}"),
            (c.unit_bytes * c.num_items, f"{c.head}{times}"),
            (c.unit_bytes * c.num_units, f"{c.heads} x 1 token"),
            (c.unit_bytes, f"{c.head} x 1 token"),
        )
        for num_bytes, told in readings:
            if length == num_bytes:
                return told
    for c in contents:
        if c.total and length % c.total == 0:
            times = "" if is_state else f" x {c.num_items} tokens"
            return f"{length // c.total} x ({c.heads}{times}) that touch"
    if length < max(c.unit_bytes for c in contents):
        return "a row of a convolution's state" if is_state else "a part of what one token has"
    largest = max((c for c in contents if c.total <= length), key=lambda c: c.total, default=None)
    return "mixed content" if largest is None else f"{largest.heads} and what touches it"


def _why_runs_are_short(lanes: Sequence[GroupRead]) -> str:
    """Return what keeps runs short inside a block: the order of axes, or chunks."""
    strips = [(lane, strip) for lane in lanes for strip in lane.patterns]
    sides = [
        side
        for side, at in (("prefill", 1), ("decode", 0))
        if any(_has_gaps_between_tokens(lane, strip, at) for lane, strip in strips)
    ]
    reasons = [
        f"tokens are dealt out {turn} at a time"
        for turn in sorted({_common_interleave(lane) for lane in lanes})
        if turn and turn < min(lanes[0].local.block_tokens, lanes[0].remote.block_tokens)
    ]
    if any(_is_transposed(lane, strip) for lane, strip in strips):
        reasons.append("heads and tokens lie in a different order on the two sides")
    elif sides:
        reasons.append(f"between two tokens of a head lie other bytes at {' and at '.join(sides)}")
    if any(_is_chunked(strip) for _, strip in strips):
        reasons.append("a head's content lies in chunks")
    return f" ({', and '.join(reasons)})" if reasons else ""


def _items_per_block(lane: GroupRead) -> int:
    """Return the items of a stretch: what lies in one block on both sides, and in one turn of the shards."""
    stretch = min(lane.local.block_tokens, lane.remote.block_tokens)
    return min(stretch, _common_interleave(lane) or stretch) // lane.granule_tokens


def _common_interleave(lane: GroupRead) -> int:
    """Return how many tokens in a row both ranks hold; 0 where tokens are not shared out differently."""
    if lane.local.shard == lane.remote.shard:
        return 0
    return min(side.shard.interleave for side in (lane.local, lane.remote) if side.shard.count > 1)


def _is_transposed(lane: GroupRead, strip: StridePattern) -> bool:
    """Whether one side has tokens inside heads and the other heads inside tokens, both more than one."""
    if strip.num_units < 2 or _items_per_block(lane) < 2:
        return False
    return (strip.local.unit < strip.local.token) != (strip.remote.unit < strip.remote.token)


def _has_gaps_between_tokens(lane: GroupRead, strip: StridePattern, at: int) -> bool:
    """Whether on the local (0) or remote side (1) what is read of one token ends before the next begins."""
    side = (strip.local, strip.remote)[at]
    content = side.num_chunks * side.chunk_bytes
    read = content * strip.num_units if side.unit == content or strip.num_units == 1 else content
    return _items_per_block(lane) > 1 and side.token > read


def _is_chunked(strip: StridePattern) -> bool:
    return max(strip.local.num_chunks, strip.remote.num_chunks) > 1
