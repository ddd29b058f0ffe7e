"""An engine of worker processes as the runner sees it: killed and started again, a generation each time."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvxferd.client import make_ref
from kvxferd.layout import EngineSpec
from tests.proofs.chaos.agent import Birth, Chunk, run
from tests.proofs.chaos.node import MAX_HOLD_S, Node

_GENERATIONS = itertools.count(1)
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass
class Transfer:
    """One that an engine publishes."""

    name: str
    request: int
    ids: list[int]
    num_tokens: int
    lease_s: float
    ref: dict[str, Any] | None = None
    grown: int = -1  # tokens that its ranks were told to write so far, -1 before the publish
    nonce: str | None = None
    is_taken_back: bool = False


@dataclass
class Pull:
    """One rank's pull."""

    number: int
    read: Read
    worker: Worker
    began: float
    deadline_s: float
    stopped_s: float  # of its worker, when it began
    is_progressive: bool = False

    @property
    def limit_s(self) -> float:
        """Within how long it has ended; a progressive one may wait for its source before."""
        return self.deadline_s + (MAX_HOLD_S if self.is_progressive else 0.0)


@dataclass
class Read:
    """An engine's reading of a transfer: a pull on each rank."""

    source: Engine
    transfer: Transfer
    pending: set[int] = field(default_factory=set)
    outcomes: list[str] = field(default_factory=list)
    on_end: Callable[[Read], None] | None = None

    @property
    def is_delivered(self) -> bool:
        return not self.pending and all(outcome == "delivered" for outcome in self.outcomes)


class Worker:
    """One rank's process."""

    def __init__(self, engine: Engine, node: Node, birth: Birth) -> None:
        self.engine = engine
        self.node = node
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=run, args=(theirs, birth), daemon=True)
        self.process.start()
        theirs.close()
        self.inode = 0
        self.is_registered = False
        self.stopped_s = 0.0
        self.stopped_at: float | None = None

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, *command: Any) -> None:
        with suppress(OSError):
            self.pipe.send(command)

    def paused_s(self, now: float) -> float:
        """How long it has been stopped in all."""
        return self.stopped_s + (now - self.stopped_at if self.stopped_at is not None else 0.0)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped_at = time.monotonic()

    def go_on(self) -> None:
        if self.stopped_at is not None:
            self.stopped_s += time.monotonic() - self.stopped_at
            self.stopped_at = None
        if self.process.is_alive():
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.is_registered = False
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


class Engine:
    """All ranks of one generation; `start` makes the next."""

    def __init__(
        self, spec: EngineSpec, nodes: list[Node], facts: dict[str, Any], sabotage: str = ""
    ) -> None:
        self.spec = spec
        self.nodes = nodes  # of each pipeline stage
        self.facts = facts
        self.sabotage = sabotage
        self.workers: list[Worker] = []  # its ranks
        self.transfers: dict[str, Transfer] = {}
        self.free: list[int] = []
        self.start()

    @property
    def name(self) -> str:
        return str(self.spec.engine_id)

    @property
    def publisher(self) -> Worker:
        """The rank whose session publishes."""
        return self.workers[0]

    @property
    def is_registered(self) -> bool:
        return all(worker.is_registered for worker in self.workers)

    @property
    def is_paused(self) -> bool:
        return any(worker.stopped_at is not None for worker in self.workers)

    def start(self) -> None:
        self.generation = f"g{next(_GENERATIONS)}"
        self.transfers.clear()
        self.free = list(range(self.facts["num_blocks"] // 2))
        self.workers = []
        for rank in self.spec.ranks():
            node = self.nodes[rank.pp_rank]
            spec = msgspec.structs.replace(
                self.spec, generation=self.generation, pp_rank=rank.pp_rank, tp_rank=rank.tp_rank
            )
            sabotage, self.sabotage = self.sabotage, ""
            self.workers.append(Worker(self, node, Birth(node.worker_socket, spec, self.facts, sabotage)))

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    # --- publishing

    def open(self, name: str, request: int, num_tokens: int, lease_s: float) -> Transfer | None:
        """Prepare a transfer, which `grow` publishes; None where the blocks do not suffice."""
        count = -(-num_tokens // self.facts["block_tokens"])
        if len(self.free) < count:
            return None
        ids, self.free = self.free[:count], self.free[count:]
        self.transfers[name] = Transfer(name, request, ids, num_tokens, lease_s)
        return self.transfers[name]

    def name_ahead(self, transfer: Transfer) -> None:
        """Give it its reference before it is published, as a router does."""
        ref = make_ref(self.nodes[0].endpoint, self.name, self.generation, transfer.name)
        transfer.ref, transfer.nonce = ref.to_dict(), ref.nonce

    def grow(self, transfer: Transfer, end: int) -> None:
        """Have every rank write up to that token and report it. Nothing once it is over or taken back."""
        if self.transfers.get(transfer.name) is not transfer or transfer.is_taken_back:
            return
        for worker in self.workers:
            chunk = Chunk(
                transfer.name, transfer.request, transfer.ids, transfer.num_tokens, transfer.grown, end,
                worker is self.publisher, transfer.lease_s, transfer.nonce,
            )  # fmt: skip
            worker.tell("grow", chunk)
        transfer.grown = end

    def unpublish(self, transfer: Transfer) -> None:
        if transfer.ref is None or self.transfers.get(transfer.name) is not transfer:
            return
        transfer.is_taken_back = True
        if transfer.grown == -1:
            self.released(self.publisher, transfer.name)  # no rank has heard of it
        else:
            self.publisher.tell("unpublish", transfer.ref)

    def released(self, worker: Worker, name: str) -> None:
        """A worker heard that a transfer is over. The publisher's word is the engine's."""
        if worker is not self.publisher or name not in self.transfers:
            return
        self.free += self.transfers.pop(name).ids
        for other in self.workers:
            if other is not worker:
                other.tell("drop", name)
