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
from kvxferd.bench.cases import Case
from kvxferd.bench.contenders import ENGINE, KVXFERD, RAW, Round, Rounds
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
    contenders: dict[str, ContenderStats]
    # Medians over rounds of the baseline's time divided by kvxferd's, in the same round.
    ratio_to_raw: float
    ratio_to_engine: float

    def __str__(self) -> str:
        return (
            f"{self.shape}, {self.layout}, {self.lists}, {format_bytes(self.size_bytes)}, {self.in_flight} "
            f"in flight: {self.contenders[KVXFERD].gb_per_s:.2f} GB/s, {self.ratio_to_raw:.2f} of raw NIXL"
        )


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile by linear interpolation; 0 if there are no values."""
    return float(np.percentile(values, percent)) if values else 0.0


def median(values: list[float]) -> float:
    """Return the median; 0 if there are no values."""
    return percentile(values, 50)


def paired_ratio(found: Rounds, contender: str, ours: str = KVXFERD) -> float:
    """Return the median over rounds of a contender's time by ours: above 1, ours was faster."""
    pairs = zip(found[contender], found[ours], strict=True)
    return median([theirs.seconds / mine.seconds for theirs, mine in pairs])


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


def point_of(measure: str, transport: str, shape: str, size_bytes: int, case: Case, found: Rounds) -> Point:
    """Return the point of one case, `size_bytes` large as requested."""
    ours = found[KVXFERD]
    return Point(
        measure=measure,
        transport=transport,
        shape=shape,
        layers=case.pair.model.num_layers,
        layout=case.pair.prefill.layout,
        lists=case.pattern.value,
        size_bytes=size_bytes,
        bytes=ours[0].samples[0].bytes,
        blocks=case.blocks,
        in_flight=ours[0].window,
        rounds=len(ours),
        requests_per_round=len(ours[0].samples),
        interleaved_with=[name for name in found if name != KVXFERD],
        contenders={name: stats_of(rounds) for name, rounds in found.items()},
        ratio_to_raw=paired_ratio(found, RAW),
        ratio_to_engine=paired_ratio(found, ENGINE),
    )


class LayoutsPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Two engines whose layouts differ, and one size. Times are medians, of all ranks' pulls together."""

    transport: str
    engines: str
    lists: str
    size_bytes: int  # as requested
    bytes: int  # of one request, as moved
    rounds: int
    runs: int  # that a direct request has
    has_short_runs: bool  # whether the ratios to equal layouts count it
    auto_s: float
    direct_s: float
    equal_s: float
    auto_not_direct: float  # the share of the bytes that auto did not read directly
    # Medians over rounds: above 1, auto was faster.
    auto_to_direct: float
    auto_to_equal: float

    def __str__(self) -> str:
        rate = self.bytes / self.auto_s / 1e9
        return (
            f"{self.engines}, {format_bytes(self.size_bytes)}: {rate:.2f} GB/s, {self.auto_to_direct:.2f} of "
            f"direct, {self.auto_to_equal:.2f} of equal layouts"
        )


class HandoverPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One number of chunks. Times are medians of the rounds, in seconds."""

    transport: str
    num_chunks: int
    chunk_bytes: int
    bytes: int  # of the whole transfer
    rounds: int
    pace: float
    gap_s: float  # between two chunks: `pace` times as long as the plain pull takes for one
    plain_s: float  # pull() of the transfer that is whole, prepared, to Delivered
    handover_s: float  # `ready` for the last chunk to Delivered
    ratio: float  # median of the rounds: the handover divided by the plain pull of the same round

    def __str__(self) -> str:
        return (
            f"{self.num_chunks} of {format_bytes(self.chunk_bytes)}, pace {self.pace:g}: handover in "
            f"{self.handover_s * 1e3:.1f} ms, {self.ratio:.2f} of a pull after the end"
        )


Finding = Figure | Point | LayoutsPoint | HandoverPoint


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
    layouts: list[LayoutsPoint] = []
    handovers: list[HandoverPoint] = []
    figures: list[Figure] = []  # over the first transport
    error: str = ""  # why results are missing

    def add(self, finding: Finding) -> None:
        """Add what a measure has found."""
        match finding:
            case Figure():
                self.figures.append(finding)
            case Point():
                self.points.append(finding)
            case LayoutsPoint():
                self.layouts.append(finding)
            case HandoverPoint():
                self.handovers.append(finding)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been found yet."""
        return not (self.figures or self.points or self.layouts or self.handovers)


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
