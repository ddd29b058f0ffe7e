"""The kind of memory under each address of one side's regions, and the addresses at which runs must end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvxferd.mover.transport.base import HOST, MemoryKind, ReadKinds
from kvxferd.plan import Runs
from kvxferd.plan.boundaries import split_at_boundaries
from kvxferd.plan.run_shapes import distinct
from kvxferd.wire.common import RegionAddress

Uint64s: TypeAlias = npt.NDArray[np.uint64]

_NO_BOUNDARIES = np.empty(0, dtype=np.uint64)


def is_plain(regions: Iterable[RegionAddress]) -> bool:
    """Whether all is host memory in one part a region, so that runs need neither cuts nor kinds."""
    return all(r.mem_type == "DRAM" and not r.pieces and not r.staged and not r.device for r in regions)


class RegionMap:
    """Regions by address. Every address that is looked up lies in one of them."""

    def __init__(self, regions: Sequence[RegionAddress]) -> None:
        by_address = sorted(regions, key=lambda region: region.address)
        self._starts = np.array([region.address for region in by_address], dtype=np.uint64)
        kinds = [MemoryKind(region.mem_type, region.device, region.staged) for region in by_address]
        self.places = tuple(dict.fromkeys(kinds))
        self._kind_numbers = np.array([self.places.index(place) for place in kinds], dtype=np.int64)
        # Staged memory is copied, and a copy crosses boundaries.
        boundaries = [_boundaries_of(region) for region in by_address if region.pieces and not region.staged]
        self.cuts = np.concatenate(boundaries) if boundaries else _NO_BOUNDARIES

    def kind_numbers_of(self, addresses: Uint64s) -> npt.NDArray[np.int64]:
        """Return the position in `places` for each address."""
        return self._kind_numbers[np.searchsorted(self._starts, addresses, side="right") - 1]


def _boundaries_of(region: RegionAddress) -> Uint64s:
    """Return the addresses inside the region at which one registered part ends and the next begins."""
    sizes = np.concatenate([np.full(count, size, dtype=np.uint64) for count, size in region.pieces])
    return np.uint64(region.address) + np.cumsum(sizes)[:-1]


def split_by_memory(
    runs: Runs, local: RegionMap | None, remote: RegionMap | None
) -> list[tuple[ReadKinds, Runs]]:
    """Return the runs, cut at both sides' boundaries, by the kind of both sides' memory. None: plain."""
    if local is None and remote is None:
        return [(HOST, runs)]
    runs = split_at_boundaries(
        runs,
        local.cuts if local is not None else _NO_BOUNDARIES,
        remote.cuts if remote is not None else _NO_BOUNDARIES,
    )
    here = local.places if local is not None else (HOST.local,)
    there = remote.places if remote is not None else (HOST.remote,)
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
