"""One pull through real movers, and the check of every byte that it could have touched."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvxferd.ids import Rank, RegionId
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan import check_request, make_plan
from tests.support import brute_force
from tests.support.mover_pair import Lists, Movers, in_pool, offsets_of


def transfer(
    movers: Movers,
    spec: EngineSpec,
    own: RankLayout,
    source_spec: EngineSpec,
    source: Mapping[Rank, RankLayout],
    *,
    mine: Lists,
    theirs: Lists,
    num_tokens: int,
) -> int:
    """Pull one rank for real and check the whole memory; return the bytes moved. Raises PlanError."""
    layout = in_pool(own)
    check_request(make_plan(spec, layout, source_spec, source), mine, theirs, num_tokens)
    addresses = place(source)
    fill(movers.source.worker.array, source, addresses, theirs)
    size = sum(region.size_bytes for region in own.regions)
    view = movers.sink.array[: size + 4096]  # and what lies behind it
    view[:] = np.random.default_rng(7).integers(0, 256, len(view), dtype=np.uint8)
    before = view.copy()
    outcome = movers.pull(
        spec,
        layout,
        source_spec,
        source,
        mine=mine,
        theirs=theirs,
        num_tokens=num_tokens,
        addresses=addresses,
    )
    assert outcome.delivered, outcome
    moved = check(view, before, layout, mine, source, theirs)
    assert moved == outcome.bytes
    return moved


def place(ranks: Mapping[Rank, RankLayout]) -> dict[Rank, dict[RegionId, int]]:
    """Give every remote rank a place of its own in the source's pool."""
    found, offset = {}, 0
    for rank in sorted(ranks):
        found[rank] = offsets_of(ranks[rank], offset)
        offset += sum(region.size_bytes for region in ranks[rank].regions) + 64
    return found


def fill(
    array: np.ndarray,
    ranks: Mapping[Rank, RankLayout],
    addresses: Mapping[Rank, Mapping[RegionId, int]],
    theirs: Lists,
) -> None:
    """Noise everywhere, and each listed coordinate's own byte where it lies."""
    end = max(at + r.size_bytes for k in ranks for r in ranks[k].regions for at in [addresses[k][r.region]])
    array[:end] = np.random.default_rng(3).integers(0, 256, end, dtype=np.uint8)
    for rank, layout in ranks.items():
        for coordinate, (region, at) in brute_force.places(layout, theirs).items():
            array[addresses[rank][region] + at] = brute_force.value(coordinate)


def check(
    view: np.ndarray,
    before: np.ndarray,
    layout: RankLayout,
    mine: Lists,
    ranks: Mapping[Rank, RankLayout],
    theirs: Lists,
) -> int:
    """Every coordinate that both sides list holds its byte, no other byte has changed; returns how many."""
    held = set().union(*(brute_force.places(other, theirs) for other in ranks.values()))
    touched = np.zeros(len(view), dtype=bool)
    for coordinate, (_, at) in brute_force.places(layout, mine).items():
        if coordinate in held:
            touched[at] = True
            assert view[at] == brute_force.value(coordinate), coordinate
    assert (view[~touched] == before[~touched]).all()
    return int(touched.sum())
