"""The stretches of one remote block that cover a segment's runs, factored: few forms, many stretches.

A stretch is a range of the source that is read in one piece, into an image; copies from the image then put
each byte into its place. Block by block and layer by layer the same form repeats: 128 runs of a layer's
block are one form of 2 KiB, whatever the number of layers and blocks.

The rule of safety: a stretch never leaves one block of the transfer. It is at most a block stride long, and
begins and ends with bytes that were asked for. Blocks of one tensor are a stride apart, so such a stretch
has no byte of another block. Where the block axis lies inside another one, strides are short, and a stretch
is one item.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvxferd.plan.run_shapes import Int64s, OffsetRuns, distinct, equal_rows

# A gap of so many bytes takes as long as a descriptor (`kvxferd.mover.chunks.slices`).
MAX_GAP_BYTES = 16 << 10
# A stretch is read into one chunk, of which it is to take a small part.
MAX_STRETCH_BYTES = 256 << 10
MAX_LENGTHS = 64  # of the copies of a form: runs of more lengths are no repetition either
MIN_ITEM_BYTES = 256  # a shorter item takes as long to copy
MAX_FORMS = 64  # of one block: more are no repetition, and their runs are read directly
MAX_UNLIKE_STRETCHES = 4096  # of one block, that are cut or compared one by one
# Of one block. 80 layers of 8 heads and 32 tokens are 41,000; the arrays for so many are 30 MiB for a moment.
MAX_RUNS = 1 << 18


class Copies(NamedTuple):
    """Copies of one length from a stretch's image to its local blocks: arrays of one entry each."""

    length: int
    image: Int64s  # offset in the image, ascending
    local: Int64s  # offset from the stretch's origin in its local block
    block: Int64s | None  # which of the local blocks; None: there is one


class StretchForm:
    """What stretches of one form have in common."""

    def __init__(self, size_bytes: int, num_blocks: int, copies: tuple[Copies, ...]) -> None:
        """`num_blocks`: the local blocks that each stretch has bytes of, or less."""
        self.size_bytes = size_bytes
        self.num_blocks = num_blocks
        self.copies = copies
        self.num_copies = sum(len(one.image) for one in copies)
        self.num_bytes = sum(len(one.image) * one.length for one in copies)

    @cached_property
    def items(self) -> tuple[Copies, ...]:
        """The same bytes as copies of one length, where that is not short: a call for each length is slow."""
        length = math.gcd(*(one.length for one in self.copies))
        if len(self.copies) == 1 or length < MIN_ITEM_BYTES:
            return self.copies
        columns = []
        for one in self.copies:
            at = np.arange(0, one.length, length)
            block = np.zeros_like(one.image) if one.block is None else one.block
            columns.append(
                [*((start[:, None] + at).ravel() for start in (one.image, one.local)), block.repeat(len(at))]
            )
        image, local, block = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(image, kind="stable")
        return (Copies(length, image[order], local[order], block[order] if self.num_blocks > 1 else None),)

    @cached_property
    def is_packed(self) -> bool:
        """Whether the items are of one length and follow one another over the whole image."""
        if len(self.items) != 1 or self.num_bytes != self.size_bytes:
            return False
        one = self.items[0]
        return bool((one.image == np.arange(len(one.image)) * one.length).all())

    @property
    def table_bytes(self) -> int:
        """The size of the arrays."""
        return sum(
            one.image.nbytes + one.local.nbytes + (0 if one.block is None else one.block.nbytes)
            for one in self.copies
        )


class StretchClass(NamedTuple):
    """The stretches of one form in blocks 0: the i-th begins at `remote[i]`, its origins are `local[i]`."""

    form: StretchForm
    remote: Int64s  # (stretches,)
    local: Int64s  # (stretches, local blocks)

    @property
    def table_bytes(self) -> int:
        """The size of the arrays."""
        return self.form.table_bytes + self.remote.nbytes + self.local.nbytes


class _Runs(NamedTuple):
    """Runs in ascending order of the remote offset, of any of several local blocks."""

    local: Int64s
    remote: Int64s
    length: Int64s
    block: Int64s


def cover_block(
    runs_of_blocks: Sequence[OffsetRuns], remote_block_stride: int
) -> tuple[StretchClass, ...] | None:
    """Return the stretches that cover all runs of one remote block; None: they do not repeat.

    `runs_of_blocks` has one entry for each local block that reads from the remote block.
    """
    runs = _gather(runs_of_blocks, MAX_STRETCH_BYTES)
    if runs is None:
        return None
    begins = _stretch_begins(runs, min(remote_block_stride, MAX_STRETCH_BYTES))
    return None if begins is None else _classify(runs, begins, len(runs_of_blocks))


def _gather(runs_of_blocks: Sequence[OffsetRuns], max_bytes: int) -> _Runs | None:
    """Return all runs, cut into short lengths; None where there are too many runs, or lengths."""
    if sum(int((-(-runs[2] // max_bytes)).sum()) for runs in runs_of_blocks) > MAX_RUNS:
        return None
    local, remote, length = (np.concatenate(column) for column in zip(*runs_of_blocks, strict=True))
    counts = [len(runs[0]) for runs in runs_of_blocks]
    block = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    runs = _cut_long(_Runs(local, remote, length, block), max_bytes)
    if len(distinct(runs.length)) > MAX_LENGTHS:
        return None
    order = np.argsort(runs.remote, kind="stable")
    return _Runs(*(column[order] for column in runs))


def _cut_long(runs: _Runs, max_bytes: int) -> _Runs:
    """Return the same bytes, no run longer than `max_bytes`."""
    if runs.length.max() <= max_bytes:
        return runs
    num_parts = -(-runs.length // max_bytes)
    parent = np.repeat(np.arange(len(num_parts)), num_parts)
    part = np.arange(len(parent)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    offset = part * max_bytes
    return _Runs(
        runs.local[parent] + offset,
        runs.remote[parent] + offset,
        np.minimum(runs.length[parent] - offset, max_bytes),
        runs.block[parent],
    )


def _stretch_begins(runs: _Runs, max_bytes: int) -> Int64s | None:
    """Return the index of each stretch's first run; None where there are too many to be worth it."""
    reach = np.maximum.accumulate(runs.remote + runs.length)
    is_begin = np.ones(len(reach), dtype=bool)
    is_begin[1:] = runs.remote[1:] - reach[:-1] > min(MAX_GAP_BYTES, max_bytes)
    (begins,) = is_begin.nonzero()
    size = np.maximum.reduceat(runs.remote + runs.length, begins) - runs.remote[begins]
    (too_long,) = (size > max_bytes).nonzero()
    if not len(too_long):
        return begins
    if len(too_long) > MAX_UNLIKE_STRETCHES:
        return None
    ends = np.append(begins[1:], len(reach))
    cuts: list[int] = []
    for number in too_long.tolist():
        at, end = int(begins[number]), int(ends[number])
        while True:
            at = max(at + 1, int(np.searchsorted(reach, runs.remote[at] + max_bytes, side="right")))
            if at >= end:
                break
            cuts.append(at)
            if len(cuts) > MAX_UNLIKE_STRETCHES:
                return None
    return np.sort(np.concatenate([begins, np.array(cuts, dtype=np.int64)]))


def _classify(runs: _Runs, begins: Int64s, num_blocks: int) -> tuple[StretchClass, ...] | None:
    """Group stretches by form."""
    counts = np.diff(np.append(begins, len(runs.remote)))
    number = np.repeat(np.arange(len(begins)), counts)
    start = runs.remote[begins]
    size = np.maximum.reduceat(runs.remote + runs.length, begins) - start
    origins = np.empty((len(begins), num_blocks), dtype=np.int64)
    for block in range(num_blocks):
        # A stretch without bytes of that block has no origin in it: any number will do.
        nowhere = np.iinfo(np.int64).max
        origin = np.minimum.reduceat(np.where(runs.block == block, runs.local, nowhere), begins)
        origins[:, block] = np.where(origin == nowhere, 0, origin)
    relative = np.stack(
        [runs.remote - start[number], runs.local - origins[number, runs.block], runs.length, runs.block],
        axis=1,
    )
    classes: list[StretchClass] = []
    for count in distinct(counts).tolist():
        (alike,) = (counts == count).nonzero()
        rows = relative[begins[alike][:, None] + np.arange(count)].reshape(len(alike), -1)
        if len(rows) > MAX_UNLIKE_STRETCHES and not (rows == rows[0]).all():
            return None
        groups = equal_rows(rows)
        if len(classes) + len(groups) > MAX_FORMS:
            return None
        for members in groups:
            chosen = alike[members]
            first = int(begins[chosen[0]])
            form = _form(relative[first : first + count], int(size[chosen[0]]), num_blocks)
            classes.append(StretchClass(form, start[chosen], origins[chosen]))
    return tuple(classes)


def _form(relative: Int64s, size_bytes: int, num_blocks: int) -> StretchForm:
    remote, local, length, block = relative.T
    copies = []
    for one in distinct(length).tolist():
        chosen = length == one
        copies.append(
            Copies(
                one,
                remote[chosen].copy(),
                local[chosen].copy(),
                None if num_blocks == 1 else block[chosen].copy(),
            )
        )
    return StretchForm(size_bytes, num_blocks, tuple(copies))
