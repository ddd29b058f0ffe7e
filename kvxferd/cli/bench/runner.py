"""The bench itself: start both sides, take every measure, end everything."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvxferd.cli.bench.accounts import available_bytes
from kvxferd.cli.bench.cma import require_cma
from kvxferd.cli.bench.effort import GIB, TRANSPORTS, Effort
from kvxferd.cli.bench.figures import Findings, figures_of, summary_of
from kvxferd.cli.bench.hosts import VERB, LocalHost
from kvxferd.cli.bench.measures import behind, calls, first, idle, latency, parallel, throughput
from kvxferd.cli.bench.results import Result, look_at_machine
from kvxferd.cli.bench.stage import Hosts, Stage
from kvxferd.cli.running import make_directory, until_signal
from kvxferd.errors import KvxferdError

# Beside the two regions: workers, movers, baselines.
_ROOM_BYTES = 2 * GIB

Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What is to be measured."""

    effort: Effort
    transports: tuple[str, ...]
    is_quick: bool
    peer: str = ""


def run_bench(asked: Asked, say: Say) -> Result:
    """Run it and return what was found; `say` is told what is being measured.

    Whatever ends it, SIGINT and SIGTERM included, its processes and its directory are gone then.
    Raises KeyboardInterrupt for both, and KvxferdError.
    """
    check_memory(asked.effort)
    return asyncio.run(until_signal(_run(asked, say)))


def check_memory(effort: Effort) -> None:
    """Raise KvxferdError where the largest pulls would not fit."""
    region = max(throughput.region_bytes(effort.pulls), effort.behind_bytes)
    needed, there = 2 * region + _ROOM_BYTES, available_bytes()
    if needed > there:
        raise KvxferdError(
            f"cannot run {VERB}: its largest pulls take {needed / GIB:.1f} GiB of memory and "
            f"{there / GIB:.1f} GiB is available; ask for smaller ones with --size"
        )


async def _run(asked: Asked, say: Say) -> Result:
    say("looking at the machine")
    machine = await asyncio.to_thread(look_at_machine)
    began = time.monotonic()
    found = Findings()
    async with _hosts(asked.peer) as hosts:
        for number, transport in enumerate(asked.transports):
            await _over(hosts, transport, asked.effort, found, say, is_first=number == 0)
    figures = figures_of(found)
    return Result(
        machine=machine,
        quick=asked.is_quick,
        peer=asked.peer,
        seconds=round(time.monotonic() - began, 1),
        load_after=round(os.getloadavg()[0], 2),
        points=found.points,
        figures=figures,
        summary=summary_of(figures),
    )


@asynccontextmanager
async def _hosts(peer: str) -> AsyncIterator[Hosts]:
    directory = make_directory("kvxferd-bench-")
    here = LocalHost(directory)
    try:
        yield {"source": here, "sink": here}
    finally:
        await here.stop()
        shutil.rmtree(directory, ignore_errors=True)


async def _over(
    hosts: Hosts, transport: str, effort: Effort, found: Findings, say: Say, is_first: bool
) -> None:
    """Measure over one transport: points on each, the rest on the first."""
    environment = TRANSPORTS[transport]
    say(f"starting two daemons ({transport})")
    async with Stage.open(hosts, environment) as stage:
        if transport == "cma":
            require_cma(stage.seats["source"].pid)
        say(f"small pulls ({transport})")
        seen = await latency.latency(stage, transport, effort)
        found.points.append(seen.point)
        async for point in throughput.throughput(stage, transport, effort):
            found.points.append(point)
            say(f"throughput ({transport}): {point.shape}, {point.lists}, {point.size_bytes >> 10} KiB")
        if not is_first:
            return
        found.latency = seen
        say("time inside pull()")
        found.calls = await calls.calls(stage, effort)
        say("small pulls behind a large one")
        found.behind = await behind.behind(stage, effort)
        say("eight ranks")
        async with stage.pair(parallel.deployment(effort), baselines=False) as pair:
            found.parallel = await parallel.parallel(pair, effort)
            say("idle")
            found.idle = await idle.idle(stage.seats["sink"].pid, len(pair.ranks), effort.idle_s)
    say("first pulls")
    found.first = await first.first(hosts, environment, effort)
