"""Requests that never stop: published, pulled, cancelled, withdrawn, abandoned, at random moments."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from tests.proofs.chaos.cluster import Cluster
from tests.proofs.chaos.engine import Engine, Read, Transfer

MAX_LIVE = 5  # transfers of one engine that are not released
LEASE_S = 5.0
DEADLINES_S = (0.6, 1.5, 3.0, 6.0)
GROWING = 0.35  # the share of transfers that grow
GROWING_TOKENS = (300, 800)  # several pieces of 1 MiB at most
RENDEZVOUS = 0.3  # of those that grow: the reference is there before the publish
PROGRESSIVE = 0.3  # of the pulls of a whole transfer
PROGRESSIVE_GROWING = 0.8
CHUNKS_S = (0.0, 0.005, 0.02, 0.1, 0.3)  # between two chunks


class Traffic:
    """Call `step` often. Each transfer has a sink and a fate, chosen when it is published."""

    def __init__(self, cluster: Cluster, rng: random.Random, max_tokens: int) -> None:
        self._cluster = cluster
        self._rng = rng
        self._max_tokens = max_tokens
        self._requests = itertools.count(1)
        self._then: dict[str, Callable[[Engine, Transfer], None]] = {}  # by transfer, once published
        self.is_paused = False
        cluster.on_published = self._published

    def publish(
        self, engine: Engine, then: Callable[[Engine, Transfer], None], lease_s: float = LEASE_S
    ) -> Transfer | None:
        """Publish something; `then` is called when its reference is there."""
        request = next(self._requests)
        transfer = engine.open(f"t{request}", request, self._rng.randint(1, self._max_tokens), lease_s)
        if transfer is not None:
            engine.grow(transfer, transfer.num_tokens)
            self._then[transfer.name] = then
        return transfer

    def _published(self, engine: Engine, transfer: Transfer) -> None:
        if then := self._then.pop(transfer.name, None):
            then(engine, transfer)

    def step(self) -> None:
        """Start something new where there is room."""
        if self.is_paused:
            return
        for engine in self._cluster.engines:
            others = [e for e in self._cluster.engines if e is not engine and not e.is_paused]
            if not others or engine.is_paused or len(engine.transfers) >= MAX_LIVE:
                continue
            # Mostly prefill to decode; the other way for later turns.
            if engine is self._cluster.engines[0] or self._rng.random() < 0.05:
                sink = self._rng.choice(others)
                if self._rng.random() < GROWING and engine.is_registered:
                    self._grow(engine, sink)
                else:
                    self.publish(engine, lambda source, t, sink=sink: self._live(source, sink, t))

    def _grow(self, source: Engine, sink: Engine) -> None:
        """Publish something before it is whole; some of it is asked for before that, or taken back midway."""
        rng, counts = self._rng, self._cluster.tally.progressive
        request, tokens = next(self._requests), rng.randint(*GROWING_TOKENS)
        transfer = source.open(f"t{request}", request, tokens, LEASE_S)
        if transfer is None:
            return
        counts["transfers"] += 1
        ends = [*sorted(rng.randrange(tokens) for _ in range(rng.randint(1, 5))), tokens]
        at, taken_back_s = 0.0, 0.0
        is_rendezvous = rng.random() < RENDEZVOUS
        if is_rendezvous:
            at = rng.choice(CHUNKS_S)
        takes_back = rng.randrange(len(ends)) if rng.random() < 0.12 else -1
        for i, end in enumerate(ends):
            self._cluster.later(at, lambda end=end: source.grow(transfer, end))
            at += rng.choice(CHUNKS_S)
            if i == takes_back:
                taken_back_s = at
        if takes_back >= 0:
            counts["taken back"] += 1
            self._cluster.later(taken_back_s, lambda: source.unpublish(transfer))
        if is_rendezvous:
            counts["rendezvous"] += 1
            source.name_ahead(transfer)
            self._live(source, sink, transfer)
        else:
            self._then[transfer.name] = lambda source, t: self._live(source, sink, t)

    def _read(self, source: Engine, sink: Engine, transfer: Transfer) -> Read:
        share = PROGRESSIVE if transfer.grown == transfer.num_tokens else PROGRESSIVE_GROWING
        # Only a progressive pull may come before the publish.
        is_progressive = transfer.grown == -1 or self._rng.random() < share
        deadline_s = self._rng.choice(DEADLINES_S)
        return self._cluster.read(source, sink, transfer, deadline_s, is_progressive)

    def _live(self, source: Engine, sink: Engine, transfer: Transfer) -> None:
        mischief, rng = self._cluster.tally.mischief, self._rng
        if rng.random() < 0.1:
            sink.workers[0].tell("prepare", transfer.ref)
        if rng.random() < 0.05:
            mischief["never pulled"] += 1
            self._cluster.later(0.2, lambda: source.unpublish(transfer))
            return
        if not sink.is_registered:
            source.unpublish(transfer)
            return
        read = self._read(source, sink, transfer)
        numbers = list(read.pending)
        read.on_end = lambda read: self._ended(source, sink, read)
        fate, delay = rng.random(), rng.choice([0.0, 0.001, 0.005, 0.02, 0.1])
        if fate < 0.06:
            mischief["cancelled"] += 1
            number = rng.choice(numbers)
            workers = {p.number: p.worker for p in self._cluster.pulls.values()}
            if number in workers:
                self._cluster.later(delay, lambda: workers[number].tell("cancel", number))
        elif fate < 0.12:
            mischief["unpublished"] += 1
            self._cluster.later(delay, lambda: source.unpublish(transfer))
        elif fate < 0.16:
            mischief["abandoned"] += 1
            worker = rng.choice(sink.workers)
            self._cluster.later(delay, lambda: worker.tell("abandon", transfer.ref))

    def _ended(self, source: Engine, sink: Engine, read: Read) -> None:
        if read.is_delivered or "orphaned" in read.outcomes:
            return
        fate = self._rng.random()
        if fate < 0.2 and read.transfer.name in source.transfers and sink.is_registered:
            self._cluster.tally.mischief["pulled again"] += 1
            self._read(source, sink, read.transfer)
        elif fate < 0.9:
            source.unpublish(read.transfer)
