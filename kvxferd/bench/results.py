"""The results of a bench run: the machine, every point, the figures that have an aim, the summary."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path

import msgspec

import kvxferd
from kvxferd.bench.measures.crossing import CrossingPoint
from kvxferd.bench.measures.progressive import ProgressivePoint
from kvxferd.bench.points import Point
from kvxferd.bench.proc_stats import busy_cpu_seconds

_BUSY_SAMPLE_S = 1.0


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


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number, and how it was taken."""

    name: str
    title: str
    value: float
    unit: str
    aim: str
    met: bool
    how: str


class Result(msgspec.Struct, kw_only=True):
    """The whole result of one run."""

    machine: Machine
    quick: bool
    seconds: float
    load_after: float
    points: list[Point]
    figures: list[Figure]
    summary: dict[str, float | None]
    crossing: list[CrossingPoint] = []
    progressive: list[ProgressivePoint] = []
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
