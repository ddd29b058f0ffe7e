"""Runs cut at boundaries, against one byte at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.mover.process.region_map import split_at_boundaries
from kvxferd.plan import Runs

Triple = tuple[int, int, int]


def runs_of(triples: list[Triple]) -> Runs:
    columns = zip(*triples, strict=True) if triples else ([], [], [])
    return Runs(*(np.array(list(column), dtype=np.uint64) for column in columns))


def cuts_of(cuts: list[int]) -> np.ndarray:
    return np.array(sorted(set(cuts)), dtype=np.uint64)


def listed(runs: Runs) -> list[Triple]:
    return list(zip(*(column.tolist() for column in runs), strict=True))


def slowly(triples: list[Triple], local_cuts: list[int], remote_cuts: list[int]) -> list[Triple]:
    """Walk every byte; begin a new run where either side does."""
    found: list[Triple] = []
    for local, remote, length in triples:
        for step in range(length):
            if step and local + step not in local_cuts and remote + step not in remote_cuts:
                start, there, size = found[-1]
                found[-1] = (start, there, size + 1)
            else:
                found.append((local + step, remote + step, 1))
    return found


TRIPLES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 40)), max_size=8)
CUTS = st.lists(st.integers(0, 110), max_size=12)


@given(TRIPLES, CUTS, CUTS)
def test_the_same_as_byte_by_byte(
    triples: list[Triple], local_cuts: list[int], remote_cuts: list[int]
) -> None:
    fast = split_at_boundaries(runs_of(triples), cuts_of(local_cuts), cuts_of(remote_cuts))
    assert listed(fast) == slowly(triples, local_cuts, remote_cuts)
    assert {column.dtype for column in fast} == {np.dtype(np.uint64)}


def test_high_addresses_keep_every_bit() -> None:
    base = (1 << 62) + 12345
    split = split_at_boundaries(runs_of([(base, 7, 100)]), cuts_of([base + 1, base + 99]), cuts_of([]))
    assert listed(split) == [(base, 7, 1), (base + 1, 8, 98), (base + 99, 106, 1)]


def test_nothing_to_cut_is_the_same_object() -> None:
    runs = runs_of([(0, 50, 10), (20, 80, 10)])
    assert split_at_boundaries(runs, cuts_of([]), cuts_of([])) is runs
    assert split_at_boundaries(runs, cuts_of([10, 20, 30]), cuts_of([60])) is runs
