"""Everything that runs: nodes, engines, pulls under way, and what is waited for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from tests.proofs.chaos.engine import Engine, Pull, Read, Transfer, Worker
from tests.proofs.chaos.node import Node
from tests.proofs.chaos.tally import Tally
from tests.support.nodes.processes import mappers_of

GRACE_S = 3.0  # past a deadline, on a machine with more to do than it has cores
QUIET_S = 15.0  # a quarantine ends within quiesce_s (5 s) and the death of a mover
UNMAP_S = 1.0
LATEST_UNMAP_S = 6.0
VIGIL_EVERY_S = 0.04


@dataclass
class Vigil:
    """Memory of a dead owner that must be unmapped soon."""

    what: str
    inode: int
    died: float
    is_exempt: bool  # a process that would have to act is stopped by another fault


class Cluster:
    """`pump` is the runner's only way to wait: whatever happens meanwhile is taken note of."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.nodes: list[Node] = []
        self.engines: list[Engine] = []
        self.pulls: dict[int, Pull] = {}
        self.doubtful: dict[int, tuple[Pull, float]] = {}  # not safe to reuse: since when
        self.on_published: Callable[[Engine, Transfer], None] = lambda engine, transfer: None
        self._numbers = itertools.count(1)
        self._vigils: list[Vigil] = []
        self._next_look = 0.0
        self._later: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Do that once so much time has passed."""
        self._later.append((time.monotonic() + seconds, act))

    def workers(self) -> list[Worker]:
        """Every rank."""
        return [worker for engine in self.engines for worker in engine.workers]

    # --- time

    def pump(self, seconds: float) -> None:
        """Let that much time pass."""
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            self._hear(max(0.0, min(left, 0.02)))
            self._look()
            self._act()
            if left <= 0:
                return

    def _act(self) -> None:
        now = time.monotonic()
        due = [act for at, act in self._later if at <= now]
        self._later = [(at, act) for at, act in self._later if at > now]
        for act in due:
            act()

    def pump_until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        """Return whether it came true in time."""
        until = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > until:
                return False
            self.pump(0.02)
        return True

    def _hear(self, timeout_s: float) -> None:
        pipes = {worker.pipe: worker for worker in self.workers() if not worker.pipe.closed}
        for pipe in wait(list(pipes), timeout_s):
            worker = pipes[pipe]
            try:
                while worker.pipe.poll():
                    self._take(worker, *worker.pipe.recv())
            except (EOFError, OSError):
                if worker.process.is_alive():
                    continue
                worker.pipe.close()
                self.tally.problem("hung", f"a worker of {worker.engine.name} ended by itself")

    def _take(self, worker: Worker, kind: str, *args: Any) -> None:
        match kind:
            case "born":
                worker.inode = args[1]
            case "registered":
                worker.is_registered = True
            case "refused":
                self.tally.mischief[f"register again: {args[0]}"] += 1
            case "published":
                if transfer := worker.engine.transfers.get(args[0]):
                    transfer.ref = args[1]
                    self.on_published(worker.engine, transfer)
            case "released":
                worker.engine.released(worker, args[0])
            case "full":
                pull = self.pulls.pop(args[0])
                self._ended(pull, "full")
            case "ended":
                self._pull_ended(*args)
            case "extend refused":
                self.tally.mischief[f"extend refused: {args[0]}"] += 1
            case "quiesced":
                self.doubtful.pop(args[0], None)
            case "overwritten":
                self.tally.wrong_items += args[0]
                self.tally.problems.append(
                    f"wrong_items: {args[0]} safe blocks written at {worker.node.name}"
                )
            case "disconnected":
                self.tally.problem("hung", f"a session of {worker.engine.name} is over: {args}")

    # --- pulls

    def read(
        self,
        source: Engine,
        sink: Engine,
        transfer: Transfer,
        deadline_s: float,
        is_progressive: bool = False,
    ) -> Read:
        """Have every rank of an engine pull a transfer."""
        read = Read(source, transfer)
        for worker in sink.workers:
            number = next(self._numbers)
            now = time.monotonic()
            paused_s = worker.paused_s(now)
            self.pulls[number] = Pull(number, read, worker, now, deadline_s, paused_s, is_progressive)
            read.pending.add(number)
            what = (transfer.ref, transfer.request, transfer.num_tokens)
            worker.tell("start_pull", number, *what, deadline_s, is_progressive)
            self.tally.pulls += 1
            self.tally.progressive["pulls"] += is_progressive
        return read

    def _pull_ended(self, number: int, outcome: str, wrong: int, safe: bool, took_s: float) -> None:
        pull = self.pulls.pop(number, None)
        if pull is None:
            return  # it was counted as hung
        self.tally.outcomes[outcome] += 1
        if outcome == "delivered":
            self.tally.delivered += 1
            self.tally.progressive["delivered"] += pull.is_progressive
        else:
            self.tally.failed += 1
        if wrong:
            self.tally.wrong_items += wrong
            self.tally.problems.append(f"wrong_items: {wrong} in {pull.read.transfer.name}")
        paused = pull.worker.paused_s(time.monotonic()) - pull.stopped_s
        if took_s > pull.limit_s + GRACE_S + paused:
            what = f"{pull.read.transfer.name} took {took_s:.1f} s of {pull.limit_s:.1f} s"
            self.tally.problem("hung", what)
        if not safe:
            self.tally.unsafe += 1
            self.doubtful[number] = (pull, time.monotonic())
        self._ended(pull, outcome)

    def _ended(self, pull: Pull, outcome: str) -> None:
        if outcome == "full":
            self.tally.pulls -= 1
            self.tally.progressive["pulls"] -= pull.is_progressive
        pull.read.pending.discard(pull.number)
        pull.read.outcomes.append(outcome)
        if not pull.read.pending and pull.read.on_end is not None:
            pull.read.on_end(pull.read)

    def forget(self, worker: Worker) -> None:
        """The worker is dead, and its pulls with it."""
        for pull in [p for p in self.pulls.values() if p.worker is worker]:
            del self.pulls[pull.number]
            self.tally.orphaned += 1
            self._ended(pull, "orphaned")
        self.doubtful = {n: entry for n, entry in self.doubtful.items() if entry[0].worker is not worker}

    # --- what must not last

    def watch_memory(self, what: str, inode: int, is_exempt: bool) -> None:
        """Its owner has just died: nobody may map it for long."""
        self._vigils.append(Vigil(what, inode, time.monotonic(), is_exempt))

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._look_at_memory()
        for pull in list(self.pulls.values()):
            paused = pull.worker.paused_s(now) - pull.stopped_s
            # The worker itself says how long it took; this is for one that never says.
            if now > pull.began + pull.limit_s + 2 * GRACE_S + paused:
                del self.pulls[pull.number]
                self.tally.problem("hung", f"pull of {pull.read.transfer.name} never ended")
                self._ended(pull, "hung")
        for number, (pull, since) in list(self.doubtful.items()):
            node = pull.worker.node
            if node.num_stopped or pull.worker.stopped_at is not None:
                self.doubtful[number] = (pull, now)
            elif now > since + QUIET_S:
                del self.doubtful[number]
                self.tally.problem("hung", f"blocks of {pull.read.transfer.name} never quiet")
        self._next_look = time.monotonic() + VIGIL_EVERY_S

    def _look_at_memory(self) -> None:
        for vigil in list(self._vigils):
            began = time.monotonic()
            if not mappers_of(vigil.inode, or_holders=False):
                self._vigils.remove(vigil)
                took = began - vigil.died
                if not vigil.is_exempt:
                    self.tally.unmap_ms.append(took * 1e3)
                    if took > UNMAP_S:
                        self.tally.late_unmaps += 1
                        self.tally.problems.append(f"late: {vigil.what} unmapped after {took:.2f} s")
            elif began > vigil.died + LATEST_UNMAP_S and not vigil.is_exempt:
                self._vigils.remove(vigil)
                mappers = mappers_of(vigil.inode, or_holders=False)
                self.tally.problem("leaked", f"{vigil.what} is mapped by {mappers}")
