"""Which kind of memory is under an address, and where runs end there."""

from __future__ import annotations

import numpy as np

from kvxferd.ids import RegionId
from kvxferd.mover.terrain import Terrain, is_plain, spread
from kvxferd.mover.transport import HOST, Kinds, Place
from kvxferd.plan import Runs
from kvxferd.wire.common import RegionAddress

VRAM = Place("VRAM", 3)


def region(name: str, address: int, size: int, place: Place = HOST.local, pieces=()) -> RegionAddress:
    return RegionAddress(RegionId(name), address, size, place.device, place.mem_type, pieces, place.staged)


def runs(*triples: tuple[int, int, int]) -> Runs:
    return Runs(*(np.array(column, dtype=np.uint64) for column in zip(*triples, strict=True)))


def listed(groups: list[tuple[Kinds, Runs]]) -> list[tuple[Kinds, list[tuple[int, int, int]]]]:
    return [(kinds, list(zip(*(c.tolist() for c in found), strict=True))) for kinds, found in groups]


def test_host_memory_in_one_piece_costs_nothing() -> None:
    plain = [region("a", 0, 100), region("b", 200, 100)]
    assert is_plain(plain)
    assert not is_plain([*plain, region("c", 400, 100, VRAM)])
    assert not is_plain([region("a", 0, 100, pieces=((2, 50),))])
    assert not is_plain([region("a", 0, 100, Place(staged=True))])
    same = runs((0, 0, 10))
    ((kinds, found),) = spread(same, None, None)
    assert kinds is HOST
    assert found is same


def test_pieces_cut_runs_on_both_sides() -> None:
    local = Terrain([region("a", 1000, 100, VRAM, ((1, 30), (2, 35)))])
    remote = Terrain([region("b", 5000, 100, VRAM, ((4, 25),))])
    assert local.cuts.tolist() == [1030, 1065]
    assert remote.cuts.tolist() == [5025, 5050, 5075]
    assert listed(spread(runs((1000, 5000, 60)), local, remote)) == [
        (Kinds(VRAM, VRAM), [(1000, 5000, 25), (1025, 5025, 5), (1030, 5030, 20), (1050, 5050, 10)])
    ]


def test_runs_are_told_apart_by_the_memory_of_both_sides() -> None:
    """A rank may have its attention on a GPU and something else on the host."""
    local = Terrain([region("gpu", 1000, 100, VRAM), region("host", 0, 100)])
    remote = Terrain([region("host", 5000, 100), region("other", 6000, 100, Place("VRAM", 1))])
    found = listed(spread(runs((0, 5000, 9), (50, 6000, 9), (1000, 5050, 9), (1050, 6050, 9)), local, remote))
    assert sorted(found) == sorted(
        [
            (Kinds(HOST.local, HOST.remote), [(0, 5000, 9)]),
            (Kinds(HOST.local, Place("VRAM", 1)), [(50, 6000, 9)]),
            (Kinds(VRAM, HOST.remote), [(1000, 5050, 9)]),
            (Kinds(VRAM, Place("VRAM", 1)), [(1050, 6050, 9)]),
        ]
    )


def test_one_side_may_be_plain() -> None:
    remote = Terrain([region("a", 5000, 100, VRAM, ((2, 50),))])
    assert listed(spread(runs((0, 5040, 20)), None, remote)) == [
        (Kinds(HOST.local, VRAM), [(0, 5040, 10), (10, 5050, 10)])
    ]


def test_staged_memory_is_not_cut() -> None:
    staged = Place("VRAM", 0, staged=True)
    assert not len(Terrain([region("a", 5000, 100, staged, ((2, 50),))]).cuts)
