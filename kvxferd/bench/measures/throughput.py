"""Pulls of all sizes, shapes and lists, against every baseline."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvxferd.bench.cases import Case, blocks_for, ids_per_pull
from kvxferd.bench.implementations import implementations_of
from kvxferd.bench.points import Point, point_of
from kvxferd.bench.rounds import interleave
from kvxferd.bench.shapes import SHAPES, BenchDeployment, footprint, layers_for
from kvxferd.bench.testbed import Testbed
from kvxferd.bench.workload import MIB, ThroughputPoint, Workload

# A round is long enough to be timed and short enough for many.
_ROUND_BYTES = 128 * MIB
_MAX_PER_ROUND = 16
# Room for lists that are not contiguous, in addition to what one round moves.
_POOL_HEADROOM = 1.25


def measure_throughput(testbed: Testbed, transport: str, workload: Workload) -> Iterator[Point]:
    """Yield a point for each of the workload's pulls that fits its shape."""
    for (shape, size, layout), pulls in by_deployment(workload.points).items():
        deployment = deployment_of(f"{transport}-{shape}-{size}-{layout}", pulls)
        if deployment is None:
            continue
        blocks = blocks_for(deployment, size)
        with testbed.pair(deployment) as pair:
            for one in pulls:
                count = requests_per_round(one)
                case = Case(deployment=deployment, lists=one.lists, blocks=blocks, slots=count)
                found = interleave(
                    pair, case, implementations_of(pair), workload.rounds, count, one.in_flight
                )
                yield point_of("throughput", transport, size, case, found)


def requests_per_round(pulls: ThroughputPoint) -> int:
    """Return how many requests one implementation moves in one round."""
    return max(pulls.in_flight, min(_MAX_PER_ROUND, _ROUND_BYTES // pulls.size_bytes), 1)


def region_bytes(pulls: tuple[ThroughputPoint, ...]) -> int:
    """Return the memory of the largest rank that these pulls need, on one side."""
    groups = by_deployment(pulls).values()
    return max((d.region_bytes for group in groups if (d := deployment_of("size", group))), default=0)


def by_deployment(
    pulls: tuple[ThroughputPoint, ...],
) -> dict[tuple[str, int, str], list[ThroughputPoint]]:
    """Return the points that one pair of engines serves, by shape, size and layout."""
    groups: dict[tuple[str, int, str], list[ThroughputPoint]] = {}
    for one in pulls:
        groups.setdefault((one.shape, one.size_bytes, one.layout), []).append(one)
    return groups


def deployment_of(name: str, pulls: list[ThroughputPoint]) -> BenchDeployment | None:
    """Return engines for pulls of one shape, size and layout.

    None if its states alone are larger, or a hybrid cannot have the layout.
    """
    shape, size = pulls[0].shape, pulls[0].size_bytes
    layout = pulls[0].layout
    if SHAPES[shape].is_hybrid and layout != "HND":
        return None
    deployment = BenchDeployment(
        name=name, shape=shape, layers=layers_for(shape, size), pool_blocks=1, layout_name=layout
    )
    blocks = blocks_for(deployment, size)
    if blocks == 0 or footprint(deployment.layout()).state_bytes > size:
        return None
    most = max(requests_per_round(one) for one in pulls)
    pool = int(most * ids_per_pull(deployment, blocks) * _POOL_HEADROOM) + 4
    return msgspec.structs.replace(deployment, pool_blocks=pool)
