"""Requests that never stop: published, pulled, cancelled, withdrawn, abandoned, at random moments."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable

from tests.support.cluster.engine import Engine, Read, Transfer
from tests.support.cluster.fleet import Fleet

MAX_LIVE = 5  # transfers of one engine that are not released
LEASE_S = 5.0
DEADLINES_S = (0.6, 1.5, 3.0, 6.0)


class Traffic:
    """Call `step` often. Each transfer has a sink and a fate, chosen when it is published."""

    def __init__(self, fleet: Fleet, rng: random.Random, max_tokens: int) -> None:
        self._fleet = fleet
        self._rng = rng
        self._max_tokens = max_tokens
        self._requests = itertools.count(1)
        self._order = itertools.count()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._then: dict[str, Callable[[Engine, Transfer], None]] = {}  # by transfer, once published
        self.is_paused = False
        fleet.on_published = self._published

    def publish(
        self, engine: Engine, then: Callable[[Engine, Transfer], None], lease_s: float = LEASE_S
    ) -> Transfer | None:
        """Publish something; `then` is called when its reference is there."""
        request = next(self._requests)
        transfer = engine.publish(f"t{request}", request, self._rng.randint(1, self._max_tokens), lease_s)
        if transfer is not None:
            self._then[transfer.name] = then
        return transfer

    def _published(self, engine: Engine, transfer: Transfer) -> None:
        if then := self._then.pop(transfer.name, None):
            then(engine, transfer)

    def step(self) -> None:
        """Start something new where there is room, and do what is due."""
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
        if self.is_paused:
            return
        for engine in self._fleet.engines:
            others = [e for e in self._fleet.engines if e is not engine and not e.is_paused]
            if not others or engine.is_paused or len(engine.transfers) >= MAX_LIVE:
                continue
            # Mostly prefill to decode; the other way for later turns.
            if engine is self._fleet.engines[0] or self._rng.random() < 0.05:
                sink = self._rng.choice(others)
                self.publish(engine, lambda source, t, sink=sink: self._live(source, sink, t))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), act))

    def _live(self, source: Engine, sink: Engine, transfer: Transfer) -> None:
        mischief, rng = self._fleet.tally.mischief, self._rng
        if rng.random() < 0.1:
            sink.workers[0].tell("prepare", transfer.ref)
        if rng.random() < 0.05:
            mischief["never pulled"] += 1
            self._after(0.2, lambda: source.unpublish(transfer))
            return
        if not sink.is_registered:
            source.unpublish(transfer)
            return
        read = self._fleet.read(source, sink, transfer, rng.choice(DEADLINES_S))
        numbers = list(read.pending)
        read.on_end = lambda read: self._ended(source, sink, read)
        fate, delay = rng.random(), rng.choice([0.0, 0.001, 0.005, 0.02, 0.1])
        if fate < 0.06:
            mischief["cancelled"] += 1
            number = rng.choice(numbers)
            workers = {p.number: p.worker for p in self._fleet.pulls.values()}
            if number in workers:
                self._after(delay, lambda: workers[number].tell("cancel", number))
        elif fate < 0.12:
            mischief["unpublished"] += 1
            self._after(delay, lambda: source.unpublish(transfer))
        elif fate < 0.16:
            mischief["abandoned"] += 1
            worker = rng.choice(sink.workers)
            self._after(delay, lambda: worker.tell("abandon", transfer.ref))

    def _ended(self, source: Engine, sink: Engine, read: Read) -> None:
        if read.is_delivered or "orphaned" in read.outcomes:
            return
        fate = self._rng.random()
        if fate < 0.2 and read.transfer.name in source.transfers and sink.is_registered:
            self._fleet.tally.mischief["pulled again"] += 1
            self._fleet.read(source, sink, read.transfer, self._rng.choice(DEADLINES_S))
        elif fate < 0.9:
            source.unpublish(read.transfer)
