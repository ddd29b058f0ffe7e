"""Which kind of memory is under an address, and where runs end there."""

from __future__ import annotations

import numpy as np

from kvxferd.ids import RegionId
from kvxferd.mover.process.region_map import RegionMap, is_plain, split_by_memory
from kvxferd.mover.transport.base import HOST, MemoryKind, ReadKinds
from kvxferd.plan import Runs
from kvxferd.wire.common import RegionAddress

VRAM = MemoryKind("VRAM", 3)


def region(name: str, address: int, size: int, place: MemoryKind = HOST.local, pieces=()) -> RegionAddress:
    return RegionAddress(RegionId(name), address, size, place.device, place.mem_type, pieces, place.staged)


def runs(*triples: tuple[int, int, int]) -> Runs:
    return Runs(*(np.array(column, dtype=np.uint64) for column in zip(*triples, strict=True)))


def listed(groups: list[tuple[ReadKinds, Runs]]) -> list[tuple[ReadKinds, list[tuple[int, int, int]]]]:
    return [(kinds, list(zip(*(c.tolist() for c in found), strict=True))) for kinds, found in groups]


def test_host_memory_in_one_piece_costs_nothing() -> None:
    plain = [region("a", 0, 100), region("b", 200, 100)]
    assert is_plain(plain)
    assert not is_plain([*plain, region("c", 400, 100, VRAM)])
    assert not is_plain([region("a", 0, 100, pieces=((2, 50),))])
    assert not is_plain([region("a", 0, 100, MemoryKind(staged=True))])
    same = runs((0, 0, 10))
    ((kinds, found),) = split_by_memory(same, None, None)
    assert kinds is HOST
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


def test_one_side_may_be_plain() -> None:
    remote = RegionMap([region("a", 5000, 100, VRAM, ((2, 50),))])
    assert listed(split_by_memory(runs((0, 5040, 20)), None, remote)) == [
        (ReadKinds(HOST.local, VRAM), [(0, 5040, 10), (10, 5050, 10)])
    ]


def test_staged_memory_is_not_cut() -> None:
    staged = MemoryKind("VRAM", 0, staged=True)
    assert not len(RegionMap([region("a", 5000, 100, staged, ((2, 50),))]).cuts)
