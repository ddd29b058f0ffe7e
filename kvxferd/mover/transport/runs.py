"""Cutting runs, as every read of a transport is made of them: by length, into chunks, and one alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvxferd.plan import Runs

Uint64s: TypeAlias = npt.NDArray[np.uint64]


def single_run(local: int, remote: int, size_bytes: int) -> Runs:
    """Return one run, from the remote address to the local one."""
    return Runs(*np.array([[local], [remote], [size_bytes]], dtype=np.uint64))


def split_long_runs(runs: Runs, max_bytes: int) -> Runs:
    """Return the same bytes in the same order, no run longer than `max_bytes`."""
    local, remote, length = (np.ascontiguousarray(column, dtype=np.uint64) for column in runs)
    piece = np.uint64(max_bytes)
    if not len(length) or length.max() <= piece:
        return Runs(local, remote, length)
    num_pieces = ((length + piece - np.uint64(1)) // piece).astype(np.int64)
    first = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    offset = (np.arange(int(num_pieces.sum()), dtype=np.int64) - first).astype(np.uint64) * piece
    whole = np.repeat(length, num_pieces)
    return Runs(
        np.repeat(local, num_pieces) + offset,
        np.repeat(remote, num_pieces) + offset,
        np.minimum(whole - offset, piece),
    )


def split_into_chunks(runs: Runs, slot_bytes: int, max_runs: int) -> Iterator[Runs]:
    """Yield the same bytes in the same order, each time as many runs as a slot holds."""
    runs = split_long_runs(runs, slot_bytes)
    ends = np.cumsum(runs.length)
    start, total = 0, len(ends)
    while start < total:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, np.uint64(before + slot_bytes), side="right"))
        stop = min(stop, start + max_runs)
        yield Runs(*(column[start:stop] for column in runs))
        start = stop


def packed_addresses(address: int, length: Uint64s) -> Uint64s:
    """Return where stretches of these lengths lie that follow one another from the address on."""
    return np.uint64(address) + np.cumsum(length) - length
