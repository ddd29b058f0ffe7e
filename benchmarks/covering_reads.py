"""Covering reads against direct ones: `nice python -m benchmarks.covering_reads` (or with UCX_TLS=tcp).

Four readers in one run read the same number of bytes in turn: directly, as the mover chooses (`auto`), and
both again from a source of their own layout. The ratios are what the figures are for: a shared machine
changes the times. Each reader has a mover of its own, and reads random blocks.

    direct_by_auto       how many times as long direct reads take: medians of pairs
    equal_by_auto        the speed of reads between layouts that differ, by that between equal ones
    misprediction_p90    the larger of predicted by measured time and its inverse, of pulls of 1 MiB and
                         more, after eight of the pair; 90 % of them are below
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from benchmarks.mover_reads import cpu_s
from kvxferd.ids import EngineId, Generation
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.wire.mover import LoadRemote, PullOutcome, ReadWay
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


class Side(NamedTuple):
    """The layout of one engine."""

    tp: int
    layout: str
    block_tokens: int


class Case(NamedTuple):
    """Who reads from whom. The reader is rank 0."""

    name: str
    prefill: Side
    decode: Side


CASES = (
    Case("HND/16 TP 4 to NHD/32 TP 2", Side(4, "HND", 16), Side(2, "NHD", 32)),
    Case("NHD/32 TP 4 to HND/16 TP 2", Side(4, "NHD", 32), Side(2, "HND", 16)),
    # A quarter of each token's heads: stretches would read four times as many bytes.
    Case("NHD/16 TP 1 to NHD/16 TP 4", Side(1, "NHD", 16), Side(4, "NHD", 16)),
)
NUM_LEARNING = 8  # pulls of a pair, before its predictions count
MIN_PREDICTED_BYTES = 1 << 20


def make_ranks(engine: str, side: Side, ranks: list[int], tokens: int) -> list[Worker]:
    return [rank(engine, side.tp, one, side.layout, side.block_tokens, tokens) for one in ranks]


def shuffled(side: Side, tokens: int) -> list[int]:
    num_blocks = tokens // side.block_tokens
    return np.random.default_rng(side.block_tokens).permutation(2 * num_blocks)[:num_blocks].tolist()


async def reader_of(name: str, node: Node, one: Worker, sources: list[Served]) -> Reader:
    made = await sink(node, one, sources)
    for source in sources:
        agent, metadata, (region,) = source.mover.agent, source.bound.metadata, source.bound.regions
        made.mover.send(LoadRemote(agent=agent, metadata=metadata, word=region.address))
    return Reader(name, node, made, sources)


def ratio(above: Reader, below: Reader) -> float:
    pairs = zip(above.milliseconds(1), below.milliseconds(1), strict=True)
    return float(np.median([a / b for a, b in pairs]))


def mispredictions(reader: Reader) -> list[float]:
    pulls = [(one.predicted_s, one.wire_s) for one in reader.outcomes[NUM_LEARNING:] if one.predicted_s]
    return [max(predicted / took, took / predicted) for predicted, took in pulls]


def describe(reader: Reader) -> str:
    times = sorted(reader.milliseconds(1))
    last = reader.outcomes[-1]
    covered = sum(one.covered_bytes for one in reader.outcomes) / sum(one.bytes for one in reader.outcomes)
    return (
        f"  {reader.name}: first {reader.milliseconds()[0]:.1f} ms, then {times[len(times) // 2]:.1f}, "
        f"best {times[0]:.1f}; {last.runs} runs, {100 * covered:.0f} % covered, "
        f"posts {1e3 * last.post_s:.1f}, expand {1e3 * last.expand_s:.1f}, "
        f"predicted {1e3 * last.predicted_s:.1f}; "
        f"{1e3 * float(np.median(reader.processor_s[1:])):.0f} ms of processor"
    )


async def compare(case: Case, mebibytes: float, rounds: int) -> dict[str, object]:
    tokens = case.decode.tp * int(mebibytes * (1 << 20)) // TOKEN_BYTES
    num_bytes = tokens * TOKEN_BYTES // case.decode.tp
    ranks = list(range(max(1, case.prefill.tp // case.decode.tp)))
    theirs, ours = shuffled(case.prefill, tokens), shuffled(case.decode, tokens)
    prefill = make_ranks("P", case.prefill, ranks, tokens)
    equal = make_ranks("Q", case.decode, [0], tokens)
    names = ("direct", "auto", "equal direct", "equal auto")
    decode = {name: make_ranks(name.replace(" ", "-"), case.decode, [0], tokens)[0] for name in names}
    # Fragmented: another order than the source's, so that neighbours do not merge.
    same = np.random.default_rng(7).permutation(ours).tolist()
    word = os.urandom(16)
    async with (
        Node("p", size=3) as there,
        Node("d", size=2) as here,
        Node("a", size=2, read_way=ReadWay.AUTO) as choosing,
    ):
        sources = [await serve(there, one) for one in (*prefill, *equal)]
        for seed, source in enumerate(sources):
            source.worker.fill(seed)
            source.page.write(0, word)
        readers = {}
        for name, one in decode.items():
            of = sources[-1:] if name.startswith("equal") else sources[:-1]
            readers[name] = await reader_of(name, choosing if name.endswith("auto") else here, one, of)
        for _ in range(rounds + 1):
            for name, reader in readers.items():
                await reader.pull(ours, same if name.startswith("equal") else theirs, tokens, word)
        assert (decode["direct"].array == decode["auto"].array).all()
        assert (decode["equal direct"].array == decode["equal auto"].array).all()
        for source in sources:
            source.close()
    for one in (*prefill, *equal, *decode.values()):
        one.close()
    link = os.environ.get("UCX_TLS", "cma")
    print(f"{case.name}, {num_bytes / (1 << 20):g} MiB, {rounds} rounds, {os.cpu_count()} cores, {link}")
    for reader in readers.values():
        print(describe(reader))
    wrong = mispredictions(readers["auto"]) + mispredictions(readers["equal auto"])
    result = {
        "case": case.name,
        "mebibytes": num_bytes / (1 << 20),
        "link": link,
        "direct_by_auto": round(ratio(readers["direct"], readers["auto"]), 2),
        "equal_by_auto": round(ratio(readers["equal direct"], readers["auto"]), 2),
        "equal_direct_by_equal_auto": round(ratio(readers["equal direct"], readers["equal auto"]), 2),
        "processor_direct_by_auto": round(
            sum(readers["direct"].processor_s[1:]) / sum(readers["auto"].processor_s[1:]), 2
        ),
        "misprediction_p90": round(float(np.percentile(wrong, 90)), 2)
        if wrong and num_bytes >= MIN_PREDICTED_BYTES
        else None,
    }
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mebibytes", type=float, nargs="+", default=[64, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", type=int, nargs="+", default=range(len(CASES)), help="by number, from 0")
    options = parser.parse_args()
    for number in options.case:
        for size in options.mebibytes:
            asyncio.run(compare(CASES[number], size, options.rounds))
