"""Random messages lost, doubled, delayed and reordered; random deaths; clocks that jump.

Whatever happens: nothing delivered holds a wrong byte, every pull ends once within its deadline,
nobody writes blocks that were said to be safe, and when it is over nothing is left.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvxferd.core import Settings
from kvxferd.wire import worker as wk
from tests.support.simulation import Envelope, Mover, Worker, World

TOKENS = 11
STEPS = 120
SETTINGS = Settings(lease_s=6.0, max_hold_s=20.0, tombstone_s=30.0, acknowledge_for_s=20.0, quiesce_s=2.0)


class Mischief:
    """One run from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(seed, SETTINGS)
        self.world.receives_deliveries = seed % 2 == 1
        self.world.covers = seed % 4 >= 2
        self.world.hold_network = True
        self.counts: Counter[str] = Counter()
        self.content: dict[str, tuple[list[int], int]] = {}  # transfer -> source ids and seed
        self.refs: list = []
        self.pulls: list[tuple[Worker, int, list[int], str, float]] = []
        self.checked: set[tuple[int, int]] = set()
        for name in ("p", "d"):
            self.world.host(name)
        self.start_engine("p", "HND")
        self.start_engine("d", "NHD")

    def start_engine(self, host: str, layout: str) -> None:
        self.generation = getattr(self, "generation", 0) + 1
        name = {"p": "prefill", "d": "decode"}[host]
        self.world.engine(self.world.hosts[host], name, layout, generation=f"g{self.generation}")
        self.world.deliver()

    def worker(self, host: str) -> Worker:
        ready = [w for w in self.world.hosts[host].workers.values() if w.connected and w.spec]
        return ready[-1]

    def movers(self) -> list[Mover]:
        return [m for h in self.world.hosts.values() for m in h.movers.values() if m.alive]

    # --- things that happen

    def publish(self) -> None:
        source = self.worker("p")
        free = [b for b in range(32) if not any(b in ids for ids, _ in self.content.values())]
        if len(free) < 3:
            return
        number = len(self.refs)
        ids = self.rng.sample(free, 3)
        source.fill(ids, TOKENS, seed=number)
        self.content[f"t{number}"] = (ids, number)
        self.refs.append(source.publish(f"t{number}", ids, TOKENS))

    def pull(self) -> None:
        sink = self.worker("d")
        busy = {b for w, t, ids, _, _ in self.pulls if w is sink and not self.is_free(w, t) for b in ids}
        free = [b for b in range(32) if b not in busy]
        if not self.refs or len(free) < 3:
            return
        ref = self.rng.choice(self.refs[-4:])
        ids = self.rng.sample(free, 3)
        if self.rng.random() < 0.2:
            sink.say(wk.Prepare(ref=ref))
        deadline = self.rng.choice([0.5, 3.0, 10.0])
        ticket = sink.pull(ref, ids, TOKENS, deadline_s=deadline)
        self.pulls.append((sink, ticket, ids, ref.transfer_id, self.world.now + deadline))

    def is_free(self, worker: Worker, ticket: int) -> bool:
        ended = worker.ended(ticket)
        quiet = any(q.ticket == ticket for q in worker.heard(wk.Quiesced))
        return (
            not worker.connected
            or isinstance(ended, wk.Delivered)
            or quiet
            or bool(ended and ended.safe_to_reuse)
        )

    def cancel(self) -> None:
        if self.pulls:
            worker, ticket, *_ = self.rng.choice(self.pulls[-3:])
            if worker.connected:
                worker.say(wk.Cancel(ticket=ticket))

    def unpublish(self) -> None:
        if self.refs:
            self.worker("p").say(wk.Unpublish(transfer_id=self.rng.choice(self.refs[-4:]).transfer_id))

    def reuse(self) -> None:
        """The source fills what was released with other content at once."""
        for worker in self.world.hosts["p"].workers.values():
            gone = {m.transfer_id for m in worker.heard(wk.Released)} | {
                m.transfer_id for m in worker.heard(wk.PublishRefused)
            }
            for transfer in gone & self.content.keys():
                ids, _ = self.content.pop(transfer)
                worker.fill(ids, TOKENS, seed=10_000 + self.rng.randrange(1000))

    def network(self) -> None:
        """Some messages arrive, in whatever order; some are lost, some come twice."""
        queue = self.world.network
        for _ in range(self.rng.randint(1, 6)):
            if not queue:
                return
            index = self.rng.choice([0, 0, 0, self.rng.randrange(len(queue))])
            envelope: Envelope = queue[index]
            del queue[index]
            fate = self.rng.random()
            if fate < 0.05:
                self.counts["lost"] += 1
                continue
            if fate < 0.15:
                self.counts["doubled"] += 1
                queue.insert(self.rng.randrange(len(queue) + 1), envelope)
            self.world.arrive(envelope)

    def movers_work(self) -> None:
        for mover in self.movers():
            mover.hold = self.rng.random() < 0.5
            if self.rng.random() < 0.7:
                mover.copy()
            if self.rng.random() < 0.7:
                mover.finish()

    def time(self) -> None:
        self.world.advance(self.rng.choice([0.01, 0.1, 0.5, 2.5]))

    def kill_mover(self) -> None:
        if self.movers() and self.rng.random() < 0.15:
            self.counts["movers killed"] += 1
            self.rng.choice(self.movers()).die()

    def kill_worker(self) -> None:
        if self.rng.random() < 0.1:
            host, layout = self.rng.choice([("p", "HND"), ("d", "NHD")])
            worker = self.worker(host)
            self.counts["workers killed"] += 1
            worker.close()
            if host == "p":
                self.content.clear()
            self.start_engine(host, layout)

    def step(self) -> None:
        acts = [self.publish, self.pull, self.pull, self.cancel, self.unpublish, self.movers_work]
        acts += [self.movers_work, self.network, self.network, self.network, self.time, self.kill_mover]
        self.rng.choice([*acts, self.kill_worker])()
        self.reuse()
        self.check()

    # --- what must hold

    def check(self) -> None:
        for worker, ticket, ids, transfer, deadline in self.pulls:
            ended = worker.ended(ticket)
            key = (worker.session, ticket)
            if isinstance(ended, wk.Delivered) and key not in self.checked:
                self.checked.add(key)
                wrong = worker.num_wrong(ids, TOKENS, seed=int(transfer[1:]))
                assert wrong == 0, f"{transfer} was delivered with {wrong} wrong units"
            if worker.connected:
                assert ended is not None or self.world.now <= deadline, f"{transfer} outlived its deadline"

    def settle(self) -> None:
        """Peace: everything arrives, movers work, time passes."""
        for mover in self.movers():
            mover.hold = False
        self.world.hold_network = False
        for _ in range(60):
            for mover in self.movers():
                while mover.is_busy:
                    mover.copy()
                    mover.finish()
            self.world.deliver()
            self.world.advance(1.0)
            self.check()

    def leftovers(self) -> list[str]:
        found = []
        for host in self.world.hosts.values():
            node = host.node
            found += [f"{host.name}: pull {p.pull_id} {p.phase}" for p in node.pulls.running()]
            found += [f"{host.name}: transfer {t}" for t in node.published.table.live]
            found += [f"{host.name}: grant {g}" for g in node.published.table.by_grant]
            found += [f"{host.name}: holds {n}" for n in node.grant_client.num_grants().values() if n]
            found += [f"{host.name}: {len(node.peer_requests)} questions"] if len(node.peer_requests) else []
            found += [f"{host.name}: tombstone {t}" for t in node.published.table.tombstones]
        return found


@pytest.mark.parametrize("seed", range(150))
def test_mischief(seed):
    run = Mischief(seed)
    for _ in range(STEPS):
        run.step()
    run.settle()
    for worker, ticket, _, transfer, _ in run.pulls:
        assert run.is_free(worker, ticket), f"{transfer} never ended or is quarantined for ever"
    assert run.leftovers() == []


@pytest.mark.slow
def test_mischief_really_happens():
    """The runs above lose, double, kill, deliver and fail; else they would prove nothing."""
    total: Counter[str] = Counter()
    for seed in range(30):
        run = Mischief(seed)
        for _ in range(STEPS):
            run.step()
        run.settle()
        total += run.counts
        records = [record for host in run.world.hosts.values() for record in host.records]
        total["retried"] += sum(getattr(record, "retried", False) for record in records)
        for worker, ticket, *_ in run.pulls:
            ended = worker.ended(ticket)
            total[type(ended).__name__] += 1
            if isinstance(ended, wk.Failed):
                total[ended.code] += 1
                total["unsafe"] += not ended.safe_to_reuse
    wanted = ["lost", "doubled", "movers killed", "workers killed", "Delivered", "Failed", "unsafe"]
    wanted += ["released", "deadline", "cancelled", "retried"]
    assert all(total[name] > 0 for name in wanted), total


@pytest.mark.slow
def test_the_check_can_fail():
    """Without the fence, the same mischief delivers wrong bytes: so the check is no ornament."""
    wrong = 0
    for seed in range(40):
        run = Mischief(seed)
        run.world.blind = True
        try:
            for _ in range(STEPS):
                run.step()
            run.settle()
        except AssertionError as error:
            wrong += "wrong units" in str(error)
    assert wrong > 0
