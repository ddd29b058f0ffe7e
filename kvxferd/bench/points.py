"""The measured points, each with how it was taken."""

from __future__ import annotations

import msgspec
import numpy as np

from kvxferd.bench.cases import Case
from kvxferd.bench.implementations import ENGINE, KVXFERD, RAW
from kvxferd.bench.rounds import Rounds


class ImplementationStats(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one implementation for one point. Times are of one request, in seconds."""

    rounds: int
    n: int  # requests, all rounds together
    gb_per_s: float  # 10^9 bytes a second; median of the rounds
    slowest_gb_per_s: float
    fastest_gb_per_s: float
    median_s: float  # from pull(), or from post, until the bytes have arrived
    p99_s: float
    build_median_s: float  # before that and not counted: raw NIXL's request, from runs to handle
    engine_thread_median_s: float  # inside pull(), or building and posting in the engine
    engine_thread_p99_s: float
    runs: int  # runs or descriptors of one request


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One case, moved by every implementation, interleaved."""

    measure: str
    transport: str
    shape: str
    layers: int
    layout: str
    lists: str
    size_bytes: int  # as requested
    bytes: int  # of one request, as moved
    blocks: int
    in_flight: int
    rounds: int
    requests_per_round: int
    interleaved_with: list[str]
    contenders: dict[str, ImplementationStats]
    # Medians over rounds of the baseline's time divided by kvxferd's, in the same round.
    ratio_to_raw: float
    ratio_to_engine: float


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile by linear interpolation; 0 if there are no values."""
    return float(np.percentile(values, percent)) if values else 0.0


def median(values: list[float]) -> float:
    """Return the median; 0 if there are no values."""
    return percentile(values, 50)


def paired_ratio(found: Rounds, baseline: str) -> float:
    """Return the median over rounds of a baseline's time by kvxferd's: above 1, kvxferd was faster."""
    pairs = zip(found.by_implementation[baseline], found.by_implementation[KVXFERD], strict=True)
    return median([theirs.seconds / ours.seconds for theirs, ours in pairs])


def stats_of(found: Rounds, contender: str) -> ImplementationStats:
    """Return the results of one implementation."""
    rounds = found.by_implementation[contender]
    samples = [sample for one in rounds for sample in one.samples]
    rates = [one.num_bytes / one.seconds / 1e9 for one in rounds]
    times = [sample.ended - sample.built for sample in samples]
    calls = [sample.posted - sample.began for sample in samples]
    return ImplementationStats(
        rounds=len(rounds),
        n=len(samples),
        gb_per_s=median(rates),
        slowest_gb_per_s=min(rates),
        fastest_gb_per_s=max(rates),
        median_s=median(times),
        p99_s=percentile(times, 99),
        build_median_s=median([sample.built - sample.began for sample in samples]),
        engine_thread_median_s=median(calls),
        engine_thread_p99_s=percentile(calls, 99),
        runs=samples[0].runs,
    )


def point_of(measure: str, transport: str, size_bytes: int, case: Case, found: Rounds) -> Point:
    """Return the point of one case."""
    ours = found.by_implementation[KVXFERD]
    return Point(
        measure=measure,
        transport=transport,
        shape=case.deployment.shape,
        layers=case.deployment.layers,
        layout=case.deployment.layout_name,
        lists=case.lists.value,
        size_bytes=size_bytes,
        bytes=ours[0].samples[0].bytes,
        blocks=case.blocks,
        in_flight=found.window,
        rounds=len(ours),
        requests_per_round=len(ours[0].samples),
        interleaved_with=[name for name in found.by_implementation if name != KVXFERD],
        contenders={name: stats_of(found, name) for name in found.by_implementation},
        ratio_to_raw=paired_ratio(found, RAW),
        ratio_to_engine=paired_ratio(found, ENGINE),
    )
