"""Runs the bench: starts both sides, takes every measure, ends everything."""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvxferd.bench.figures import Measurements, figures_of, summary_of
from kvxferd.bench.implementations import KVXFERD
from kvxferd.bench.measures import (
    calls,
    crossing,
    first_pull,
    head_of_line,
    idle,
    latency,
    progressive,
    throughput,
)
from kvxferd.bench.proc_stats import available_bytes
from kvxferd.bench.processes import TOOL, BenchProcesses
from kvxferd.bench.results import Result, describe_machine
from kvxferd.bench.testbed import Testbed
from kvxferd.bench.workload import GIB, TRANSPORT_ENVIRONMENTS, Workload
from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.interrupts import interrupted_once
from kvxferd.tooling.output import format_bytes
from kvxferd.tooling.process_vm import read_process_memory
from kvxferd.tooling.work_directory import make_work_directory

MOVER_ENVIRONMENT_VARIABLE = "KVXFERD_MOVER_ENVIRONMENT"
# Memory beside the two regions: workers, movers, baselines.
_HEADROOM_BYTES = 2 * GIB

MEASURES = frozenset(("latency", "throughput", "calls", "behind", "idle", "first", "crossing", "progressive"))
POINT_MEASURES = frozenset(("latency", "throughput", "crossing", "progressive"))  # over every transport

ReportProgress = Callable[[str], None]


@dataclass(frozen=True)
class BenchOptions:
    """What to measure."""

    workload: Workload
    transports: tuple[str, ...]
    is_quick: bool
    measures: frozenset[str] = MEASURES


def run_bench(options: BenchOptions, report_progress: ReportProgress) -> Result:
    """Run the bench and return its result; `report_progress` is called with what is being measured.

    A failure after the first measurement is the result's `error`. Whatever ends the run, SIGINT and
    SIGTERM included, its processes and its directory are gone then. Raises KeyboardInterrupt for
    both, and KvxferdError.
    """
    check_memory(options)
    check_environment()
    with interrupted_once():
        return _run(options, report_progress)


def check_memory(requested: BenchOptions) -> None:
    """Raise KvxferdError if the largest pulls would not fit."""
    workload = requested.workload
    region = throughput.region_bytes(workload.points) if "throughput" in requested.measures else 0
    region = max(region, workload.head_of_line_bytes if "behind" in requested.measures else 0)
    if "progressive" in requested.measures:
        region = max(region, progressive.deployment_of("any", workload).region_bytes)
    needed, there = 2 * region + _HEADROOM_BYTES, available_bytes()
    if needed > there:
        raise KvxferdError(
            f"cannot run {TOOL}: its largest pulls take {needed / GIB:.1f} GiB of memory and "
            f"{there / GIB:.1f} GiB is available; ask for smaller ones with --size"
        )


def check_environment() -> None:
    """Raise KvxferdError if a setting would reach the movers and not the baselines."""
    if os.environ.get(MOVER_ENVIRONMENT_VARIABLE):
        raise KvxferdError(
            f"cannot run {TOOL}: {MOVER_ENVIRONMENT_VARIABLE} is set, which reaches the daemons and not "
            "what they are "
            "compared with; unset it, and set the variables that it names themselves",
            Code.CONFIG_INVALID,
        )


def _run(requested: BenchOptions, say: ReportProgress) -> Result:
    say("looking at the machine")
    machine = describe_machine()
    began = time.monotonic()
    found = Measurements()
    error = ""
    try:
        with _bench_processes() as processes:
            for number, transport in enumerate(requested.transports):
                _measure_transport(processes, transport, requested, found, say, is_first=number == 0)
    except Exception as failure:
        if found == Measurements():
            raise
        # Half an hour of measurements is not discarded for a later failure.
        if isinstance(failure, KvxferdError):
            error = f"{failure.message} [{failure.code.value}]"
        else:
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}"
    figures = figures_of(found)
    return Result(
        machine=machine,
        quick=requested.is_quick,
        seconds=round(time.monotonic() - began, 1),
        load_after=round(os.getloadavg()[0], 2),
        points=found.points,
        figures=figures,
        summary=summary_of(figures),
        crossing=found.crossing,
        progressive=found.progressive,
        error=error,
    )


@contextmanager
def _bench_processes() -> Iterator[BenchProcesses]:
    directory = make_work_directory("kvxferd-bench-")
    processes = BenchProcesses(directory)
    try:
        yield processes
    finally:
        processes.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _measure_transport(
    processes: BenchProcesses,
    transport: str,
    requested: BenchOptions,
    found: Measurements,
    say: ReportProgress,
    is_first: bool,
) -> None:
    """Measure over one transport: points over each, the rest over the first."""
    environment = TRANSPORT_ENVIRONMENTS[transport]
    wanted = requested.measures if is_first else requested.measures & POINT_MEASURES
    if wanted - {"first", "crossing"}:
        say(f"starting two daemons ({transport})")
        with Testbed.open(processes, environment) as testbed:
            if transport == "cma":
                _require_cma(testbed.daemons["source"].pid)
            _measure_points(testbed, transport, requested.workload, wanted, found, say, is_first)
            if "progressive" in wanted:
                _measure_progressive(testbed, transport, requested.workload, found, say)
            _measure_rest(testbed, requested.workload, wanted, found, say)
    if "crossing" in wanted:
        _measure_crossing(processes, transport, requested.workload, found, say)
    if "first" in wanted:
        say("first pulls")
        found.first_pulls = first_pull.measure_first_pull(processes, environment, requested.workload)


def _measure_crossing(
    processes: BenchProcesses, transport: str, workload: Workload, found: Measurements, say: ReportProgress
) -> None:
    say(f"layouts that differ ({transport}), {len(os.sched_getaffinity(0))} cores")
    sizes = []
    for size in workload.crossing:
        if transport in size.transports:
            if crossing.memory_bytes(size) + _HEADROOM_BYTES <= available_bytes():
                sizes.append(size)
            else:
                say(f"  {format_bytes(size.size_bytes)} is left out: there is too little memory")
    if not sizes:
        return
    environment = TRANSPORT_ENVIRONMENTS[transport]
    crossings = crossing.crossings_of(workload.layouts)
    for point in crossing.measure_crossing(processes, transport, environment, sizes, crossings):
        found.crossing.append(point)
        rate = point.bytes / point.auto_s / 1e9
        say(
            f"  {point.crossing}, {format_bytes(point.size_bytes)}: {rate:.2f} GB/s, "
            f"{point.auto_to_direct:.2f} of direct, {point.auto_to_equal:.2f} of equal layouts"
        )


def _measure_points(
    testbed: Testbed,
    transport: str,
    workload: Workload,
    wanted: frozenset[str],
    found: Measurements,
    say: ReportProgress,
    is_first: bool,
) -> None:
    if "latency" in wanted:
        say(f"small pulls ({transport})")
        seen = latency.measure_latency(testbed, transport, workload)
        found.points.append(seen.point)
        found.latency = seen if is_first else found.latency
    if "throughput" in wanted:
        say(f"throughput ({transport})")
        for point in throughput.measure_throughput(testbed, transport, workload):
            found.points.append(point)
            rate = point.contenders[KVXFERD].gb_per_s
            what = (
                f"{point.shape}, {point.layout}, {point.lists}, {format_bytes(point.size_bytes)}, "
                f"{point.in_flight} in flight"
            )
            say(f"  {what}: {rate:.2f} GB/s, {point.ratio_to_raw:.2f} of raw NIXL")


def _measure_progressive(
    testbed: Testbed,
    transport: str,
    workload: Workload,
    found: Measurements,
    say: ReportProgress,
) -> None:
    say(f"pulls while chunks are written ({transport})")
    with testbed.pair(progressive.deployment_of(transport, workload), baselines=False) as pair:
        for point in progressive.measure_progressive(pair, transport, workload):
            found.progressive.append(point)
            say(
                f"  {point.num_chunks} of {format_bytes(point.chunk_bytes)}, pace {point.pace:g}: handover "
                f"in {point.handover_s * 1e3:.1f} ms, {point.ratio:.2f} of a pull after the end"
            )


def _measure_rest(
    testbed: Testbed, workload: Workload, wanted: frozenset[str], found: Measurements, say: ReportProgress
) -> None:
    if "calls" in wanted:
        say("time inside pull()")
        found.calls = calls.measure_calls(testbed, workload)
    if "behind" in wanted:
        say("small pulls behind a large one")
        found.head_of_line = head_of_line.measure_head_of_line(testbed, workload)
    if "idle" in wanted:
        say("idle")
        with testbed.pair(idle.idle_deployment(), baselines=False) as pair:
            found.idle = idle.measure_idle(pair, workload.idle_s)


def _require_cma(pid: int) -> None:
    """Raise KvxferdError if the kernel refuses CMA: UCX would fall back to TCP without an error."""
    start = int(Path(f"/proc/{pid}/maps").read_text().split("-", 1)[0], 16)
    if (failed := read_process_memory(pid, start, 8)) != 0:
        raise KvxferdError(
            f"cannot run {TOOL} over cma: the kernel does not let one process read another's memory "
            f"({os.strerror(failed)}); use --transport tcp"
        )
