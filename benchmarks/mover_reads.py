"""Figures of the movers on this machine: `python -m benchmarks.mover_reads` (or with UCX_TLS=tcp)."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np

from kvxferd.bench.proc_stats import cpu_seconds, private_bytes, resident_bytes
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.wire.mover import Polling, SetPolling
from tests.support.mover_harness import Node, Served, Worker, bind, serve, sink, worker


async def cpu_share(movers: list[MoverHandle], seconds: float) -> float:
    before = [cpu_seconds(m.pid) for m in movers]
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    spent = sum(cpu_seconds(m.pid) - b for m, b in zip(movers, before, strict=True))
    return 100 * spent / (time.perf_counter() - began)


async def registrations() -> None:
    began = time.perf_counter()
    async with Node("m") as node:
        rank = worker("E")
        await bind(node, rank)
        print(f"registration, nothing started yet: {1e3 * (time.perf_counter() - began):.0f} ms")
        node.warm += [await node.fork() for _ in range(7)]
        times = []
        movers = []
        ranks = [worker("E") for _ in range(8)]
        for one in ranks[:7]:
            began = time.perf_counter()
            movers.append((await bind(node, one))[0])
            times.append(1e3 * (time.perf_counter() - began))
        print("registration, warm:", ", ".join(f"{t:.2f}" for t in times), "ms")
        node.warm += [await node.fork() for _ in range(8)]
        print(
            f"8 bound and 8 warm movers, idle: {await cpu_share(movers, 5):.3f} % of a core (the bound ones)"
        )
        pid = movers[0].pid
        print(f"memory of one, KiB: {private_bytes(pid) >> 10} private, {resident_bytes(pid) >> 10} resident")
        movers[0].send(SetPolling(on=True, token=1))
        await node.received(movers[0], Polling)
        print(f"one attended and not read, first second: {await cpu_share(movers[:1], 1):.1f} % of a core")
        print(f"one attended and not read, later: {await cpu_share(movers[:1], 10):.2f} % of a core")
        for one in (rank, *ranks):
            one.close()
    async with Node("m") as node:
        rank = worker("E")
        await bind(node, rank)
        began = time.perf_counter()
        await bind(node, rank)
        print(f"registration, no warm mover: {1e3 * (time.perf_counter() - began):.0f} ms")
        rank.close()


async def pulls(head_dim: int, num_blocks: int, label: str) -> None:
    async with Node("p") as there, Node("d") as here:
        ranks: list[Worker] = [worker(name, blocks=num_blocks, head_dim=head_dim, layers=4) for name in "PD"]
        source: Served = await serve(there, ranks[0])
        ranks[0].array[:] = 7
        ranks[1].array[:] = 1
        reader = await sink(here, ranks[1], [source])
        word = os.urandom(16)
        source.page.write(0, word)
        half = num_blocks // 2
        await asyncio.sleep(1.5)  # the source rests as long as it ever does
        first = await reader.outcome(reader.start([source], source.place(0, word), [0], [0]))
        print(f"{label}, first read of 1 block, connecting: {1e3 * (first.wire_s + first.fence_s):.1f} ms")
        best = None
        for shuffled in (False, True):
            theirs = list(range(half))
            if shuffled:
                np.random.default_rng(1).shuffle(theirs)
            fences = []
            for _ in range(8):
                number = reader.start([source], source.place(0, word), range(half), theirs)
                outcome = await reader.outcome(number)
                assert outcome.delivered, outcome
                fences.append(outcome.fence_s)
                if best is None or outcome.wire_s < best.wire_s:
                    best = outcome
            assert best is not None
            print(
                f"{label}{', scattered' if shuffled else ''}: {best.bytes >> 20} MiB in {best.runs} runs, "
                f"wire {1e3 * best.wire_s:.1f} ms = {best.bytes / best.wire_s / 1e9:.2f} GB/s, "
                f"expand {1e3 * best.expand_s:.2f} ms, fence {1e6 * min(fences):.0f} us"
            )
            best = None
        for one in ranks:
            one.close()


async def main() -> None:
    await registrations()
    await pulls(128, 2048, "4 layers x k, v; blocks of 8 KiB")
    await pulls(1024, 256, "4 layers x k, v; blocks of 64 KiB")


if __name__ == "__main__":
    asyncio.run(main())
