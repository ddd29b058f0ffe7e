"""Strided patterns: what a reader asks a source's mover to pack, and whether granted blocks hold it.

A stretch's runs repeat at a stride, token by token and head by head. So an ask names, for stretches of one
form, where each begins and two counts and strides, and not the runs: 8 bytes for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from kvxferd.ids import GroupName, RegionId
from kvxferd.layout import PackedBlocks
from kvxferd.layout.areas import BlockArea
from kvxferd.plan.covering import Stretches
from kvxferd.plan.expand import Runs
from kvxferd.plan.run_shapes import Int64s
from kvxferd.plan.stretches import Copies, StretchForm

# Of one form: a stretch of more is no repetition, and is read in another way.
MAX_PATTERNS_PER_FORM = 8
# Of one stretch: 256 KiB of 64 bytes each. One assignment of the packer has as many.
MAX_RUNS_PER_PATTERN = 4096
# No stretch is longer than 256 KiB, and no block than this. So no sum of an ask leaves 64 bits.
MAX_REACH = 1 << 40


class Pattern(NamedTuple):
    """Runs of one length: `outer` times `outer_stride` apart, `inner` times `inner_stride` apart."""

    length: int
    outer: int
    outer_stride: int
    inner: int
    inner_stride: int

    @property
    def num_runs(self) -> int:
        """The number of runs from each start on."""
        return self.outer * self.inner

    @property
    def size_bytes(self) -> int:
        """The size of the packed runs."""
        return self.length * self.num_runs

    @property
    def extent(self) -> tuple[int, int]:
        """The first byte and the end of the runs, from where they begin."""
        steps = ((self.outer - 1) * self.outer_stride, (self.inner - 1) * self.inner_stride)
        return sum(min(0, step) for step in steps), sum(max(0, step) for step in steps) + self.length

    def offsets(self) -> Int64s:
        """Return where each run begins, in the order in which they are packed."""
        outer = np.arange(self.outer, dtype=np.int64) * self.outer_stride
        inner = np.arange(self.inner, dtype=np.int64) * self.inner_stride
        return (outer[:, None] + inner).ravel()


def patterns_of(offsets: Int64s, length: int) -> list[tuple[int, Pattern]] | None:
    """Return (first offset, pattern) that yield these offsets in order; None where they are too many."""
    steps = np.diff(offsets)
    (changes,) = (steps[1:] != steps[:-1]).nonzero()
    ends = np.append(changes + 1, len(steps))  # indices of the last offset before each change of step
    lines: list[tuple[int, int, int]] = []  # first index, count, stride
    at = 0
    while at < len(offsets):
        if len(lines) > 64 * MAX_PATTERNS_PER_FORM:
            return None
        last = int(ends[np.searchsorted(ends, at + 1)]) if at + 1 < len(offsets) else at
        lines.append((at, last - at + 1, int(steps[at]) if last > at else 0))
        at = last + 1
    found: list[tuple[int, Pattern]] = []
    number = 0
    while number < len(lines):
        first, count, stride = lines[number]
        outer, outer_stride = 1, 0
        while number + outer < len(lines) and lines[number + outer][1:] == (count, stride):
            step = int(offsets[lines[number + outer][0]] - offsets[lines[number + outer - 1][0]])
            if outer > 1 and step != outer_stride:
                break
            outer, outer_stride = outer + 1, step
        found.append((int(offsets[first]), Pattern(length, outer, outer_stride, count, stride)))
        if len(found) > MAX_PATTERNS_PER_FORM:
            return None
        number += outer
    return found


class Gathered(NamedTuple):
    """Stretches that a source packs: each one's image is its runs, one behind the other."""

    pattern: Pattern
    stretches: Stretches

    def slice(self, start: int, stop: int) -> Gathered:
        """Return the stretches `start` to `stop`."""
        return self._replace(stretches=self.stretches.slice(start, stop))

    def runs(self, local_base: int) -> Runs:
        """Return the same bytes as runs to be read directly."""
        return self.covering().runs(local_base)

    def covering(self) -> Stretches:
        """Return the same copies from images that are read whole, as in the source."""
        low, high = self.pattern.extent
        (packed,) = self.stretches.form.copies
        image = self.pattern.offsets() - low
        order = np.argsort(image, kind="stable")
        block = None if packed.block is None else packed.block[order]
        copies = Copies(packed.length, image[order], packed.local[order], block)
        form = StretchForm(high - low, self.stretches.form.num_blocks, (copies,))
        return self.stretches._replace(form=form, remote=self.stretches.remote + low)


def gather_stretches(stretches: Stretches) -> list[Gathered] | None:
    """Return the same copies from packed images; None where the runs follow too many patterns."""
    form = stretches.form
    gathered: list[Gathered] = []
    for copies in form.copies:
        found = patterns_of(copies.image, copies.length)
        if found is None or any(one.num_runs > MAX_RUNS_PER_PATTERN for _, one in found):
            return None
        if len(gathered) + len(found) > MAX_PATTERNS_PER_FORM:
            return None
        start = 0
        for first, pattern in found:
            stop = start + pattern.num_runs
            packed = Copies(
                copies.length,
                np.arange(stop - start, dtype=np.int64) * copies.length,
                copies.local[start:stop],
                None if copies.block is None else copies.block[start:stop],
            )
            packed_form = StretchForm(pattern.size_bytes, form.num_blocks, (packed,))
            gathered.append(
                Gathered(pattern, stretches._replace(form=packed_form, remote=stretches.remote + first))
            )
            start = stop
    return gathered


# --- the source's side


class GrantedBlocks:
    """The bytes of one transfer's blocks in one rank's memory."""

    def __init__(self, areas: Iterable[BlockArea], blocks: Mapping[GroupName, PackedBlocks]) -> None:
        self.areas = tuple(area for area in areas if area.group in blocks)
        self._ids: dict[tuple[GroupName, int], Int64s] = {}
        for area in self.areas:
            key = (area.group, area.blocks_per_id)
            if key not in self._ids:
                ids = np.unique(np.frombuffer(blocks[area.group].ids, dtype="<i4")).astype(np.int64)
                parts = ids[:, None] * area.blocks_per_id + np.arange(area.blocks_per_id)
                self._ids[key] = parts.ravel()

    @property
    def num_bytes(self) -> int:
        """The size of the arrays."""
        return sum(ids.nbytes for ids in self._ids.values())

    def holds(self, region: RegionId, begins: Int64s, sizes: Int64s) -> bool:
        """Whether each range of so many bytes, from an offset in the region on, lies in one granted block."""
        order = np.argsort(begins)
        begins, sizes = begins[order], sizes[order]
        for area in self.areas:
            if not len(begins):
                return True
            if area.region != region or not len(ids := self._ids[area.group, area.blocks_per_id]):
                continue
            low = area.offset + int(ids[0]) * area.block_stride
            high = area.offset + int(ids[-1]) * area.block_stride + area.size_bytes
            first, last = np.searchsorted(begins, (low, high))
            if first == last:
                continue
            block, inside = np.divmod(begins[first:last] - area.offset, area.block_stride)
            at = np.minimum(np.searchsorted(ids, block), len(ids) - 1)
            is_missing = np.ones(len(begins), dtype=bool)
            is_missing[first:last] = (ids[at] != block) | (inside + sizes[first:last] > area.size_bytes)
            begins, sizes = begins[is_missing], sizes[is_missing]
        return not len(begins)
