"""``python -m tests.proofs.chaos.soak --minutes M --transfers N``: engines come and go; nothing may grow.

Small transfers at an even pace between two daemons, each engine under a new name every time it
starts. Samples are taken while that goes on, the last line is JSON. Exits 1 where a transfer was
wrong, where something is left at the end, or where memory, descriptors or processes grew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvxferd.layout import EngineSpec
from tests.proofs.chaos.audit import Auditor
from tests.support.cluster.engine import Engine, Read, Transfer
from tests.support.cluster.fleet import Fleet
from tests.support.cluster.node import Node
from tests.support.cluster.results import Tally, quantile
from tests.support.cluster.traffic import Traffic
from tests.support.nodes.processes import descendants, num_fds, rss_kib

FACTS: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 16, "block_tokens": 16, "num_blocks": 256}
MAX_TOKENS = 40
MAX_READS = 16
DEADLINE_S = 10.0
LEASE_S = 20.0
PREFILL_LIVES_S = 10.0
DECODE_LIVES_S = 45.0
SAMPLE_EVERY_S = 30.0
# Ended transfers are remembered for 600 s: growth until then is no leak, and nothing is judged by it.
SETTLED_S = 630.0
GROWTH_KIB = 6 << 10


class Soak:
    """Two nodes, an engine on each, and a clock."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.tally = Tally()
        self.fleet = Fleet(self.tally)
        self._rng = random.Random(seed)
        self._traffic = Traffic(self.fleet, self._rng, MAX_TOKENS)
        self._names = itertools.count(1)
        self._reading: list[Read] = []
        self.num_churns = 0
        self.latency_ms: list[float] = []
        self.samples: list[dict[str, Any]] = []
        self.began = time.monotonic()
        self.fleet.nodes += [Node(directory / name, {}) for name in ("p", "d")]
        assert self.fleet.pump_until(lambda: all(n.is_ready for n in self.fleet.nodes), 60.0)
        self.fleet.engines += [self._engine(0), self._engine(1)]

    def _engine(self, index: int) -> Engine:
        name = f"{('prefill', 'decode')[index]}-{next(self._names)}"
        spec = EngineSpec(name, "g", num_layers=2, num_kv_heads=2)
        return Engine(spec, [self.fleet.nodes[index]], FACTS | {"layout": ("HND", "NHD")[index]})

    def run(self, seconds: float, transfers: int) -> None:
        """Spread the transfers over the time."""
        born = [self.began, self.began]
        next_sample = self.began + SAMPLE_EVERY_S
        end = self.began + seconds
        while (now := time.monotonic()) < end or self.tally.delivered < transfers:
            if now > end + seconds / 2:
                self.tally.problem("hung", f"only {self.tally.delivered} transfers")
                return
            due = int(transfers * 1.02 * (now - self.began) / seconds)
            while self.tally.pulls < due and len(self._reading) < MAX_READS and self._start_one():
                pass
            for index, lives_s in enumerate((PREFILL_LIVES_S, DECODE_LIVES_S)):
                if now > born[index] + lives_s:
                    self._replace(index)
                    born[index] = time.monotonic()
            if now > next_sample:
                next_sample += SAMPLE_EVERY_S
                self._sample()
            self.fleet.pump(0.005)

    def _start_one(self) -> bool:
        source, sink = self.fleet.engines
        if not (source.is_registered and sink.is_registered) or len(source.transfers) >= 2 * MAX_READS:
            return False
        return self._traffic.publish(source, self._pull, LEASE_S) is not None

    def _pull(self, source: Engine, transfer: Transfer) -> None:
        sink = self.fleet.engines[1]
        if not sink.is_registered:
            source.unpublish(transfer)
            return
        read = self.fleet.read(source, sink, transfer, DEADLINE_S)
        self._reading.append(read)
        began = time.monotonic()

        def ended(read: Read) -> None:
            self._reading.remove(read)
            self.latency_ms.append((time.monotonic() - began) * 1e3)
            if not read.is_delivered:
                source.unpublish(transfer)

        read.on_end = ended

    def _replace(self, index: int) -> None:
        """An engine ends, one way or the other, and another takes its place."""
        old = self.fleet.engines[index]
        for worker in old.workers:
            if not worker.pipe.closed:
                inode = worker.inode
                worker.kill()
                self.fleet.forget(worker)
                self.fleet.watch_memory(old.name, inode, False)
        self.fleet.engines[index] = self._engine(index)
        self.num_churns += 1

    def _sample(self) -> None:
        sample: dict[str, Any] = {
            "at_s": round(time.monotonic() - self.began),
            "delivered": self.tally.delivered,
        }
        for node in self.fleet.nodes:
            status = node.status_if_any()
            assert status is not None
            parent = node.parent()
            sample[node.name] = {
                "rss_kib": rss_kib(node.pid),
                "parent_rss_kib": rss_kib(parent) if parent else 0,
                "fds": num_fds(node.pid),
                "processes": len(descendants(node.pid)),
                "leases": len(status["transfers"]),
                "grants": status["num_grants_held"],
                "remote_engines": sum(len(peer["engines"]) for peer in status["peers"]),
                "sessions": status["num_sessions"],
            }
        self.samples.append(sample)
        print(json.dumps(sample), file=sys.stderr, flush=True)

    def settled(self) -> list[dict[str, Any]]:
        """The samples since when nothing may grow; none in a short run."""
        return [sample for sample in self.samples if sample["at_s"] >= SETTLED_S]

    def check_growth(self) -> None:
        """Compare the settled part's first samples with its last ones."""
        settled = self.settled()
        if len(settled) < 4:
            return
        for node in ("p", "d"):
            for what, slack in (("rss_kib", GROWTH_KIB), ("parent_rss_kib", GROWTH_KIB), ("fds", 6)):
                first = min(sample[node][what] for sample in settled[:2])
                last = min(sample[node][what] for sample in settled[-2:])
                if last > first + slack:
                    self.tally.problem("leaked", f"{what} of {node} grew from {first} to {last}")

    def close(self) -> None:
        Auditor(self.fleet, self._traffic).audit()
        self._sample()
        for engine in self.fleet.engines:
            engine.kill()
        for node in self.fleet.nodes:
            for what in node.end():
                self.tally.problem("leaked", what)


def main() -> int:
    arguments = argparse.ArgumentParser(prog="chaos.soak", description=__doc__)
    arguments.add_argument("--minutes", type=float, default=30.0)
    arguments.add_argument("--transfers", type=int, default=100_000)
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvxferd-soak-") as directory:
        soak = Soak(Path(directory), given.seed)
        try:
            soak.run(given.minutes * 60, given.transfers)
            soak.check_growth()
        finally:
            soak.close()
    tally = soak.tally
    print(
        tally.line(
            given.seed,
            minutes=round((time.monotonic() - soak.began) / 60, 1),
            engines_replaced=soak.num_churns,
            latency_ms_p50=quantile(soak.latency_ms, 0.5),
            latency_ms_p99=quantile(soak.latency_ms, 0.99),
            first=soak.samples[0],
            settled=next(iter(soak.settled()), None),
            last=soak.samples[-1],
        )
    )
    return 0 if tally.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
