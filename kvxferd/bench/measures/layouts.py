"""Pulls between layouts that differ, with `mover.read` auto and direct, and between equal ones, in turn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import NamedTuple

from kvxferd.bench.cases import (
    BLOCKS_PER_RUN,
    SHAPES,
    BlockPattern,
    Case,
    equal_engines,
    footprint,
)
from kvxferd.bench.contenders import KvxferdPulls, interleave
from kvxferd.bench.figures import Figure, Finding, Point, at_least, median, point_of
from kvxferd.bench.proc_stats import available_bytes
from kvxferd.bench.testbed import RunningEngines, Site, Testbed
from kvxferd.bench.workload import HEADROOM_BYTES, LayoutsSize, Workload
from kvxferd.tooling.engine_pair import EnginePair, EngineShape
from kvxferd.tooling.output import format_bytes

SHAPE = "qwen3-8b"  # eight heads of 128, so that a head of a token is 256 bytes
LAYERS = 4  # 16 KiB a token, so that also a small request has many blocks
AUTO, DIRECT, EQUAL = "auto", "direct", "equal"


def _engine(layout: str, block_tokens: int, tp: int = 1, pp: int = 1) -> EngineShape:
    return EngineShape(tp, pp, block_tokens, layout)


class Layouts(NamedTuple):
    """Two engines whose layouts differ."""

    prefill: EngineShape
    decode: EngineShape
    has_short_runs: bool = True  # whether the ratios to equal layouts count it

    def __str__(self) -> str:
        return " to ".join(map(_label, (self.prefill, self.decode)))


def _label(engine: EngineShape) -> str:
    parallel = f" TP{engine.tp}" * (engine.tp > 1) + f" PP{engine.pp}" * (engine.pp > 1)
    return f"{engine.layout}/{engine.block_tokens}{parallel}"


SHORTEST_RUNS = Layouts(_engine("HND", 16, tp=4), _engine("NHD", 32, tp=2))  # of 256 bytes
ALL_LAYOUTS = (
    SHORTEST_RUNS,
    Layouts(_engine("NHD", 32, tp=4), _engine("HND", 16, tp=2)),
    Layouts(_engine("HND", 16), _engine("HND", 32)),
    Layouts(_engine("HND", 12), _engine("HND", 16)),
    Layouts(_engine("HND", 16, tp=4), _engine("HND", 16, tp=2)),
    Layouts(_engine("NHD", 16), _engine("NHD", 16, tp=4)),
    Layouts(_engine("HND", 16, pp=2), _engine("HND", 16), has_short_runs=False),
)


def measure_layouts(site: Site, workload: Workload) -> Iterator[Finding | str]:
    """Yield a point for each pair of layouts and each size that fits in memory, and what auto gains."""
    sizes = []
    for size in workload.layouts_sizes:
        if site.transport not in size.transports:
            continue
        # Three pairs of engines, both sides, with room for half as much again.
        if 9 * size.size_bytes + HEADROOM_BYTES > available_bytes():
            yield f"{format_bytes(size.size_bytes)} is left out: there is too little memory"
        else:
            sizes.append(size)
    points = []
    if sizes:
        with (
            Testbed.open(site, KVXFERD_MOVER_READ=AUTO) as auto,
            Testbed.open(site, KVXFERD_MOVER_READ=DIRECT) as direct,
        ):
            for number, layouts in enumerate(ALL_LAYOUTS):
                tokens = max(request_tokens(layouts, size.size_bytes) for size in sizes)
                equal = Layouts(layouts.decode, layouts.decode)
                with ExitStack() as stack:
                    engines = {
                        way: stack.enter_context(
                            testbed.engines(pair_of(f"layouts-{number}-{way}", chosen, tokens))
                        )
                        for way, testbed, chosen in (
                            (AUTO, auto, layouts),
                            (DIRECT, direct, layouts),
                            (EQUAL, auto, equal),
                        )
                    }
                    for size in sizes:
                        point = _measure_point(engines, site.transport, layouts, size)
                        points.append((layouts, point))
                        yield point
    yield from gains_of_auto(points)


def pair_of(name: str, layouts: Layouts, num_tokens: int) -> EnginePair:
    """Return engines with room for requests of so many tokens, and half as much beside them."""
    whole = math.lcm(layouts.prefill.block_tokens, layouts.decode.block_tokens)
    pool_tokens = -(-num_tokens * 3 // (2 * whole)) * whole
    model = SHAPES[SHAPE].facts(LAYERS, 1)
    return EnginePair(model, layouts.prefill, layouts.decode, num_tokens, name, pool_tokens)


def request_tokens(layouts: Layouts, size_bytes: int) -> int:
    """Return the tokens of a request of about this size, in whole runs of four blocks on both sides."""
    of = footprint(equal_engines("alone", SHAPE, LAYERS))
    whole = BLOCKS_PER_RUN * math.lcm(layouts.prefill.block_tokens, layouts.decode.block_tokens)
    return max(1, round(size_bytes * of.block_tokens / of.block_bytes / whole)) * whole


def gains_of_auto(points: list[tuple[Layouts, Point]]) -> Iterator[Figure]:
    """Yield what auto gains and costs between layouts that differ."""
    counted = [point for layouts, point in points if layouts.has_short_runs]
    if counted:
        how = (
            f"{len(counted)} points over {counted[0].transport}, fragmented lists, prepared, one rank after "
            "the other; for each the median of its rounds, auto, direct and equal layouts in turn"
        )
        ratio = median([point.ratios[EQUAL] for point in counted])
        title = "layouts that differ: auto by equal layouts, median point"
        yield at_least("layouts_ratio", title, ratio, 0.4, how)
        lowest = min(counted, key=lambda point: point.ratios[EQUAL])
        title = f"the same, lowest point ({_name(lowest)})"
        yield at_least("layouts_ratio_lowest", title, lowest.ratios[EQUAL], 0.2, how)
    for point in [point for layouts, point in points if layouts == SHORTEST_RUNS][-1:]:
        title = f"auto by direct, runs of 256 bytes ({_name(point)})"
        yield at_least("layouts_speedup_short_runs", title, point.ratios[DIRECT], 12, how)
    # A point that auto read directly throughout differs from direct by chance; so may one of few rounds.
    most_rounds = max((point.rounds for _, point in points), default=0)
    chosen = [point for _, point in points if point.facts["not_direct_share"] and point.rounds == most_rounds]
    if chosen:
        worst = min(chosen, key=lambda point: point.ratios[DIRECT])
        title = f"auto by direct, worst point ({_name(worst)})"
        how = (
            f"{len(chosen)} points that auto did not read directly throughout; median of {worst.rounds} "
            "alternated pairs"
        )
        yield at_least("worst_against_direct", title, worst.ratios[DIRECT], 0.9, how)


def _name(point: Point) -> str:
    return f"{point.case['from and to']}, {format_bytes(point.size_bytes)}"


def _measure_point(
    engines: Mapping[str, RunningEngines], transport: str, layouts: Layouts, size: LayoutsSize
) -> Point:
    tokens = request_tokens(layouts, size.size_bytes)
    contenders = []
    for way, one in engines.items():
        case = Case(one.pair, BlockPattern.FRAGMENTED, tokens // one.pair.prefill.block_tokens)
        contenders.append(KvxferdPulls(one, case, way))
    before = _covered_bytes(engines[AUTO])
    found = interleave(contenders, size.rounds, 1)
    covered = _covered_bytes(engines[AUTO]) - before
    moved = found[AUTO][0].num_bytes * (size.rounds + 1)  # with the first move, which is compared whole
    facts = {
        "runs": sum(sample.runs for sample in found[DIRECT][0].samples),
        "not_direct_share": covered / moved,
    }
    return point_of("layouts", transport, {"from and to": str(layouts)}, size.size_bytes, found, facts)


def _covered_bytes(engines: RunningEngines) -> int:
    """Return how many bytes of these engines' pulls in the sink's history were not read directly."""
    path = f"/v1/history?kind=pull&engine={engines.pair.name}-decode&limit=512"
    records = engines.testbed.daemons["decode"].control.get(path)["records"]
    ways = (way for record in records for way in record.get("ways", {}).items())
    return sum(num_bytes for way, num_bytes in ways if way != "direct")
