"""Scale, by simulation where one machine is too small: `python benchmarks/scale.py [--quick] [--json]`.

Cores and messages are real; workers, movers, sockets and time are simulated. Three parts: one core
among many engines, the handshake with one large engine, and a fleet. With `--beside CHECKOUT` it measures
instead what 1,000 remote engines cost a registry, with this code and that of another checkout in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
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


def registrations(checkout: Path, num_engines: int) -> dict[str, float]:
    """Measure a checkout's registry in a process of its own; return what was measured by name."""
    scripts = Path(__file__).parent
    ran = subprocess.run(
        [sys.executable, str(scripts / "scaling" / "registration.py"), str(num_engines)],
        env={**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{scripts}"},
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"{checkout} cannot be measured: {ran.stderr}")
    found: dict[str, float] = json.loads(ran.stdout)
    return found


def show_beside(console: Console, other: Path, rounds: int, num_engines: int) -> dict[str, object]:
    """Measure two checkouts in turn; print the medians, and the median of the ratios round by round."""
    mine = Path(__file__).parent.parent
    measured: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range(rounds):
        order = (other, mine) if number % 2 == 0 else (mine, other)
        ran = {checkout: registrations(checkout, num_engines) for checkout in order}
        measured.append((ran[other], ran[mine]))
    table = Table("", str(other), "this", "ratio", title=f"{num_engines} remote engines, {rounds} rounds")
    found: dict[str, object] = {}
    for name in measured[0][0]:
        before = statistics.median(theirs[name] for theirs, _ in measured)
        after = statistics.median(ours[name] for _, ours in measured)
        ratio = statistics.median(ours[name] / theirs[name] for theirs, ours in measured)
        table.add_row(name, f"{before:.1f}", f"{after:.1f}", f"{ratio:.2f}")
        found[name] = {"before": before, "after": after, "ratio": ratio}
    console.print(table)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under two minutes")
    parser.add_argument("--json", action="store_true", help="everything measured, as one object")
    parser.add_argument(
        "--beside", type=Path, metavar="CHECKOUT", help="registrations alone, beside that code"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of --beside")
    options = parser.parse_args()
    console = Console(stderr=options.json)
    if options.beside is not None:
        num_engines = 200 if options.quick else 1000
        beside = show_beside(console, options.beside.resolve(), options.rounds, num_engines)
        if options.json:
            print(json.dumps(beside))
        return
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
