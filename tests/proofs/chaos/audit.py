"""Peace: requests stop, and whatever is left then has leaked."""

from __future__ import annotations

from typing import Any

from tests.proofs.chaos.cluster import Cluster
from tests.proofs.chaos.node import POOL_SIZE, Node
from tests.proofs.chaos.traffic import Traffic
from tests.support.nodes.processes import num_fds

PEACE_S = 25.0  # leases of 5 s, renewed at most once more, questions given up after 4 s
FDS_SLACK = 6


class Auditor:
    """Remembers how many descriptors were open the first time; later there may be no more."""

    def __init__(self, cluster: Cluster, traffic: Traffic, peace_s: float = PEACE_S) -> None:
        self._cluster = cluster
        self._traffic = traffic
        self._peace_s = peace_s
        self._fds: dict[str, int] = {}

    def audit(self) -> None:
        """Bring everything to rest, count what is left."""
        cluster = self._cluster
        self._traffic.is_paused = True
        cluster.pump_until(lambda: not cluster.pulls and not cluster.doubtful, PEACE_S)
        for engine in cluster.engines:
            for transfer in list(engine.transfers.values()):
                engine.unpublish(transfer)
        cluster.pump_until(lambda: not self._leftovers(), self._peace_s)
        for what in self._leftovers():
            cluster.tally.problem("leaked", what)
        self._check_fds()
        self._traffic.is_paused = False

    def _leftovers(self) -> list[str]:
        found = [
            f"{e.name}: {t.name} is not released" for e in self._cluster.engines for t in e.transfers.values()
        ]
        for node in self._cluster.nodes:
            found += self._left_at(node)
        return found

    def _left_at(self, node: Node) -> list[str]:
        status = node.status_if_any()
        if status is None:
            return [f"{node.name}: does not answer"]
        # A member's rank whose daemon died with it stays known at its engine's home for 600 s: nobody
        # can say that it is gone for good. It is no leak, and holds nothing.
        local = [e for e in status["engines"] if any(rank["state"] != "remote" for rank in e["ranks"])]
        ranks = [worker for worker in self._cluster.workers() if worker.node is node]
        counts: dict[str, tuple[Any, int]] = {
            "transfers": (len(status["transfers"]), 0),
            "pulls": (len(status["pulls"]), 0),
            "quarantined pulls": (status["num_quarantined"], 0),
            "grants held": (status["num_grants_held"], 0),
            "sessions": (status["num_sessions"], len(ranks)),
            "engines": (len(local), len({worker.engine.name for worker in ranks})),
            "movers": (len(node.movers()), len(ranks) + POOL_SIZE),
            "zombies": (len(node.zombies()), 0),
            "abandoned shm directories": (len(node.abandoned_shm()), 0),
        }
        return [
            f"{node.name}: {have} {what}, not {want}" for what, (have, want) in counts.items() if have != want
        ]

    def _check_fds(self) -> None:
        counts = {f"daemon {node.name}": num_fds(node.pid) for node in self._cluster.nodes}
        for engine in self._cluster.engines:
            for worker in engine.workers:
                counts[f"worker of {engine.name} {worker.pid}"] = num_fds(worker.pid)
        for what, count in counts.items():
            least = self._fds.setdefault(what, count)
            if count > least + FDS_SLACK:
                self._cluster.tally.problem("leaked", f"{what}: {count} descriptors, first {least}")
