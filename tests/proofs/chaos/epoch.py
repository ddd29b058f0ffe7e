"""One cluster's life: started, hurt again and again, audited, taken down."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvxferd.layout import EngineSpec
from kvxferd.mover.ucx_settings import tls_with_cuda
from tests.proofs.chaos.audit import PEACE_S, Auditor
from tests.proofs.chaos.cluster import Cluster
from tests.proofs.chaos.engine import Engine, Read, Transfer
from tests.proofs.chaos.faults import KINDS, Heal, Surgeon
from tests.proofs.chaos.node import Node
from tests.proofs.chaos.tally import Tally
from tests.proofs.chaos.traffic import LEASE_S, Traffic

START_S = 60.0
RECOVER_S = 40.0  # past this the cluster counts as hung
MAX_TRIES = 30
SLOW_MS = 4000.0  # worth a look
PROBE_EVERY_S = 0.1
MAX_PROBES = 3
PROBE_DEADLINE_S = 3.0
AUDIT_EVERY = 8  # rounds
MAX_TOKENS = 600
FACTS: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 32, "block_tokens": 16, "num_blocks": 192}


@dataclass(frozen=True)
class Shape:
    """Parallelism of the two engines. `spans`: prefill's second stage is on the decode node."""

    prefill: dict[str, int]
    decode: dict[str, int]
    spans: bool = False


SHAPES = (
    Shape({"tp_size": 2}, {"tp_size": 1}),
    Shape({"pp_size": 2}, {"tp_size": 1}, spans=True),
    Shape({"tp_size": 1}, {"tp_size": 2}),
    Shape({"tp_size": 1}, {"tp_size": 1}),
)
TRANSPORTS: dict[str, dict[str, str]] = {
    "default": {},  # CMA between movers of one user
    "tcp": {"UCX_TLS": tls_with_cuda("tcp")},
}

READS = ("covering", "direct", "auto")  # the setting mover.read


class Epoch:
    """`run` injects the faults; `close` ends everything and checks that it is gone."""

    def __init__(
        self,
        directory: Path,
        rng: random.Random,
        tally: Tally,
        shape: Shape,
        transport: str,
        read: str,
        sabotage: str = "",
        only: str = "",
    ) -> None:
        self._rng = rng
        self._tally = tally
        self._sabotage = sabotage
        self._kinds = {name: kind for name, kind in KINDS.items() if only in name}
        self.cluster = Cluster(tally)
        self._surgeon = Surgeon(self.cluster, rng)
        self.traffic = Traffic(self.cluster, rng, MAX_TOKENS)
        # A leak on purpose needs no patience; an event that was swallowed is missed at its deadline.
        self._auditor = Auditor(self.cluster, self.traffic, 6.0 if sabotage == "leak" else PEACE_S)
        environment = TRANSPORTS[transport] | {"KVXFERD_MOVER_READ": read}
        nodes = [Node(directory / name, environment) for name in ("p", "d")]
        self.cluster.nodes += nodes
        try:
            self._start(nodes, shape)
        except BaseException:
            self.close()
            raise

    def _start(self, nodes: list[Node], shape: Shape) -> None:
        assert self.cluster.pump_until(lambda: all(n.is_ready for n in nodes), START_S), "daemons not ready"
        home = nodes[0].endpoint if shape.spans else ""
        prefill = EngineSpec("prefill", "g", num_layers=4, num_kv_heads=8, home=home, **shape.prefill)
        decode = EngineSpec("decode", "g", num_layers=4, num_kv_heads=8, **shape.decode)
        stages = nodes if shape.spans else [nodes[0]]
        facts = FACTS | {"layout": "HND"}
        of_source = "unwritten" if self._sabotage == "unwritten" else ""
        self.cluster.engines.append(Engine(prefill, stages, facts, of_source))
        sabotage = self._sabotage if self._sabotage not in ("leak", "unwritten") else ""
        facts = FACTS | {"layout": "NHD", "block_tokens": 32, "num_blocks": 96}
        self.cluster.engines.append(Engine(decode, [nodes[1]], facts, sabotage))
        assert self.cluster.pump_until(lambda: all(e.is_registered for e in self.cluster.engines), START_S), (
            "engines not registered"
        )
        assert self._recover("start") is not None, "nothing is ever delivered"

    def run(self, num_faults: int) -> None:
        """Inject that many, in rounds of one to three, each round awaited until transfers work again."""
        until = self._tally.faults.total() + num_faults
        num_rounds = 0
        while (left := until - self._tally.faults.total()) > 0:
            self._round(min(left, self._rng.choice((1, 1, 1, 1, 2, 2, 3))))
            num_rounds += 1
            if num_rounds % AUDIT_EVERY == 0:
                self._auditor.audit()
        if self._sabotage == "leak":
            self._leak()
        self._auditor.audit()

    def _round(self, num_faults: int) -> None:
        self._surgeon.begin()
        self.requests(self._rng.uniform(0.0, 0.25))
        heals: list[Heal] = []
        kinds: list[str] = []
        longest = 0.0
        for _ in range(MAX_TRIES):  # a fault may find no victim that others have left
            if len(heals) == num_faults:
                break
            kind = self._rng.choices(list(self._kinds), [k.weight for k in self._kinds.values()])[0]
            heal = KINDS[kind].inject(self._surgeon)
            if heal is None:
                self.requests(0.02)
                continue
            heals.append(heal)
            kinds.append(kind)
            self._tally.faults[kind] += 1
            longest = max(longest, self._rng.uniform(*KINDS[kind].lasts_s))
            if len(heals) < num_faults:
                self.requests(self._rng.choice((0.0, 0.05, 0.2)))
        self.requests(longest)
        for heal in reversed(heals):
            heal()
        if not kinds:
            return
        name = kinds[0] if len(set(kinds)) == 1 else "several at once"
        took = self._recover(name)
        if took is not None and took > SLOW_MS:
            self._tally.slow.append(f"{took / 1e3:.1f} s after {', '.join(kinds)}")
        if took is None:
            self._tally.problem("hung", f"no transfer works {RECOVER_S} s after {kinds}")

    def requests(self, seconds: float) -> None:
        """Let them go on for that long."""
        until = time.monotonic() + seconds
        while True:
            self.traffic.step()
            self.cluster.pump(0.01)
            if time.monotonic() > until:
                return

    def replace(self, index: int, name: str) -> None:
        """An engine ends, and one of that name takes its place."""
        engine = self.cluster.engines[index]
        engine.spec = msgspec.structs.replace(engine.spec, engine_id=name)
        self._surgeon.restart(engine)

    # --- the next transfer works

    def _recover(self, kind: str) -> float | None:
        """Publish and pull anew until one is delivered; return the milliseconds since the fault was over."""
        began = time.monotonic()
        delivered: list[float] = []
        probing: list[Read] = []
        source, sink = self.cluster.engines[:2]

        def ended(read: Read) -> None:
            probing.remove(read)
            if read.is_delivered:
                delivered.append(time.monotonic())
            else:
                source.unpublish(read.transfer)

        def pull(_: Engine, transfer: Transfer) -> None:
            if not sink.is_registered:
                return
            read = self.cluster.read(source, sink, transfer, PROBE_DEADLINE_S)
            read.on_end = ended
            probing.append(read)

        next_probe = 0.0
        while not delivered and time.monotonic() < began + RECOVER_S:
            now = time.monotonic()
            if (
                now >= next_probe
                and len(probing) < MAX_PROBES
                and source.is_registered
                and sink.is_registered
            ):
                next_probe = now + PROBE_EVERY_S
                self.traffic.publish(source, pull, LEASE_S)
            self.cluster.pump(0.01)
        if not delivered:
            return None
        took = (delivered[0] - began) * 1e3
        if kind != "start":
            self._tally.recovery_ms[kind].append(took)
        return took

    def _leak(self) -> None:
        """Sabotage: a process outside the cluster's books registers and publishes on the prefill node."""
        lost = Engine(
            EngineSpec("forgotten", "g", num_layers=4, num_kv_heads=8),
            [self.cluster.nodes[0]],
            FACTS | {"layout": "HND"},
        )
        self.cluster.engines.append(lost)
        self.cluster.pump_until(lambda: lost.is_registered, START_S)
        self.traffic.publish(lost, lambda *_: None, 600.0)
        self.cluster.pump(1.0)
        self.cluster.engines.remove(lost)

    def close(self) -> None:
        for engine in self.cluster.engines:
            for worker in engine.workers:
                if not worker.pipe.closed:
                    worker.kill()
        for node in self.cluster.nodes:
            for what in node.end():
                self._tally.problem("leaked", what)
