"""How long, and how often, a resident mover keeps the engine's thread from the interpreter's lock.

This process is a worker whose engine thread never releases the lock by itself: it counts, in Python. When the
kernel reports a voluntary wait, it waited for the lock. The load of another process does not
count as one, though it makes waits longer. So a number that no load changes is printed too: the CPU time that
the mover's thread takes between two of the library's copies, which run without the lock.
A daemon, and a rank in another process, run beside it.
"""

from __future__ import annotations

import argparse
import mmap
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from ctypes import addressof, c_char
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from kvxferd import client, resident
from kvxferd.ids import AgentName, Rank, RegionId
from kvxferd.layout.presets import LayerKind, ModelFacts, deploy, key_and_value
from kvxferd.mover.transport.nixl import NixlTransport, import_library
from kvxferd.tooling.child_process import ChildProcess
from kvxferd.tooling.content import RequestBlocks
from kvxferd.tooling.daemon_process import DaemonProcess
from kvxferd.tooling.engine_process import EngineRank
from kvxferd.tooling.owned_process import stop_all

NUM_BLOCKS, BLOCK_TOKENS = 512, 16  # 256 MiB in 8,192 runs of 32 KiB
MODEL = ModelFacts("resident", 8, (LayerKind.FULL,) * 8, key_and_value(8, 128))
# All blocks in descending order, so that no two are neighbours.
REQUEST = RequestBlocks(
    0, {"full": np.arange(NUM_BLOCKS, dtype=np.int32)[::-1].copy()}, NUM_BLOCKS * BLOCK_TOKENS
)
LIMIT_S = 60.0
LEAST_S = 10e-6  # shorter than any time slice of another thread


def engine_of(name: str) -> tuple[Any, Any]:
    """Return spec and layout of an engine of one rank."""
    spec, layout = deploy(MODEL, num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, engine_id=name)[Rank(0, 0)]
    return msgspec.structs.replace(spec, publish_implies_ready=True), layout


class MeteredTransport(NixlTransport):
    """Records what its thread does between two copies."""

    between: ClassVar[list[float]] = []  # CPU seconds of the thread

    def __init__(self, agent: AgentName) -> None:
        super().__init__(import_library(), agent)
        copy, left_at = self._nixl.transfer, None

        def transfer(request: Any) -> Any:
            nonlocal left_at
            if left_at is not None:
                self.between.append(time.thread_time() - left_at)
            try:
                return copy(request)
            finally:
                left_at = time.thread_time()

        self._nixl.transfer = transfer


def has_ended(rank: client.RankHandle) -> bool:
    """Whether a pull has ended. Raises RuntimeError if it failed."""
    for event in rank.poll():
        if isinstance(event, client.Failed):
            raise RuntimeError(event.message)
        if isinstance(event, client.Delivered):
            return True
    return False


def count_lock_waits(until: Callable[[], bool]) -> tuple[float, list[float]]:
    """Count until `until` holds; return the seconds, and those of each wait for the lock."""
    found: list[float] = []
    began = last = time.perf_counter()
    switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    turns = 0
    while True:
        now = time.perf_counter()
        if now - last > LEAST_S:
            seen = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            if seen != switches:
                found.append(now - last)
            switches, now = seen, time.perf_counter()
        last, turns = now, turns + 1
        if not turns % 1000:
            if until():
                return now - began, found
            last = time.perf_counter()
            switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def format_distribution(found: list[float]) -> str:
    """Return a line with the distribution of durations."""
    us = sorted(value * 1e6 for value in found) or [0.0]
    p99 = us[min(len(us) - 1, len(us) * 99 // 100)]
    return f"us: median {statistics.median(us):6.0f}   p99 {p99:7.0f}   longest {us[-1]:7.0f}"


def show(what: str, seconds: float, found: list[float]) -> None:
    """Print one line, and another for what the mover did between its copies."""
    often = f"{len(found) / seconds:6.0f} waits/s   {format_distribution(found)}"
    print(f"{what:18} {seconds:6.2f} s {often}   {sum(found) / seconds:6.2%} of it")
    if MeteredTransport.between:
        between = MeteredTransport.between
        often = f"{len(between):6} turns between copies  {format_distribution(between)}"
        print(f"{'':18} {often}   of processor time")
        MeteredTransport.between.clear()


def count_during(work: Callable[[], object]) -> tuple[float, list[float]]:
    """Run `work`, which blocks, on another thread, and count meanwhile."""
    thread = threading.Thread(target=work)
    thread.start()
    counted = count_lock_waits(lambda: not thread.is_alive())
    thread.join()
    return counted


def measure(socket: str, other: ChildProcess[EngineRank], seconds: float, pulls: int) -> None:
    """Print a line for each of a mover's tasks. `other`: a rank in another process, with a child mover."""
    # Everything is imported and run once first, because the measurement is of an engine that runs.
    spec, layout = engine_of("mine")
    page = mmap.mmap(-1, layout.regions[0].size_bytes)
    place = {RegionId("kv"): (addressof(c_char.from_buffer(page)), len(page))}
    other.call(EngineRank.register, socket, *engine_of("other"))
    resident.register(client.connect(socket), spec, layout, place).close()

    def for_a_while() -> Callable[[], bool]:
        end = time.perf_counter() + seconds
        return lambda: time.perf_counter() > end

    show("no mover", *count_lock_waits(for_a_while()))
    ranks: list[client.RankHandle] = []

    def register() -> None:
        connection = client.connect(socket)
        ranks.append(resident.register(connection, spec, layout, place, make_transport=MeteredTransport))

    show("registered", *count_during(register))
    (rank,) = ranks
    blocks = {"full": client.BlockList(ids=REQUEST.ids["full"].data)}
    show("idle", *count_lock_waits(for_a_while()))
    for number in range(pulls):
        ref = other.call(EngineRank.publish, f"theirs-{number}", REQUEST)
        rank.pull(ref, blocks, REQUEST.num_tokens, deadline_s=LIMIT_S)
        show("pulls 256 MiB", *count_lock_waits(lambda: has_ended(rank)))
    for number in range(pulls):
        mine = rank.publish(f"mine-{number}", blocks, REQUEST.num_tokens)
        show("is read, 256 MiB", *count_during(partial(other.call, EngineRank.pull, mine, REQUEST)))
    show("closed", *count_during(rank.close))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="duration of a count that nothing else ends"
    )
    parser.add_argument("--pulls", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        daemon = DaemonProcess(Path(directory) / "node", ("--log-level", "warning"))
        other = ChildProcess(EngineRank, Path(directory) / "other.log")
        try:
            daemon.wait_ready()
            time.sleep(2.0)
            measure(daemon.worker_socket, other, options.seconds, options.pulls)
        finally:
            stop_all([other, daemon])


if __name__ == "__main__":
    main()
