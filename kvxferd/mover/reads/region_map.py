"""The kind of memory under each address of one side's regions, and the addresses at which runs must end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvxferd.mover.transport.base import HOST, MemoryKind, ReadKinds
from kvxferd.plan import Runs
from kvxferd.plan.run_shapes import distinct
from kvxferd.wire.common import RegionAddress

Uint64s: TypeAlias = npt.NDArray[np.uint64]

_NO_BOUNDARIES = np.empty(0, dtype=np.uint64)


def is_plain(regions: Iterable[RegionAddress]) -> bool:
    """Whether every region is host memory in one part, so that runs need neither cuts nor kinds."""
    return all(r.mem_type == "DRAM" and not r.pieces and not r.staged and not r.device for r in regions)


class RegionMap:
    """Regions by address. Every address that is looked up lies in one of them."""

    def __init__(self, regions: Sequence[RegionAddress]) -> None:
        by_address = sorted(regions, key=lambda region: region.address)
        self._starts = np.array([region.address for region in by_address], dtype=np.uint64)
        kinds = [MemoryKind(region.mem_type, region.device, region.staged) for region in by_address]
        self.kinds = tuple(dict.fromkeys(kinds))
        self._kind_numbers = np.array([self.kinds.index(kind) for kind in kinds], dtype=np.int64)
        boundaries = [_boundaries_of(region) for region in by_address if region.pieces]
        self.cuts = np.concatenate(boundaries) if boundaries else _NO_BOUNDARIES

    def kind_numbers_of(self, addresses: Uint64s) -> npt.NDArray[np.int64]:
        """Return the position in `kinds` for each address."""
        return self._kind_numbers[np.searchsorted(self._starts, addresses, side="right") - 1]


def _boundaries_of(region: RegionAddress) -> Uint64s:
    """Return the addresses inside the region at which one registered part ends and the next begins."""
    sizes = np.concatenate([np.full(count, size, dtype=np.uint64) for count, size in region.pieces])
    return np.uint64(region.address) + np.cumsum(sizes)[:-1]


def split_by_memory(
    runs: Runs, local: RegionMap | None, remote: RegionMap | None
) -> list[tuple[ReadKinds, Runs]]:
    """Return the runs, cut at both sides' boundaries, by the kind of both sides' memory. None: plain."""
    runs = split_at_boundaries(
        runs,
        local.cuts if local is not None else _NO_BOUNDARIES,
        remote.cuts if remote is not None else _NO_BOUNDARIES,
    )
    here = local.kinds if local is not None else (HOST.local,)
    there = remote.kinds if remote is not None else (HOST.remote,)
    if len(here) == len(there) == 1:
        return [(ReadKinds(here[0], there[0]), runs)]
    codes = np.zeros(len(runs.length), dtype=np.int64)
    if local is not None:
        codes += local.kind_numbers_of(runs.local) * len(there)
    if remote is not None:
        codes += remote.kind_numbers_of(runs.remote)
    groups = []
    for code in distinct(codes).tolist():
        chosen = codes == code
        kinds = ReadKinds(here[code // len(there)], there[code % len(there)])
        groups.append((kinds, Runs(*(column[chosen] for column in runs))))
    return groups


def split_at_boundaries(runs: Runs, local_boundaries: Uint64s, remote_boundaries: Uint64s) -> Runs:
    """Return the same bytes in the same order, with no run across a cut on its side.

    Cuts are ascending addresses; a run may start or end at one.
    """
    runs = _split(runs, runs.local, local_boundaries)
    return _split(runs, runs.remote, remote_boundaries)


def _split(runs: Runs, starts: Uint64s, cuts: Uint64s) -> Runs:
    if not len(cuts):
        return runs
    first = np.searchsorted(cuts, starts, side="right")
    num_cuts = np.searchsorted(cuts, starts + runs.length, side="left") - first
    total = int(num_cuts.sum())
    if not total:
        return runs
    num_parts = num_cuts + 1
    parent = np.repeat(np.arange(len(starts)), num_parts)
    # Where in its run each part starts: 0, or at a cut. Parts of one run follow one another.
    part = np.arange(total + len(starts)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    at_cut = part > 0
    offset = np.zeros(len(parent), dtype=np.uint64)
    offset[at_cut] = cuts[first[parent[at_cut]] + part[at_cut] - 1] - starts[parent[at_cut]]
    end = np.empty_like(offset)
    end[:-1] = offset[1:]
    last = np.append(parent[1:] != parent[:-1], True)
    end[last] = runs.length
    return Runs(runs.local[parent] + offset, runs.remote[parent] + offset, end - offset)
