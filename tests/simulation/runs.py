"""Runs episodes, each in a process of its own, and several at once."""

from __future__ import annotations

import _thread
import faulthandler
import gc
import logging
import os
import random
import resource
import select
import shutil
import signal
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from statistics import quantiles
from typing import IO, Any

import msgspec

from tests.simulation import rare_states
from tests.simulation.checks import Check
from tests.simulation.episode import Episode, Plan, Result, Size
from tests.simulation.interposed import functions_with_clocks
from tests.simulation.kernel import SimulationError, close_all_but

STUCK_S = 100  # of processor time, after which the episode's process shows where it is, and ends
STANDS_STILL_S = 1800.0  # of real time: it waits for nothing; another program may have the machine for long
STACK_BYTES = 1 << 20  # of a thread, of which an episode may have hundreds
LARGE_EVERY = 4  # one episode of so many is a large one
LARGE = Size(nodes=3, engines=6, faults=80)


def size_of(seed: int) -> Size:
    """Return how large the episode of a seed is."""
    return Size() if seed % LARGE_EVERY else LARGE


@dataclass
class _Run:
    pid: int
    result: IO[bytes]
    stacks: IO[bytes]
    directory: str  # of its files


def start(work: Callable[[], bytes], core: int | None, stuck_s: int = STUCK_S) -> _Run:
    """Start an episode, or another work, in a process of its own, which the simulated kernel takes over."""
    functions_with_clocks()  # once for all episodes
    reading, writing = os.pipe()
    stacks = tempfile.TemporaryFile()  # noqa: SIM115  (`finish` closes it)
    directory = tempfile.mkdtemp(prefix="kvxferd-simulation-", dir="/dev/shm")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            tempfile.tempdir = directory
            gc.disable()  # a collection would close one process's descriptors in another
            logging.root.handlers.clear()  # the next line closes pytest's file
            close_all_but({0, 1, 2, writing, stacks.fileno()})  # those of other episodes
            if core is not None:
                os.sched_setaffinity(0, {core})  # of its threads one runs at a time
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # and hands over in one switch
            faulthandler.enable(stacks)
            faulthandler.dump_traceback_later(STANDS_STILL_S, exit=True, file=stacks)
            faulthandler.register(signal.SIGXCPU, file=stacks, chain=True)
            resource.setrlimit(resource.RLIMIT_CPU, (stuck_s, stuck_s + 5))
            _thread.stack_size(STACK_BYTES)
            found = work()
            with open(writing, "wb", closefd=False) as out:
                out.write(found)
            status = 0
        except BaseException:
            import traceback

            stacks.write(traceback.format_exc().encode())
            stacks.flush()
        finally:
            os._exit(status)
    os.close(writing)
    return _Run(pid, open(reading, "rb"), stacks, directory)


def finish(run: _Run) -> bytes:
    """Return what a work has found. Raises SimulationError where its process has ended, or was stuck."""
    with run.result as inward, run.stacks:
        content = inward.read()
        _, status = os.waitpid(run.pid, 0)
        shutil.rmtree(run.directory, ignore_errors=True)
        if content:
            return content
        run.stacks.seek(0)
        stacks = run.stacks.read().decode(errors="replace")
    raise SimulationError(f"the process ended with {status}, or was stuck:\n{_that_ran(stacks)}")


def _that_ran(stacks: str) -> str:
    """Return the stacks of threads but those that wait for the kernel."""
    blocks = [
        block for block in stacks.split("\n\n") if "in _await_baton" not in block and "_park" not in block
    ]
    return "\n\n".join(blocks)[:6000]


def run(plan: Plan, keeps_story: bool = False) -> Result:
    """Run one episode."""
    return _result_of(plan, start(partial(_run, plan, keeps_story), None))


def _run(plan: Plan, keeps_story: bool, measures: bool = False) -> bytes:
    result = Episode(plan, keeps_story, measures).run()
    result.met = rare_states.counts()
    return msgspec.msgpack.encode(result)


def _result_of(plan: Plan, run: _Run) -> Result:
    try:
        return msgspec.msgpack.decode(finish(run), type=Result)
    except SimulationError as error:
        return Result(plan.seed, check=Check.HUNG.name, problem=str(error))


@dataclass
class Tally:
    """What all episodes came to."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    took_s: dict[str, list[float]] = field(default_factory=dict)
    virtual_s: float = 0.0
    failed: list[Result] = field(default_factory=list)
    _digest: Any = field(default_factory=sha256)

    def add(self, result: Result) -> None:
        """Count an episode."""
        self.faults.update(result.faults)
        self.met.update(result.met)
        for check, seconds in result.took_s.items():
            self.took_s.setdefault(check, []).extend(seconds)
        for name in ("in_flight", "switches", "wanted", "delivered", "late"):
            self.totals[name] += getattr(result, name)
        self.totals["episodes"] += 1
        self.virtual_s += result.virtual_s
        self._digest.update(result.digest.encode())
        if result.check:
            self.broken[result.check] += 1
            self.failed.append(result)

    def times(self) -> list[str]:
        """Return the lines of a table: what took how long since the last fault of those whom it concerns."""
        lines = ["| promise | times | p50 s | p99 s | most s |", "| --- | --- | --- | --- | --- |"]
        for name, seconds in sorted(self.took_s.items()):
            if len(seconds) > 1:
                p50, *_, p99 = quantiles(seconds, n=100)[49:]
                cells = (Check[name].value, len(seconds), f"{p50:.2f}", f"{p99:.2f}", f"{max(seconds):.2f}")
                lines.append(f"| {' | '.join(map(str, cells))} |")
        return lines

    def fields(self, elapsed_s: float) -> dict[str, Any]:
        """Return the line of JSON."""
        return {
            "seed": self.seed,
            "faults": self.faults.total(),
            "faults_by_kind": dict(sorted(self.faults.items())),
            **dict(self.totals),
            "virtual_s": round(self.virtual_s, 1),
            "seconds": round(elapsed_s, 1),
            "faults_per_s": round(self.faults.total() / elapsed_s, 1),
            "broken": dict(self.broken),
            "digest": self._digest.hexdigest(),
            "failed_episodes": [result.seed for result in self.failed],
        }


def run_many(
    seed: int,
    num_faults: int,
    *,
    size: Size | None = None,
    measures: bool = False,
    jobs: int = 1,
    max_failures: int = 1,
    on_result: Callable[[Result], None] = lambda result: None,
    is_over: Callable[[], bool] = lambda: False,
) -> Tally:
    """Run episodes until so many faults have struck, so many episodes have failed, or `is_over`.

    They are counted in the order of their seeds, however long each takes.
    """
    tally = Tally(seed)
    seeds = _seeds(seed)
    cores = deque(sorted(os.sched_getaffinity(0)))
    running: dict[IO[bytes], tuple[Plan, int, _Run]] = {}  # with its core, by what it writes its result to
    ended: dict[int, Result] = {}  # by seed
    uncounted: deque[int] = deque()  # seeds, in their order
    while True:
        while True:
            is_enough = tally.faults.total() >= num_faults or len(tally.failed) >= max_failures or is_over()
            if is_enough or not uncounted or uncounted[0] not in ended:
                break
            result = ended.pop(uncounted.popleft())
            tally.add(result)
            on_result(result)
        if is_enough:
            for plan, _, run in running.values():
                os.kill(run.pid, signal.SIGKILL)
                _result_of(plan, run)
            for result in ended.values():
                if result.check:  # it was found, whatever its turn
                    tally.add(result)
                    on_result(result)
            return tally
        while len(running) < jobs:
            one = next(seeds)
            uncounted.append(one)
            plan = Plan.draw(one, size or size_of(one))
            cores.rotate()
            used = Counter(core for _, core, _ in running.values())
            core = min(cores, key=used.__getitem__)
            run = start(partial(_run, plan, False, measures), core)
            running[run.result] = plan, core, run
        for readable in select.select(list(running), [], [])[0]:
            plan, _, run = running.pop(readable)
            ended[plan.seed] = _result_of(plan, run)


def _seeds(seed: int) -> Iterator[int]:
    drawn = random.Random(seed)
    while True:
        yield drawn.getrandbits(48)
