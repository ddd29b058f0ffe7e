"""Cut runs where memory that is contiguous by address is registered with the transfer library in parts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvxferd.plan.expand import Runs

Uint64s = npt.NDArray[np.uint64]


def split_at_boundaries(runs: Runs, local_boundaries: Uint64s, remote_boundaries: Uint64s) -> Runs:
    """Return the same bytes in the same order, with no run across a cut on its side.

    Cuts are ascending addresses; a run may start or end at one.
    """
    runs = _split(runs, runs.local, local_boundaries)
    return _split(runs, runs.remote, remote_boundaries)


def _split(runs: Runs, starts: Uint64s, cuts: Uint64s) -> Runs:
    if not len(cuts) or not len(starts):
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
