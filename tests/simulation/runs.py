"""Runs episodes, each in a process of its own, and several at once."""

from __future__ import annotations

import _thread
import faulthandler
import logging
import os
import random
import select
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import IO, Any

import msgspec

from tests.simulation import rare_states
from tests.simulation.checks import Check
from tests.simulation.episode import Episode, Plan, Result, Size
from tests.simulation.interposed import functions_with_clocks
from tests.simulation.kernel import close_all_but

STUCK_S = 100.0  # of real time: the episode's process shows where it is, and ends
STACK_BYTES = 1 << 20  # of a thread, of which an episode may have hundreds
LARGE_EVERY = 4  # one episode of so many is a large one
LARGE = Size(nodes=3, engines=6, faults=80)


def size_of(seed: int) -> Size:
    """Return how large the episode of a seed is."""
    return Size() if seed % LARGE_EVERY else LARGE


@dataclass
class _Run:
    seed: int
    pid: int
    result: IO[bytes]
    stacks: IO[bytes]


def start(plan: Plan, keeps_story: bool, core: int | None) -> _Run:
    """Start an episode in a process of its own, which the simulated kernel takes over."""
    functions_with_clocks()  # once for all episodes
    reading, writing = os.pipe()
    stacks = tempfile.TemporaryFile()  # noqa: SIM115  (`finish` closes it)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            logging.root.handlers.clear()  # the next line closes pytest's file
            close_all_but({0, 1, 2, writing, stacks.fileno()})  # those of other episodes
            if core is not None:
                os.sched_setaffinity(0, {core})  # of its threads one runs at a time
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # and hands over in one switch
            faulthandler.enable(stacks)
            faulthandler.dump_traceback_later(STUCK_S, exit=True, file=stacks)
            _thread.stack_size(STACK_BYTES)
            result = Episode(plan, keeps_story).run()
            result.met = rare_states.counts()
            with open(writing, "wb", closefd=False) as out:
                out.write(msgspec.msgpack.encode(result))
            status = 0
        except BaseException:
            import traceback

            stacks.write(traceback.format_exc().encode())
            stacks.flush()
        finally:
            os._exit(status)
    os.close(writing)
    return _Run(plan.seed, pid, open(reading, "rb"), stacks)


def finish(run: _Run) -> Result:
    """Return what a started episode has come to."""
    with run.result as inward, run.stacks:
        content = inward.read()
        _, status = os.waitpid(run.pid, 0)
        if content:
            return msgspec.msgpack.decode(content, type=Result)
        run.stacks.seek(0)
        stacks = run.stacks.read().decode(errors="replace")
    text = f"the episode's process ended with {status}, or was stuck:\n{_that_ran(stacks)}"
    return Result(run.seed, check=Check.HUNG.name, problem=text)


def _that_ran(stacks: str) -> str:
    """Return the stacks of threads but those that wait for the kernel."""
    blocks = [
        block for block in stacks.split("\n\n") if "in _await_baton" not in block and "_park" not in block
    ]
    return "\n\n".join(blocks)[:6000]


def run(plan: Plan, keeps_story: bool = False) -> Result:
    """Run one episode."""
    return finish(start(plan, keeps_story, None))


@dataclass
class Tally:
    """What all episodes came to."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    failed: list[Result] = field(default_factory=list)
    _digest: Any = field(default_factory=sha256)

    def add(self, result: Result) -> None:
        """Count an episode."""
        self.faults.update(result.faults)
        self.met.update(result.met)
        for name in ("in_flight", "switches", "wanted", "delivered", "late"):
            self.totals[name] += getattr(result, name)
        self.totals["episodes"] += 1
        self.virtual_s += result.virtual_s
        self._digest.update(result.digest.encode())
        if result.check:
            self.broken[result.check] += 1
            self.failed.append(result)

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
    running: deque[_Run] = deque()
    while True:
        is_enough = tally.faults.total() >= num_faults or len(tally.failed) >= max_failures or is_over()
        if is_enough and not running:
            return tally
        while len(running) < jobs and not is_enough:
            one = next(seeds)
            cores.rotate()
            running.append(start(Plan.draw(one, size or size_of(one)), False, cores[0]))
        select.select([running[0].result], [], [], None)
        result = finish(running.popleft())
        if not is_enough:
            tally.add(result)
            on_result(result)


def _seeds(seed: int) -> Iterator[int]:
    drawn = random.Random(seed)
    while True:
        yield drawn.getrandbits(48)
