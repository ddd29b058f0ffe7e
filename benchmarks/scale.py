"""Scale, by simulation where one machine is too small.

`PYTHONPATH=. python benchmarks/scale.py [--quick] [--json]`

Cores and messages are real; workers, movers, sockets and time are simulated. Three parts: one core
among many engines, the handshake with one large engine, and a fleet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from scaling import control_plane, fleet, handshake
from scaling.control_plane import Load, LoadResult
from scaling.fits import exponent
from scaling.report import growth, show_fleet, show_handshake, show_sweep, totals


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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under two minutes")
    parser.add_argument("--json", action="store_true", help="everything measured, as one object")
    options = parser.parse_args()
    console = Console(stderr=options.json)
    said: dict[str, object] = {"control_plane": []}
    for sweep in sweeps(options.quick):
        runs = run(sweep.loads)
        show_sweep(console, sweep.title, sweep.sizes, runs)
        point = {
            "by": sweep.title,
            "runs": [dataclasses.asdict(measured) for measured in runs],
            "growth": growth(sweep.sizes, runs),
            "growth_of_totals": {name: exponent(sweep.sizes, costs) for name, costs in totals(runs).items()},
        }
        said["control_plane"] = [*said["control_plane"], point]  # type: ignore[misc]
    met = handshake.measure()
    show_handshake(console, met)
    size = fleet.FleetConfig(20, 40, 40.0, seconds=4.0) if options.quick else fleet.FleetConfig()
    fleet_said = fleet.measure(size)
    show_fleet(console, fleet_said)
    if options.json:
        said |= {"handshake": dataclasses.asdict(met), "fleet": dataclasses.asdict(fleet_said)}
        print(json.dumps(said))


if __name__ == "__main__":
    main()
