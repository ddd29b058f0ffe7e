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
import multiprocessing
import resource
import statistics
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import addressof, c_char
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from latency import start_daemon

from kvxferd import client, resident
from kvxferd.ids import AgentName, EngineId, Generation, RegionId
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.mover.transport.nixl import NixlTransport, import_library

NUM_BLOCKS, BLOCK_TOKENS = 512, 16  # 256 MiB in 8,192 runs of 32 KiB
LIMIT_S = 60.0
LEAST_S = 10e-6  # shorter than any time slice of another thread


def engine_of(name: str) -> tuple[EngineSpec, RankLayout]:
    """Return an engine of one rank."""
    spec = EngineSpec(EngineId(name), Generation("1"), num_layers=8, num_kv_heads=8)
    layout = attention_layout(
        spec=spec, num_kv_heads=8, head_dim=128, block_tokens=BLOCK_TOKENS, num_blocks=NUM_BLOCKS
    )
    return spec, layout


def blocks() -> dict[str, client.BlockList]:
    """Return all blocks in descending order, so that no two are neighbours."""
    return {"full": client.BlockList(ids=array("i", reversed(range(NUM_BLOCKS))))}


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


def other_side(socket: str, link: Connection) -> None:
    """Run the rank of the other process, with a child mover: it publishes and pulls as commanded."""
    spec, layout = engine_of("other")
    memory = SealedMemory.create(layout.regions[0].size_bytes)
    rank = client.connect(socket).register(engine=spec, layout=layout, regions={RegionId("kv"): memory})
    link.send("ready")
    while (command := link.recv()) is not None:
        name, ref = command
        if ref is None:
            link.send(rank.publish(name, blocks(), num_tokens=NUM_BLOCKS * BLOCK_TOKENS).to_json())
            continue
        rank.pull(ref, blocks(), num_tokens=NUM_BLOCKS * BLOCK_TOKENS, deadline_s=LIMIT_S)
        while not has_ended(rank):
            time.sleep(0.001)
        link.send("done")


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


def count_during(work: Callable[[], None]) -> tuple[float, list[float]]:
    """Run `work`, which blocks, on another thread, and count meanwhile."""
    thread = threading.Thread(target=work)
    thread.start()
    counted = count_lock_waits(lambda: not thread.is_alive())
    thread.join()
    return counted


def measure(socket: str, seconds: float, pulls: int) -> None:
    """Print a line for each of a mover's tasks."""
    # Everything is imported and run once first, because the measurement is of an engine that runs.
    spec, layout = engine_of("mine")
    page = mmap.mmap(-1, layout.regions[0].size_bytes)
    place = (addressof(c_char.from_buffer(page)), len(page))
    link, theirs = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(
        target=other_side, args=(socket, theirs), daemon=True
    )
    other.start()
    assert link.recv() == "ready"
    resident.register(client.connect(socket), spec, layout, {RegionId("kv"): place}).close()

    def for_a_while() -> Callable[[], bool]:
        end = time.perf_counter() + seconds
        return lambda: time.perf_counter() > end

    show("no mover", *count_lock_waits(for_a_while()))
    ranks: list[client.RankHandle] = []

    def register() -> None:
        connection = client.connect(socket)
        place_of = {RegionId("kv"): place}
        ranks.append(resident.register(connection, spec, layout, place_of, make_transport=MeteredTransport))

    show("registered", *count_during(register))
    rank = ranks[0]
    show("idle", *count_lock_waits(for_a_while()))
    for number in range(pulls):
        link.send((f"theirs-{number}", None))
        ref = link.recv()
        rank.pull(ref, blocks(), num_tokens=NUM_BLOCKS * BLOCK_TOKENS, deadline_s=LIMIT_S)
        show("pulls 256 MiB", *count_lock_waits(lambda: has_ended(rank)))
    for number in range(pulls):
        mine = rank.publish(f"mine-{number}", blocks(), num_tokens=NUM_BLOCKS * BLOCK_TOKENS).to_json()
        link.send((f"mine-{number}", mine))
        show("is read, 256 MiB", *count_lock_waits(link.poll))
        assert link.recv() == "done"
    show("closed", *count_during(rank.close))
    link.send(None)
    other.join()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="duration of a count that nothing else ends"
    )
    parser.add_argument("--pulls", type=int, default=3)
    options = parser.parse_args()
    with ExitStack() as stack:
        daemon = start_daemon(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        time.sleep(2.0)
        measure(daemon.worker_socket, options.seconds, options.pulls)


if __name__ == "__main__":
    main()
