"""Runs the bench: takes every measure over every transport, and ends everything."""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvxferd.bench.cases import GIB
from kvxferd.bench.figures import Figure, Finding, Point, Result, describe_machine
from kvxferd.bench.measures import (
    behind_large,
    first_pull,
    handover,
    idle,
    layouts,
    small_pulls,
    throughput,
)
from kvxferd.bench.proc_stats import available_bytes
from kvxferd.bench.testbed import TOOL, Site
from kvxferd.bench.workload import HEADROOM_BYTES, Workload
from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.interrupts import interrupted_once
from kvxferd.tooling.work_directory import make_work_directory

MOVER_ENVIRONMENT_VARIABLE = "KVXFERD_MOVER_ENVIRONMENT"


class Measure(NamedTuple):
    """One measure: it yields findings, and texts on its progress."""

    title: str
    take: Callable[[Site, Workload], Iterator[Finding | str]]
    is_over_every: bool = False  # transport; else it is taken over the first


MEASURES = {
    "latency": Measure("small pulls", small_pulls.measure_latency, is_over_every=True),
    "throughput": Measure("throughput", throughput.measure_throughput, is_over_every=True),
    "handover": Measure("pulls while chunks are written", handover.measure_handover, is_over_every=True),
    "calls": Measure("time inside pull()", small_pulls.measure_calls),
    "behind": Measure("small pulls behind a large one", behind_large.measure_behind_large),
    "idle": Measure("idle", idle.measure_idle),
    "layouts": Measure("layouts that differ", layouts.measure_layouts, is_over_every=True),
    "first": Measure("first pulls", first_pull.measure_first_pull),
}


@dataclass(frozen=True)
class BenchOptions:
    """What to measure."""

    workload: Workload
    transports: tuple[str, ...]
    is_quick: bool
    measures: frozenset[str] = frozenset(MEASURES)


def run_bench(options: BenchOptions, report_progress: Callable[[str], None]) -> Result:
    """Run the bench and return its result; `report_progress` is called with what is being measured.

    A failure after the first measurement is the result's `error`. Whatever ends the run, SIGINT and
    SIGTERM included, its processes and its directory are gone then. Raises KeyboardInterrupt for
    both, and KvxferdError.
    """
    check_memory(options)
    check_environment()
    with interrupted_once():
        report_progress("looking at the machine")
        result = Result(machine=describe_machine(), quick=options.is_quick)
        began = time.monotonic()
        directory = make_work_directory("kvxferd-bench-")
        try:
            for transport in options.transports:
                _measure_over(Site(directory, transport), options, result, report_progress)
        except Exception as failure:
            if not (result.points or result.figures):
                raise
            # Half an hour of measurements is not discarded for a later failure.
            if isinstance(failure, KvxferdError):
                result.error = f"{failure.message} [{failure.code.value}]"
            else:
                traceback.print_exc()
                result.error = f"{type(failure).__name__}: {failure}"
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        result.seconds = round(time.monotonic() - began, 1)
        result.load_after = round(os.getloadavg()[0], 2)
        return result


def _measure_over(site: Site, options: BenchOptions, result: Result, say: Callable[[str], None]) -> None:
    is_first = site.transport == options.transports[0]
    for name, measure in MEASURES.items():
        if name not in options.measures or not (is_first or measure.is_over_every):
            continue
        say(f"{measure.title} ({site.transport})")
        for found in measure.take(site, options.workload):
            if not isinstance(found, Figure):
                say(f"  {found}")
            if isinstance(found, Point):
                result.points.append(found)
            # A ratio over TCP does not predict one over CMA.
            if isinstance(found, Figure) and is_first:
                result.figures.append(found)


def check_memory(options: BenchOptions) -> None:
    """Raise KvxferdError if the largest pulls would not fit, on both sides and with a quarter to spare."""
    sizes = [one.size_bytes * one.in_flight for one in options.workload.throughput]
    largest = max(sizes) if "throughput" in options.measures else 0
    largest = max(largest, options.workload.behind_bytes) if "behind" in options.measures else largest
    needed, there = 2 * largest * 5 // 4 + HEADROOM_BYTES, available_bytes()
    if needed > there:
        raise KvxferdError(
            f"cannot run {TOOL}: its largest pulls take {needed / GIB:.1f} GiB of memory and "
            f"{there / GIB:.1f} GiB is available; choose others with --measure or --size"
        )


def check_environment() -> None:
    """Raise KvxferdError if a setting would reach the movers and not the baselines."""
    if os.environ.get(MOVER_ENVIRONMENT_VARIABLE):
        raise KvxferdError(
            f"cannot run {TOOL}: {MOVER_ENVIRONMENT_VARIABLE} is set, which reaches the daemons and not "
            "what they are compared with; unset it, and set the variables that it names themselves",
            Code.CONFIG_INVALID,
        )
