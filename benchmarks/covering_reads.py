"""Covering reads against direct ones: `nice python -m benchmarks.covering_reads` (or with UCX_TLS=tcp).

One decode rank of TP 2 (NHD, blocks of 32 tokens) reads two prefill ranks of TP 4 (HND, blocks of 16 tokens):
runs of 256 bytes. Two movers read the same bytes in turn, one directly and one by stretches, and a third one
reads as many from equal layouts. The ratio is what the figures are for: a shared machine changes the times.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
from dataclasses import dataclass, field

import numpy as np

from benchmarks.mover_reads import cpu_s
from kvxferd.ids import EngineId, Generation
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.mover.read_ways import READ_VARIABLE
from kvxferd.wire.mover import PullOutcome
from tests.support.mover_harness import Node, Served, Sink, Worker, serve, sink

NUM_HEADS, HEAD_DIM, NUM_LAYERS = 8, 128, 32
TOKEN_BYTES = 2 * NUM_LAYERS * NUM_HEADS * HEAD_DIM * 2  # of all ranks


@dataclass
class Reader:
    """One mover that reads, and how its pulls went."""

    name: str
    node: Node
    sink: Sink
    sources: list[Served]
    outcomes: list[PullOutcome] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)  # of the reading mover, all its threads

    async def pull(self, ours: list[int], theirs: list[int], tokens: int, word: bytes) -> None:
        before = cpu_s(self.sink.mover.pid)
        number = self.sink.start(self.sources, self.sources[0].place(0, word), ours, theirs, tokens)
        outcome = await self.sink.outcome(number, 60.0)
        assert outcome.delivered, outcome
        self.outcomes.append(outcome)
        self.processor_s.append(cpu_s(self.sink.mover.pid) - before)

    def milliseconds(self, first: int = 0) -> list[float]:
        return [1e3 * one.wire_s for one in self.outcomes[first:]]


def rank(engine: str, tp: int, tp_rank: int, layout: str, block_tokens: int, tokens: int) -> Worker:
    spec = EngineSpec(
        EngineId(engine), Generation("g"), NUM_LAYERS, tp_size=tp, tp_rank=tp_rank, num_kv_heads=NUM_HEADS
    )
    made = attention_layout(
        spec=spec,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        block_tokens=block_tokens,
        num_blocks=2 * tokens // block_tokens,
        layout=layout,
    )
    memory = SealedMemory.create(made.regions[0].size_bytes, "kvxferd-bench")
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    return Worker(spec, made, memory, process, os.pidfd_open(process.pid))


def describe(name: str, reader: Reader, num_bytes: int) -> str:
    times = sorted(reader.milliseconds(1))
    middle = times[len(times) // 2]
    last = reader.outcomes[-1]
    return (
        f"{name}: first {reader.milliseconds()[0]:.0f} ms, then {middle:.1f} ms (best {times[0]:.1f}) = "
        f"{num_bytes / middle / 1e6:.2f} GB/s; {last.runs} runs, posts {1e3 * last.post_s:.1f} ms, "
        f"expand {1e3 * last.expand_s:.1f} ms; "
        f"{1e3 * sum(reader.processor_s[1:]) / len(times):.0f} ms of processor"
    )


async def compare(mebibytes: int, rounds: int) -> None:
    tokens = 2 * (mebibytes << 20) // TOKEN_BYTES
    num_bytes = tokens * TOKEN_BYTES // 2
    rng = np.random.default_rng(1)
    theirs = rng.permutation(2 * tokens // 16)[: tokens // 16].tolist()
    ours = rng.permutation(2 * tokens // 32)[: tokens // 32].tolist()
    prefill = [rank("P", 4, r, "HND", 16, tokens) for r in (0, 1)]
    whole = rank("Q", 2, 0, "NHD", 32, tokens)
    decode = {name: rank(name, 2, 0, "NHD", 32, tokens) for name in ("direct", "covering", "equal")}
    word = os.urandom(16)
    async with (
        Node("p", size=3) as there,
        Node("d") as here,
        Node("c", environment={READ_VARIABLE: "covering"}) as over,
    ):
        sources = [await serve(there, one) for one in (*prefill, whole)]
        for seed, source in enumerate(sources):
            source.worker.fill(seed)
            source.page.write(0, word)
        readers = {}
        for name, one in decode.items():
            of = sources[2:] if name == "equal" else sources[:2]
            node = over if name == "covering" else here
            readers[name] = Reader(name, node, await sink(node, one, of), of)
        for _ in range(rounds + 1):
            for name, reader in readers.items():
                await reader.pull(ours, ours if name == "equal" else theirs, tokens, word)
        assert (decode["direct"].array == decode["covering"].array).all()
        link = os.environ.get("UCX_TLS", "cma")
        print(f"{num_bytes >> 20} MiB, HND/16 TP 4 to NHD/32 TP 2, {os.cpu_count()} cores, {link}")
        for name, reader in readers.items():
            print(describe(name, reader, num_bytes))
        pairs = zip(readers["direct"].milliseconds(1), readers["covering"].milliseconds(1), strict=True)
        print(f"direct by covering, median of pairs: {np.median([a / b for a, b in pairs]):.1f}")
        pairs = zip(readers["equal"].milliseconds(1), readers["covering"].milliseconds(1), strict=True)
        print(f"equal layouts by covering, median of pairs: {np.median([a / b for a, b in pairs]):.2f}")
        for source in sources:
            source.close()
    for one in (*prefill, whole, *decode.values()):
        one.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    asyncio.run(compare(options.mebibytes, options.rounds))
