"""The results of a run: the machine, every point, and the figures, each with its aim and how it was taken."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path

import msgspec
import numpy as np

import kvxferd
from kvxferd.bench.contenders import Round, Rounds
from kvxferd.bench.proc_stats import busy_cpu_seconds
from kvxferd.tooling.output import format_bytes

_BUSY_SAMPLE_S = 1.0


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number, and how it was taken."""

    name: str
    title: str
    value: float
    unit: str
    aim: str
    met: bool
    how: str


def at_least(name: str, title: str, value: float, aim: float, how: str) -> Figure:
    """Return the figure of a ratio that is to be at least `aim`."""
    return Figure(
        name=name, title=title, value=value, unit="", aim=f"at least {aim:g}", met=value >= aim, how=how
    )


def at_most(name: str, title: str, value: float, aim: float, how: str, unit: str = "") -> Figure:
    """Return a figure that is to be at most `aim`, both in `unit`."""
    text = f"at most {aim:g} {unit}".rstrip()
    return Figure(name=name, title=title, value=value, unit=unit, aim=text, met=value <= aim, how=how)


class ContenderStats(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one contender for one point. Times are of one request, in seconds."""

    n: int  # requests, all rounds together
    gb_per_s: float  # 10^9 bytes a second; median of the rounds
    median_s: float  # from pull(), or from post, until the bytes have arrived
    p99_s: float
    engine_thread_median_s: float  # inside pull(), or building and posting in the engine
    runs: int  # runs or descriptors of one request


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One case, moved by every contender, interleaved."""

    measure: str
    transport: str
    case: dict[str, str]  # in words
    size_bytes: int  # of one request, as requested
    bytes: int  # as moved
    rounds: int
    contenders: dict[str, ContenderStats]
    # Medians over rounds of another contender's time by that of the first, in the same round.
    ratios: dict[str, float]
    facts: dict[str, float] = {}  # what else was measured: times end in `_s`, shares in `_share`

    def __str__(self) -> str:
        (name, first), *_ = self.contenders.items()
        ratios = (f"{ratio:.2f} of {other}" for other, ratio in self.ratios.items())
        what = ", ".join([*map(" ".join, self.case.items()), format_bytes(self.size_bytes)])
        return f"{what}: {name} {first.gb_per_s:.2f} GB/s, {', '.join(ratios)}"


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile by linear interpolation; 0 if there are no values."""
    return float(np.percentile(values, percent)) if values else 0.0


def median(values: list[float]) -> float:
    """Return the median; 0 if there are no values."""
    return percentile(values, 50)


def paired_ratio(found: Rounds, one: str, other: str) -> float:
    """Return the median over rounds of the other contender's time by that of one: above 1, one was faster."""
    pairs = zip(found[other], found[one], strict=True)
    return median([theirs.seconds / ours.seconds for theirs, ours in pairs])


def stats_of(rounds: list[Round]) -> ContenderStats:
    """Return the results of one contender."""
    samples = [sample for one in rounds for sample in one.samples]
    times = [sample.seconds for sample in samples]
    return ContenderStats(
        n=len(samples),
        gb_per_s=median([one.num_bytes / one.seconds / 1e9 for one in rounds]),
        median_s=median(times),
        p99_s=percentile(times, 99),
        engine_thread_median_s=median([sample.posted - sample.began for sample in samples]),
        runs=samples[0].runs,
    )


def point_of(
    measure: str,
    transport: str,
    case: dict[str, str],
    size_bytes: int,
    found: Rounds,
    facts: dict[str, float],
) -> Point:
    """Return the point of one case, moved by all its contenders; see `Point`."""
    first, *others = found
    return Point(
        measure=measure,
        transport=transport,
        case=case,
        size_bytes=size_bytes,
        bytes=found[first][0].num_bytes // found[first][0].count,
        rounds=len(found[first]),
        contenders={name: stats_of(rounds) for name, rounds in found.items()},
        ratios={other: paired_ratio(found, first, other) for other in others},
        facts=facts,
    )


Finding = Figure | Point


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine it ran on, and its load."""

    cores: int
    processor: str
    kernel: str
    python: str
    kvxferd: str
    nixl: str
    busy_before_percent: float  # of all cores, in the second before the bench
    load_before: float  # of the last minute


class Result(msgspec.Struct, kw_only=True):
    """The result of one run, as far as it has come."""

    machine: Machine
    quick: bool
    seconds: float = 0.0
    load_after: float = 0.0
    points: list[Point] = []
    figures: list[Figure] = []  # over the first transport
    error: str = ""  # why results are missing


def describe_machine() -> Machine:
    """Return a description of this machine; takes a second, in which the machine should be idle."""
    cores = len(os.sched_getaffinity(0))
    before, began = busy_cpu_seconds(), time.monotonic()
    time.sleep(_BUSY_SAMPLE_S)
    busy = (busy_cpu_seconds() - before) / (os.cpu_count() or 1) / (time.monotonic() - began)
    return Machine(
        cores=cores,
        processor=_processor(),
        kernel=platform.release(),
        python=platform.python_version(),
        kvxferd=kvxferd.__version__,
        nixl=_nixl_version(),
        busy_before_percent=round(100 * busy, 1),
        load_before=round(os.getloadavg()[0], 2),
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _nixl_version() -> str:
    for name in ("nixl", "rixl"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
