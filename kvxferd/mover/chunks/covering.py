"""Hands out covering stretches a chunk at a time, and copies them from the chunk into the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.ids import RegionId
from kvxferd.mover.chunks.slices import DESCRIPTOR_COST_BYTES, MAX_DESCRIPTORS
from kvxferd.plan import Runs
from kvxferd.plan.covering import Stretches
from kvxferd.plan.run_shapes import Int64s, distinct

Bytes = npt.NDArray[np.uint8]

# One copy of the scatter: it stays in the cache, and a cancelled scatter ends after one of them. 64 MiB in
# items of 4 KiB took 86 ms with 128 KiB, 58 with 256, 45 with 512, 47 with 1 MiB: less waits for the
# interpreter's lock against more that leaves the cache.
PIECE_BYTES = 512 << 10
# Of fewer items numpy keeps the interpreter's lock while it copies them, and the mover's thread, which would
# read meanwhile, waits for it: 5 ms each time.
MIN_ITEMS = 501


class PlacedStretches(NamedTuple):
    """Stretches of one form, and where in a chunk the image of each begins."""

    stretches: Stretches
    offsets: Int64s


class ChunkFill(NamedTuple):
    """What is read into one chunk."""

    offset: Int64s  # in the chunk, one for each descriptor
    remote: Int64s
    length: Int64s
    placed: tuple[PlacedStretches, ...]
    num_bytes: int  # that go from the chunk into blocks

    def runs(self, chunk_address: int) -> Runs:
        """Return the reads to post."""
        columns = (self.offset + chunk_address, self.remote, self.length)
        return Runs(*(column.view(np.uint64) for column in columns))


class CoverSlicer:
    """The stretches of one remote rank, handed out in the order of its addresses, a chunk or less at a time.

    So stretches that follow one another are one descriptor, whatever their forms.
    """

    def __init__(self, stretches: Sequence[Stretches], region_starts: Sequence[int]) -> None:
        """`region_starts`: addresses that no read crosses, since regions are registered one by one."""
        self._all = [one for one in stretches if len(one.remote)]
        self.num_runs = sum(one.form.num_copies * len(one.remote) for one in self._all)
        self.num_bytes = sum(one.num_bytes for one in self._all)
        self.covered_bytes = sum(one.covered_bytes for one in self._all)
        if any(one.local.min() < 0 for one in self._all):
            raise ValueError("a stretch's origin lies before its region")
        counts = [len(one.remote) for one in self._all]
        remote = np.concatenate([one.remote for one in self._all]) if counts else np.empty(0, dtype=np.int64)
        order = np.argsort(remote, kind="stable")
        # Of each stretch: its address and size, and which of `_all` it is of.
        self._remote = remote[order]
        self._size = np.repeat([one.form.size_bytes for one in self._all], counts).astype(np.int64)[order]
        self._number = np.repeat(np.arange(len(counts)), counts)[order]
        self._row = order - (np.cumsum(counts) - counts).astype(np.int64)[self._number]
        is_begin = np.ones(len(order), dtype=bool)
        is_begin[1:] = self._remote[1:] != self._remote[:-1] + self._size[:-1]
        is_begin |= np.isin(self._remote, region_starts)
        self._is_begin = is_begin
        self.num_descriptors = int(np.count_nonzero(is_begin))
        self._next = 0

    @property
    def cost_bytes(self) -> int:
        """How long the reads take, as the number of bytes that take as long."""
        return self.covered_bytes + self.num_descriptors * DESCRIPTOR_COST_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether everything was handed out."""
        return self._next >= len(self._remote)

    def next_fill(self, budget_bytes: int, chunk_bytes: int) -> ChunkFill:
        """Return what is read next into a chunk: at least one stretch, which the chunk holds."""
        first = self._next
        # No stretch is so short that more of them fit.
        few = slice(first, first + max(1, chunk_bytes // int(self._size[first:].min())))
        size, is_begin = self._size[few], self._is_begin[few].copy()
        is_begin[0] = True
        ends, num_begun = np.cumsum(size), np.cumsum(is_begin)
        fits = (ends <= chunk_bytes) & (num_begun <= MAX_DESCRIPTORS)
        fits &= ends + num_begun * DESCRIPTOR_COST_BYTES <= budget_bytes
        stop = max(1, int(np.count_nonzero(fits)))
        self._next = first + stop
        offsets, number = (ends - size)[:stop], self._number[first : self._next]
        (begins,) = is_begin[:stop].nonzero()
        placed = []
        for one in distinct(number).tolist():
            (chosen,) = (number == one).nonzero()
            stretches = self._all[one].take(self._row[first + chosen])
            placed.append(PlacedStretches(stretches, offsets[chosen]))
        return ChunkFill(
            offsets[begins],
            self._remote[first + begins],
            np.add.reduceat(size[:stop], begins),
            tuple(placed),
            sum(one.stretches.num_bytes for one in placed),
        )

    def rest_as_runs(self, local_bases: Mapping[RegionId, int]) -> list[Runs]:
        """Return all that is left as runs to be read directly, instead of fills."""
        number, row = self._number[self._next :], self._row[self._next :]
        return [
            self._all[one].take(row[number == one]).runs(local_bases[self._all[one].local_region])
            for one in distinct(number).tolist()
        ]


def scatter_pieces(
    fill: ChunkFill, chunk: Bytes, regions: Mapping[RegionId, Bytes]
) -> Iterator[Callable[[], None]]:
    """Yield the copies of a chunk into the blocks, each to be called once, in any thread and order."""
    for stretches, offsets in fill.placed:
        target = regions[stretches.local_region]
        rows = max(1, PIECE_BYTES // stretches.form.num_bytes)
        for start in range(0, len(offsets), rows):
            few = slice(start, start + rows)
            yield partial(_copy, stretches.take(few), chunk, offsets[few], target)


def _copy(stretches: Stretches, chunk: Bytes, offsets: Int64s, target: Bytes) -> None:
    """Copy stretches from their images. Raises IndexError rather than leave the target."""
    form = stretches.form
    end = int(offsets[-1]) + form.size_bytes
    is_image = form.is_packed and end - int(offsets[0]) == len(offsets) * form.size_bytes  # of them all
    for copies in form.items:
        local = stretches.local if copies.block is None else stretches.local[:, copies.block]
        length, to = _cut(local + copies.local, copies.length)
        if is_image:
            items = chunk[offsets[0] : end].view(f"V{length}")
        else:
            items = _at_any_byte(chunk, length)[_cut(offsets[:, None] + copies.image, copies.length)[1]]
        _at_any_byte(target, length)[to] = items


def _cut(begins: Int64s, length: int) -> tuple[int, Int64s]:
    """Return the length and the beginnings of the same items, cut until they are enough, if they can be."""
    parts = 1
    while begins.size * parts < MIN_ITEMS and length % (2 * parts) == 0:
        parts *= 2
    length //= parts
    return length, (begins.reshape(-1, 1) + np.arange(parts) * length).ravel()


def _at_any_byte(memory: Bytes, length: int) -> npt.NDArray[np.void]:
    """Return a view whose item i is the `length` bytes from byte i on."""
    return np.ndarray((len(memory) - length + 1,), f"V{length}", memory, strides=(1,))
