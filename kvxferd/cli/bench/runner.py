"""The bench itself: start both sides, take every measure, end everything."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvxferd.cli.bench.accounts import available_bytes
from kvxferd.cli.bench.cma import require_cma
from kvxferd.cli.bench.contenders import KVXFERD
from kvxferd.cli.bench.effort import GIB, TRANSPORTS, Effort
from kvxferd.cli.bench.figures import Findings, figures_of, summary_of
from kvxferd.cli.bench.hosts import VERB, Host, LocalHost
from kvxferd.cli.bench.measures import behind, calls, first, idle, latency, parallel, throughput
from kvxferd.cli.bench.relay import RemoteHost
from kvxferd.cli.bench.results import Result, look_at_machine
from kvxferd.cli.bench.shapes import Role
from kvxferd.cli.bench.stage import Hosts, Stage
from kvxferd.cli.running import make_directory, until_signal
from kvxferd.cli.showing import in_bytes
from kvxferd.errors import Code, KvxferdError

MOVERS_ALONE = "KVXFERD_MOVER_ENVIRONMENT"
# Beside the two regions: workers, movers, baselines.
_ROOM_BYTES = 2 * GIB

MEASURES = frozenset(("latency", "throughput", "calls", "behind", "parallel", "idle", "first"))
POINTS = frozenset(("latency", "throughput"))  # taken over every transport

Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What is to be measured."""

    effort: Effort
    transports: tuple[str, ...]
    is_quick: bool
    measures: frozenset[str] = MEASURES
    peer: str = ""


def run_bench(asked: Asked, say: Say) -> Result:
    """Run it and return what was found; `say` is told what is being measured.

    A failure after something was measured is the result's `error`. Whatever ends it, SIGINT and
    SIGTERM included, its processes and its directory are gone then. Raises KeyboardInterrupt for
    both, and KvxferdError.
    """
    check_memory(asked)
    check_environment()
    return asyncio.run(until_signal(_run(asked, say)))


def check_memory(asked: Asked) -> None:
    """Raise KvxferdError where the largest pulls would not fit."""
    effort = asked.effort
    region = throughput.region_bytes(effort.pulls) if "throughput" in asked.measures else 0
    region = max(region, effort.behind_bytes if "behind" in asked.measures else 0)
    needed, there = 2 * region + _ROOM_BYTES, available_bytes()
    if needed > there:
        raise KvxferdError(
            f"cannot run {VERB}: its largest pulls take {needed / GIB:.1f} GiB of memory and "
            f"{there / GIB:.1f} GiB is available; ask for smaller ones with --size"
        )


def check_environment() -> None:
    """Raise KvxferdError where the movers alone would be told how to move: the baselines would not."""
    if os.environ.get(MOVERS_ALONE):
        raise KvxferdError(
            f"cannot run {VERB}: {MOVERS_ALONE} is set, which reaches the daemons and not what they are "
            "compared with; unset it, and set the variables that it names themselves",
            Code.CONFIG_INVALID,
        )


async def _run(asked: Asked, say: Say) -> Result:
    say("looking at the machine")
    machine = await asyncio.to_thread(look_at_machine)
    began = time.monotonic()
    found = Findings()
    error = ""
    try:
        async with _hosts(asked.peer) as hosts:
            for number, transport in enumerate(asked.transports):
                await _over(hosts, transport, asked, found, say, is_first=number == 0)
    except Exception as failure:
        if found == Findings():
            raise
        # What was measured in half an hour is not thrown away for what came after it.
        if isinstance(failure, KvxferdError):
            error = f"{failure.message} [{failure.code.value}]"
        else:
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}"
    figures = figures_of(found)
    return Result(
        machine=machine,
        quick=asked.is_quick,
        peer=asked.peer.partition("#")[0],
        seconds=round(time.monotonic() - began, 1),
        load_after=round(os.getloadavg()[0], 2),
        points=found.points,
        figures=figures,
        summary=summary_of(figures),
        error=error,
    )


@asynccontextmanager
async def _hosts(peer: str) -> AsyncIterator[Hosts]:
    """Give both sides' hosts: `peer` is ``host:port#token``, or "" for this machine alone."""
    directory = make_directory("kvxferd-bench-")
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        here = LocalHost(directory)
        hosts: dict[Role, Host] = {"source": here, "sink": here}
        if peer:
            address, _, token = peer.partition("#")
            there = await RemoteHost.connect(address, token)
            stack.push_async_callback(there.stop)
            here = LocalHost(directory, there.local_address)
            hosts = {"source": there, "sink": here}
        stack.push_async_callback(here.stop)
        yield hosts


async def _over(
    hosts: Hosts, transport: str, asked: Asked, found: Findings, say: Say, is_first: bool
) -> None:
    """Measure over one transport: points on each, the rest on the first."""
    environment = TRANSPORTS[transport]
    wanted = asked.measures if is_first else asked.measures & POINTS
    if wanted - {"first"}:
        say(f"starting two daemons ({transport})")
        async with Stage.open(hosts, environment) as stage:
            if transport == "cma" and stage.copies:
                require_cma(stage.seats["source"].pid)
            await _points(stage, transport, asked.effort, wanted, found, say, is_first)
            await _rest(stage, asked.effort, wanted, found, say)
    if "first" in wanted:
        say("first pulls")
        found.first = await first.first(hosts, environment, asked.effort)


async def _points(
    stage: Stage,
    transport: str,
    effort: Effort,
    wanted: frozenset[str],
    found: Findings,
    say: Say,
    is_first: bool,
) -> None:
    if "latency" in wanted:
        say(f"small pulls ({transport})")
        seen = await latency.latency(stage, transport, effort)
        found.points.append(seen.point)
        found.latency = seen if is_first else found.latency
    if "throughput" in wanted:
        say(f"throughput ({transport})")
        async for point in throughput.throughput(stage, transport, effort):
            found.points.append(point)
            rate = point.contenders[KVXFERD].gb_per_s
            what = f"{point.shape}, {point.lists}, {in_bytes(point.size_bytes)}, {point.in_flight} in flight"
            say(f"  {what}: {rate:.2f} GB/s, {point.ratio_to_raw:.2f} of raw NIXL")


async def _rest(stage: Stage, effort: Effort, wanted: frozenset[str], found: Findings, say: Say) -> None:
    if "calls" in wanted:
        say("time inside pull()")
        found.calls = await calls.calls(stage, effort)
    if "behind" in wanted:
        say("small pulls behind a large one")
        found.behind = await behind.behind(stage, effort)
    if wanted & {"parallel", "idle"}:
        say("eight ranks")
        async with stage.pair(parallel.deployment(effort), baselines=False) as pair:
            found.parallel = await parallel.parallel(pair, effort)
            if "idle" in wanted:
                say("idle")
                daemon = stage.seats["sink"].pid
                found.idle = await idle.idle(daemon, len(pair.ranks), effort.idle_s)
