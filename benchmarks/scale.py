"""Scale, by simulation: one daemon's core among many engines, which one machine is too small for.

    PYTHONPATH=. python benchmarks/scale.py [--quick]

The core and its messages are real; workers, movers, sockets and time are simulated.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from scaling import control_plane
from scaling.control_plane import Load, LoadResult

# A rarer kind of event is measured too coarsely for a fit.
MIN_EVENTS = 100


class Sweep(NamedTuple):
    """Loads that differ in one number."""

    title: str
    sizes: list[float]
    loads: list[Load]


def sweeps(quick: bool) -> list[Sweep]:
    """Return the loads of the control plane; the last of the first sweep is the one that must be carried."""
    seconds = 10.0 if quick else 20.0
    engines = [10, 50, 200] if quick else [10, 100, 300, 1000]
    rates = [10.0, 50.0] if quick else [12.5, 25.0, 50.0, 100.0]
    waiting = [10, 100, 1000] if quick else [10, 100, 1000, 4000]
    few = 10 if quick else 50
    return [
        Sweep("engines known", list(map(float, engines)), [Load(n, seconds=seconds) for n in engines]),
        Sweep("transfers per rank and second", rates, [Load(few, rate, seconds=seconds) for rate in rates]),
        Sweep(
            "readers that wait for a publish",
            list(map(float, waiting)),
            [Load(few, num_waiting=n, seconds=8.0) for n in waiting],
        ),
    ]


def run(loads: Sequence[Load]) -> list[LoadResult]:
    """Measure each load in a process of its own, so that memory is that load's alone."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return pool.map(control_plane.measure, loads, chunksize=1)


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return k of the fit `cost = a * size ** k`: 0 is constant, 1 linear, 2 quadratic."""
    slope, _ = np.polyfit(np.log(sizes), np.log(costs), 1)
    return float(slope)


def totals(runs: Sequence[LoadResult]) -> dict[str, list[float]]:
    """Return, run by run, the growth that a fit of single events misses: few events, each with more work."""
    return {
        "% of a processor": [run.core_percent for run in runs],
        "all ticks, ms": [run.us_per_event["Tick"] * run.num_events["Tick"] / 1e3 for run in runs],
        "meeting an engine, ms": [run.learn_ms for run in runs],
    }


def show(console: Console, sweep: Sweep, runs: Sequence[LoadResult]) -> None:
    """Print one row per kind of event, one column per size, and how it grows at the end."""
    table = Table("us of the core", *(f"{size:g}" for size in sweep.sizes), "~ size^", title=sweep.title)
    kinds = set.intersection(*({k for k, n in run.num_events.items() if n >= MIN_EVENTS} for run in runs))
    for kind in sorted(kinds):
        costs = [run.us_per_event[kind] for run in runs]
        table.add_row(kind, *(f"{cost:.0f}" for cost in costs), f"{exponent(sweep.sizes, costs):+.2f}")
    table.add_section()
    for name, costs in totals(runs).items():
        table.add_row(name, *(f"{cost:.1f}" for cost in costs), f"{exponent(sweep.sizes, costs):+.2f}")
    table.add_row("grants held", *(str(run.num_grants_held) for run in runs), "")
    table.add_row("keeping an engine, KiB", *(f"{run.learn_kib:.0f}" for run in runs), "")
    table.add_row("all else, MiB", *(f"{run.run_mib:.0f}" for run in runs), "")
    console.print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under two minutes")
    for sweep in sweeps(parser.parse_args().quick):
        show(Console(), sweep, run(sweep.loads))


if __name__ == "__main__":
    main()
