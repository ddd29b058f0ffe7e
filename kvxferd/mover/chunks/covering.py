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
from kvxferd.plan.run_shapes import Int64s

Bytes = npt.NDArray[np.uint8]

# One copy of the scatter: it stays in the cache, and a cancelled scatter ends after one of them. Pulls of
# 32 MiB in items of 256 bytes took 32 to 35 ms with 128 KiB, 26 with 256, 30 with 512: less waits for the
# interpreter's lock against more that leaves the cache (pieces of 4 MiB: 2 GB/s, and not 3.1).
PIECE_BYTES = 256 << 10
IMAGE_ALIGNMENT = 64  # a cache line: where the images of another form begin
# Of fewer items numpy keeps the interpreter's lock while it copies them, and the mover's thread, which would
# read meanwhile, waits for it: 5 ms each time.
MIN_ITEMS = 501


class PlacedStretches(NamedTuple):
    """Stretches whose images follow one another in a chunk, from an offset on."""

    stretches: Stretches
    offset: int


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
    """The stretches of one remote rank, handed out in order, a chunk or less at a time."""

    def __init__(self, stretches: Sequence[Stretches]) -> None:
        self._left = [one for one in stretches if len(one.remote)]
        self.num_runs = sum(one.form.num_copies * len(one.remote) for one in self._left)
        self.num_bytes = sum(one.num_bytes for one in self._left)
        self.covered_bytes = sum(one.covered_bytes for one in self._left)
        self._posts = [one.num_descriptors for one in self._left]
        self.num_descriptors = sum(self._posts)
        self._number = 0  # of the stretches that are handed out now
        self._next = 0  # of these
        for one in self._left:
            if one.local.min() < 0:
                raise ValueError("a stretch's origin lies before its region")

    @property
    def cost_bytes(self) -> int:
        """How long the reads take, as the number of bytes that take as long."""
        return self.covered_bytes + self.num_descriptors * DESCRIPTOR_COST_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether everything was handed out."""
        return self._number >= len(self._left)

    def next_fill(self, budget_bytes: int, chunk_bytes: int) -> ChunkFill:
        """Return what is read next into a chunk: at least one stretch, which the chunk holds."""
        offsets: list[Int64s] = []
        remotes: list[Int64s] = []
        lengths: list[Int64s] = []
        placed: list[PlacedStretches] = []
        used = num_descriptors = num_bytes = 0
        budget = float(budget_bytes)
        while not self.is_empty:
            one, size = self._left[self._number], self._left[self._number].form.size_bytes
            used += -used % IMAGE_ALIGNMENT
            cost = size + DESCRIPTOR_COST_BYTES * self._posts[self._number] / len(one.remote)
            room = max(0 if placed else 1, min((chunk_bytes - used) // size, int(budget / cost)))
            taken = one.slice(self._next, self._next + room)
            offset, remote, length = _descriptors(taken, used, MAX_DESCRIPTORS - num_descriptors)
            num_taken = int(length.sum()) // size
            if not num_taken:
                break
            taken = taken.slice(0, num_taken)
            offsets.append(offset)
            remotes.append(remote)
            lengths.append(length)
            placed.append(PlacedStretches(taken, used))
            used += num_taken * size
            budget -= num_taken * cost
            num_descriptors += len(offset)
            num_bytes += taken.num_bytes
            self._next += num_taken
            if self._next < len(one.remote):
                break
            self._number, self._next = self._number + 1, 0
        return ChunkFill(
            np.concatenate(offsets),
            np.concatenate(remotes),
            np.concatenate(lengths),
            tuple(placed),
            num_bytes,
        )

    def rest_as_runs(self, local_bases: Mapping[RegionId, int]) -> list[Runs]:
        """Hand out all that is left, as runs to be read directly."""
        runs = []
        while not self.is_empty:
            one = self._left[self._number]
            rest = one.slice(self._next, len(one.remote))
            runs.append(rest.runs(local_bases[one.local_region]))
            self._number, self._next = self._number + 1, 0
        return runs


def _descriptors(stretches: Stretches, offset: int, max_num: int) -> tuple[Int64s, Int64s, Int64s]:
    """Return offset in the chunk, address and length: one for stretches that follow one another."""
    remote, size = stretches.remote, stretches.form.size_bytes
    is_begin = np.ones(len(remote), dtype=bool)
    is_begin[1:] = remote[1:] != remote[:-1] + size
    (begins,) = is_begin.nonzero()
    stop = len(remote) if len(begins) <= max_num else int(begins[max_num])
    begins = begins[:max_num]
    length = np.diff(np.append(begins, stop)) * size
    return begins * size + offset, remote[begins], length


def scatter_pieces(
    fill: ChunkFill, chunk: Bytes, regions: Mapping[RegionId, Bytes]
) -> Iterator[Callable[[], None]]:
    """Yield the copies of a chunk into the blocks, each to be called once, in any thread and order."""
    for stretches, offset in fill.placed:
        size = stretches.form.size_bytes
        target = regions[stretches.local_region]
        rows = max(1, PIECE_BYTES // stretches.form.num_bytes)
        for start in range(0, len(stretches.remote), rows):
            few = stretches.slice(start, start + rows)
            begin = offset + start * size
            yield partial(_copy, few, chunk[begin : begin + len(few.remote) * size], target)


def _copy(stretches: Stretches, image: Bytes, target: Bytes) -> None:
    """Copy stretches whose images follow one another. Raises IndexError rather than leave the target."""
    form = stretches.form
    begins = np.arange(0, len(image), form.size_bytes)[:, None]
    for copies in form.copies:
        local = stretches.local if copies.block is None else stretches.local[:, copies.block]
        length, to = _cut(local + copies.local, copies.length)
        if form.is_packed:
            items = image.view(f"V{length}")
        else:
            items = _at_any_byte(image, length)[_cut(begins + copies.image, copies.length)[1]]
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
