"""Pulls of all sizes, shapes and lists, against every baseline."""

from __future__ import annotations

from collections.abc import Iterator

from kvxferd.bench.cases import (
    MIB,
    Case,
    blocks_for,
    equal_engines,
    footprint,
    ids_per_pull,
    layers_for,
    with_pool,
)
from kvxferd.bench.contenders import ENGINE, KVXFERD, RAW, Rounds, contenders_of, interleave
from kvxferd.bench.figures import Figure, Finding, Point, at_least, median, point_of, stats_of
from kvxferd.bench.testbed import Site, Testbed
from kvxferd.bench.workload import ThroughputPulls, Workload
from kvxferd.tooling.engine_pair import EnginePair

# A round is long enough to be timed and short enough for many.
_ROUND_BYTES = 128 * MIB
_MAX_PER_ROUND = 16
# Room for lists that are not contiguous, in addition to what one round moves.
_POOL_HEADROOM = 1.25


def measure_throughput(site: Site, workload: Workload) -> Iterator[Finding]:
    """Yield a point for each of the workload's pulls that fits its shape, and their ratios."""
    alone = []
    with Testbed.open(site, has_baselines=True) as testbed:
        for (shape, size), pulls in by_engines(workload.throughput).items():
            pair = pair_of(f"{shape}-{size}", pulls)
            if pair is None:
                continue
            with testbed.engines(pair) as engines:
                for one in pulls:
                    count = requests_per_round(one)
                    case = Case(pair, one.pattern, blocks_for(pair, size), count)
                    found = interleave(contenders_of(engines, case), workload.rounds, count, one.in_flight)
                    point = kvxferd_point("throughput", site.transport, shape, size, case, found)
                    if one.in_flight == 1:
                        alone.append(point)
                    yield point
    yield from ratios(alone)


def kvxferd_point(
    measure: str, transport: str, shape: str, size_bytes: int, case: Case, found: Rounds
) -> Point:
    """Return the point of a case between equal engines, moved by kvxferd and the baselines."""
    words = {
        "shape": shape,
        "layout": case.pair.prefill.layout,
        "blocks": case.pattern.value,
        "in flight": str(found[KVXFERD][0].window),
    }
    ours, engine = (stats_of(found[name]) for name in (KVXFERD, ENGINE))
    facts = {
        "runs": ours.runs,
        "inside_pull_s": ours.engine_thread_median_s,
        "posting_in_the_engine_s": engine.engine_thread_median_s,
    }
    return point_of(measure, transport, words, size_bytes, found, facts)


def ratios(alone: list[Point]) -> Iterator[Figure]:
    """Yield the ratios to raw NIXL of points with one pull at a time, by size."""
    for size, what, aim, chosen in (
        ("64m", "64 MiB and more", 0.95, [point for point in alone if point.size_bytes >= 64 * MIB]),
        ("4m", "4 MiB", 0.85, [point for point in alone if point.size_bytes == 4 * MIB]),
    ):
        if not chosen:
            continue
        values = [point.ratios[RAW] for point in chosen]
        lowest = min(chosen, key=lambda point: point.ratios[RAW])
        rounds = min(point.rounds for point in chosen)
        how = (
            f"{len(chosen)} points over {chosen[0].transport}, one pull at a time, prepared; for each the "
            f"median of {rounds} rounds, interleaved with {', '.join(chosen[0].ratios)}; raw NIXL "
            "timed from post to done"
        )
        name, title = f"throughput_ratio_{size}", f"throughput against raw NIXL, {what}: median point"
        yield at_least(name, title, median(values), aim, how)
        title = f"the same, lowest point ({lowest.case['shape']}, {lowest.case['blocks']})"
        yield at_least(f"{name}_lowest", title, min(values), aim, how)


def requests_per_round(pulls: ThroughputPulls) -> int:
    """Return how many requests one contender moves in one round."""
    return max(pulls.in_flight, min(_MAX_PER_ROUND, _ROUND_BYTES // pulls.size_bytes), 1)


def by_engines(pulls: tuple[ThroughputPulls, ...]) -> dict[tuple[str, int], list[ThroughputPulls]]:
    """Return the points that one pair of engines serves, by shape and size."""
    groups: dict[tuple[str, int], list[ThroughputPulls]] = {}
    for one in pulls:
        groups.setdefault((one.shape, one.size_bytes), []).append(one)
    return groups


def pair_of(name: str, pulls: list[ThroughputPulls]) -> EnginePair | None:
    """Return engines for pulls of one shape and size; None if its states alone are larger."""
    shape, size = pulls[0].shape, pulls[0].size_bytes
    sized = equal_engines("sized", shape, layers_for(shape, size))
    blocks = blocks_for(sized, size)
    if blocks == 0 or footprint(sized).state_bytes > size:
        return None
    most = max(requests_per_round(one) for one in pulls)
    return with_pool(sized, name, int(most * ids_per_pull(sized, blocks) * _POOL_HEADROOM) + 4)
