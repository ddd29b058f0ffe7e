"""An engine through all of its lives: which processes it has, and what it has them publish and pull."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tests.simulation.shapes import Deployment, draw_request, split_publish
from tests.simulation.store import MemoryKind
from tests.simulation.transfers import LEASE_S, Transfer, Wanted, ids_of
from tests.simulation.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.world import World

MAX_PUBLISH_DRAWS = 10  # another request comes soon
LEASES_S = (LEASE_S, 4.0, 2.0, 12.0) * 5 + (0.2,)  # the last may be over before the blocks are written
PREPARE_SHARE, PREPARE_GROWING_SHARE = 0.3, 0.8  # of requests that are announced before they are pulled
ALL_READY_SHARE = 0.1  # of those that grow, all tokens are written as they are published
NEARLY_ALL_SHARE = 0.4  # of those that grow: all but one token is written in the first step
LEAVE_S = 6.0  # within which a process that closes its session has ended


@dataclass(frozen=True)
class EngineShape:
    """What an engine is. The first rank's node is the home of all."""

    name: str
    nodes: tuple[str, ...]  # of each rank
    is_source: bool
    deployment: Deployment
    has_scheduler: bool
    says_ready: bool  # each rank reports what it has written
    has_gpu: bool  # ranks write and free blocks in work that is done some time after its launch
    grows: bool = False  # some transfers are published before they are whole
    memory: MemoryKind = MemoryKind.SHARED  # RESIDENT: its movers are threads of its ranks
    uid: int = 0

    @property
    def can_grow(self) -> bool:
        """Whether it reports what is written: a scheduler whose ranks report nothing cannot."""
        return self.grows and (self.says_ready or not self.has_scheduler)


class Engine:
    """One engine through all of its lives. Its processes have no other way to talk than this object."""

    def __init__(self, world: World, shape: EngineShape) -> None:
        self.world = world
        self.shape = shape
        self.rng = random.Random(world.rng.random())
        self.life = 0
        self.ranks: list[Worker] = []
        self.scheduler: Worker | None = None
        self.transfers: dict[str, Transfer] = {}  # those that are not over
        self.by_id: dict[str, Transfer] = {}  # of this life
        self.past: list[Transfer] = []
        self.is_up = False
        self._num_published = 0

    @property
    def num_ranks(self) -> int:
        """How many ranks it has."""
        return len(self.shape.deployment.ranks)

    @property
    def workers(self) -> list[Worker]:
        """All processes."""
        return self.ranks if self.scheduler is None else [*self.ranks, self.scheduler]

    @property
    def publisher(self) -> Worker:
        """Who publishes."""
        return self.scheduler or self.ranks[0]

    @property
    def generation(self) -> str:
        """The present life's."""
        return f"g{self.life}"

    @property
    def reader(self) -> str:
        """The present life as others name it."""
        return f"{self.shape.name} {self.generation}"

    # --- its processes

    def start(self) -> None:
        """Start all processes, as a new generation."""
        self.life += 1
        self.is_up = True
        self.transfers, self.by_id, self._num_published = {}, {}, 0
        self.ranks = [self._start_rank(rank) for rank in range(self.num_ranks)]
        self.scheduler = None
        if self.shape.has_scheduler and self.shape.is_source:
            self.scheduler = Worker(self, "scheduler", self.shape.nodes[0])

    def _start_rank(self, number: int) -> Worker:
        shape = self.shape
        rank = sorted(shape.deployment.ranks)[number]
        held = shape.deployment.ranks[rank]
        spec = replace(
            held.spec,
            generation=self.generation,
            home=self.world.endpoint_of(shape.nodes[0]) if len(set(shape.nodes)) > 1 else "",
            publish_implies_ready=shape.is_source and not shape.says_ready,
        )
        return Worker(self, f"{rank.pp_rank}.{rank.tp_rank}", shape.nodes[number], spec, held)

    def die(self) -> None:
        """All processes are gone."""
        self.is_up = False
        for worker in self.workers:
            worker.kill()
        self.past += self.transfers.values()
        self.transfers = {}

    def replace_rank(self, number: int) -> None:
        """A rank's process dies, and another takes its place in the same generation."""
        self.ranks[number].kill()
        self.ranks[number] = self._start_rank(number)

    def scale(self, overlap_s: float) -> None:
        """Have another generation take over, while this one goes on for a while."""
        old = self.workers
        self.past += self.transfers.values()
        self.start()
        for worker in old:
            if self.rng.random() < 0.5:
                self.world.after(overlap_s, worker.kill)
            else:
                self.world.after(overlap_s, worker.do, worker.leave)
                self.world.after(overlap_s + LEAVE_S, worker.kill)

    @property
    def is_ready(self) -> bool:
        """Whether every process is registered, and awake."""
        return self.is_up and all(worker.is_ready for worker in self.workers)

    # --- as a source

    def publish(self, num_readers: int, grows: bool | None = None, num_tokens: int = 0) -> Transfer | None:
        """Write a request and publish it, some while they are written; None where that cannot be now."""
        if grows is None:
            grows = not self.world.fabric.is_hurried and self.rng.random() < 0.8
        if not self.is_ready:
            return None
        deployment = self.shape.deployment
        used = ids_of(transfer.lists for transfer in self.transfers.values())
        free = [block for block in range(deployment.num_blocks) if block not in used]
        sizes = (num_tokens,) if num_tokens else (1, 2, 3, 5, 7, 8, 12, 16)
        for _ in range(MAX_PUBLISH_DRAWS):
            num_tokens = self.rng.choice(sizes)
            if (lists := draw_request(self.rng, deployment, num_tokens, free)) is not None:
                break
        else:
            return None
        steps = [num_tokens]
        if self.shape.can_grow and grows:
            before = self.rng.sample(range(num_tokens), min(num_tokens, 2))
            if self.rng.random() < NEARLY_ALL_SHARE:
                before = [num_tokens - 1]  # of which much can be read
            steps = sorted({*before, num_tokens})
            if self.rng.random() < ALL_READY_SHARE and not self.shape.says_ready:
                steps = [num_tokens, num_tokens]
        parts = split_publish(self.rng, deployment, lists, steps)
        self._num_published += 1
        transfer = Transfer(
            self.world.take_number(),
            f"t{self._num_published}",
            lists,
            num_tokens,
            num_readers,
            self.rng.choice(LEASES_S),
            list(self.workers),
            self.publisher,
            steps,
            parts,
        )
        self.transfers[transfer.transfer_id] = self.by_id[transfer.transfer_id] = transfer
        transfer.publisher.do(lambda: transfer.publisher.publish(transfer))
        return transfer

    def all_named(self, transfer_id: str) -> list[Transfer]:
        """The transfers of that id, of every generation."""
        return [one for one in (*self.past, *self.transfers.values()) if one.transfer_id == transfer_id]

    def forget(self, transfer: Transfer) -> None:
        """Every process knows that a transfer is over: its blocks are free."""
        if self.transfers.get(transfer.transfer_id) is transfer:  # and not a later life's of that id
            del self.transfers[transfer.transfer_id]
            self.past.append(transfer)

    # --- as a sink

    def pull(self, transfer: Transfer, deadline_s: float | None = None) -> None:
        """Have every rank pull a transfer; some announce it first."""
        prepares = self.rng.random() < (PREPARE_SHARE if len(transfer.steps) == 1 else PREPARE_GROWING_SHARE)
        delay_s = self.rng.choice((0.0, 0.002, 0.05, 0.5)) if prepares else 0.0
        for worker in self.ranks if self.is_ready else ():
            if prepares:
                worker.do(lambda worker=worker: worker.prepare(transfer))
            self.world.after(delay_s, worker.do, partial(worker.pull, transfer, Wanted(), deadline_s))
