"""Which kind of memory is under an address, and where runs end there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.ids import RegionId
from kvxferd.mover.reads.region_map import RegionMap, is_plain, split_at_boundaries, split_by_memory
from kvxferd.mover.transport.base import HOST, MemoryKind, ReadKinds
from kvxferd.plan import Runs
from kvxferd.wire.common import RegionAddress

VRAM = MemoryKind("VRAM", 3)
Triple = tuple[int, int, int]


def region(name: str, address: int, size: int, place: MemoryKind = HOST.local, pieces=()) -> RegionAddress:
    return RegionAddress(RegionId(name), address, size, place.device, place.mem_type, pieces, place.staged)


def runs(*triples: Triple) -> Runs:
    columns = zip(*triples, strict=True) if triples else ([], [], [])
    return Runs(*(np.array(column, dtype=np.uint64) for column in columns))


def triples_of(runs: Runs) -> list[Triple]:
    return list(zip(*(column.tolist() for column in runs), strict=True))


def listed(groups: list[tuple[ReadKinds, Runs]]) -> list[tuple[ReadKinds, list[Triple]]]:
    return [(kinds, triples_of(found)) for kinds, found in groups]


def test_host_memory_in_one_piece_costs_nothing() -> None:
    plain = [region("a", 0, 100), region("b", 200, 100)]
    assert is_plain(plain)
    assert not is_plain([*plain, region("c", 400, 100, VRAM)])
    assert not is_plain([region("a", 0, 100, pieces=((2, 50),))])
    assert not is_plain([region("a", 0, 100, MemoryKind(staged=True))])
    same = runs((0, 0, 10))
    ((kinds, found),) = split_by_memory(same, None, None)
    assert kinds == HOST
    assert found is same


def test_pieces_cut_runs_on_both_sides() -> None:
    local = RegionMap([region("a", 1000, 100, VRAM, ((1, 30), (2, 35)))])
    remote = RegionMap([region("b", 5000, 100, VRAM, ((4, 25),))])
    assert local.cuts.tolist() == [1030, 1065]
    assert remote.cuts.tolist() == [5025, 5050, 5075]
    assert listed(split_by_memory(runs((1000, 5000, 60)), local, remote)) == [
        (ReadKinds(VRAM, VRAM), [(1000, 5000, 25), (1025, 5025, 5), (1030, 5030, 20), (1050, 5050, 10)])
    ]


def test_runs_are_told_apart_by_the_memory_of_both_sides() -> None:
    """A rank may have its attention on a GPU and something else on the host."""
    local = RegionMap([region("gpu", 1000, 100, VRAM), region("host", 0, 100)])
    remote = RegionMap([region("host", 5000, 100), region("other", 6000, 100, MemoryKind("VRAM", 1))])
    found = listed(
        split_by_memory(runs((0, 5000, 9), (50, 6000, 9), (1000, 5050, 9), (1050, 6050, 9)), local, remote)
    )
    assert sorted(found) == sorted(
        [
            (ReadKinds(HOST.local, HOST.remote), [(0, 5000, 9)]),
            (ReadKinds(HOST.local, MemoryKind("VRAM", 1)), [(50, 6000, 9)]),
            (ReadKinds(VRAM, HOST.remote), [(1000, 5050, 9)]),
            (ReadKinds(VRAM, MemoryKind("VRAM", 1)), [(1050, 6050, 9)]),
        ]
    )


# --- runs cut at boundaries, against one byte at a time


def cuts_of(cuts: list[int]) -> np.ndarray:
    return np.array(sorted(set(cuts)), dtype=np.uint64)


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
    fast = split_at_boundaries(runs(*triples), cuts_of(local_cuts), cuts_of(remote_cuts))
    assert triples_of(fast) == slowly(triples, local_cuts, remote_cuts)
    assert {column.dtype for column in fast} == {np.dtype(np.uint64)}


def test_nothing_to_cut_is_the_same_object() -> None:
    same = runs((0, 50, 10), (20, 80, 10))
    assert split_at_boundaries(same, cuts_of([]), cuts_of([])) is same
    assert split_at_boundaries(same, cuts_of([10, 20, 30]), cuts_of([60])) is same
