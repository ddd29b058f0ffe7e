"""One rank of an engine that uses kvxferd as an engine would: source or sink of the bench."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvxferd import client
from kvxferd.bench import content
from kvxferd.bench.cases import Case, block_lists, readers_of, reads_of, stamp_of
from kvxferd.bench.samples import Sample
from kvxferd.bench.shapes import BenchDeployment, Role
from kvxferd.bench.shared_memory import ProcessMemory
from kvxferd.errors import KvxferdError
from kvxferd.ids import Rank
from kvxferd.plan import Runs
from kvxferd.tooling.content import RequestBlocks
from kvxferd.tooling.engine_process import EngineRank

PULL_DEADLINE_S = 60.0

Blocks = Mapping[str, client.BlockList]
Ref = dict[str, Any]  # as an engine gets it from its router


class BenchRank(EngineRank):
    """A rank whose memory is moved by every implementation in turn."""

    def begin(self, deployment: BenchDeployment, role: Role, rank: Rank, worker_socket: str) -> ProcessMemory:
        """Register as this rank, and return its memory."""
        self._role, self._rank_id = role, rank
        self._stamped: Case | None = None
        self.register(worker_socket, *deployment.engine(role)[rank])
        return ProcessMemory(os.getpid(), self.store.memory.fd)

    def fill_store(self) -> None:
        """Write the source's content. A sink's zeros map every page before anything is timed."""
        self._words = content.words_of(self.store.bytes.data)
        if self._role == "source":
            content.fill(self._words)
        else:
            self._words[:] = 0

    # --- as a source

    def publish_all(self, case: Case, names: list[str]) -> list[Ref]:
        """Publish one transfer for each name; the n-th has the blocks of slot n modulo the number of slots.

        Their content is already written.
        """
        requests = [_request(case, "source", slot) for slot in range(min(case.slots, len(names)))]
        return [self.publish(name, requests[n % case.slots]).to_dict() for n, name in enumerate(names)]

    def publish_unwritten(self, case: Case, name: str) -> Ref:
        """Publish a transfer of the first slot's blocks before any of them is written."""
        none = {group: client.BlockList(ids=[]) for group in block_lists(case, "source", 0)}
        return self.rank.publish(name, none, case.num_tokens, ready_tokens=0).to_dict()

    def extend(self, case: Case, name: str, num_chunks: int, gap_s: float) -> float:
        """Report an unwritten transfer in equal chunks, each `gap_s` after the one before, the first too.

        Return when the last one was reported, of the monotonic clock, in seconds.
        """
        lists = block_lists(case, "source", 0)
        size, tokens = case.blocks // num_chunks, case.num_tokens // num_chunks
        chunks = [
            {name: client.BlockList(ids=ids[n * size : (n + 1) * size].data) for name, ids in lists.items()}
            for n in range(num_chunks)
        ]
        began = last_at = time.perf_counter()
        for number, blocks in enumerate(chunks, 1):
            _wait_until(began + number * gap_s)
            last_at = time.perf_counter()
            self.rank.ready(name, None if number == num_chunks else number * tokens, blocks)
        return last_at

    # --- as a sink

    def prepare_all(self, refs: list[Ref]) -> None:
        """Prepare the pulls of these references."""
        for ref in refs:
            self.prepare(ref)

    def abandon_all(self, refs: list[Ref]) -> None:
        """Abandon references that were prepared and will not be pulled."""
        for ref in refs:
            self.abandon(ref)

    def pull_all(
        self, case: Case, refs: list[Ref], window: int = 1, progressive: bool = False
    ) -> list[Sample]:
        """Pull the references, at most `window` at a time; return their samples in order.

        `progressive`: read what is ready meanwhile.
        """
        lists = [self._blocks(case, slot) for slot in range(case.slots)]
        waiting = enumerate(refs)
        running: dict[client.PullTicket, tuple[int, float, float]] = {}
        samples: dict[int, Sample] = {}
        while len(samples) < len(refs):
            while len(running) < window and (following := next(waiting, None)):
                number, ref = following
                started = self._start_pull(ref, lists[number % len(lists)], case, progressive)
                running[started[0]] = (number, *started[1:])
            event = self.events.next_event(time.perf_counter() + 2 * PULL_DEADLINE_S)
            ended = time.perf_counter()
            delivered = _delivered_or_raise(event)
            if delivered is not None and delivered.ticket in running:
                number, began, posted = running.pop(delivered.ticket)
                samples[number] = _sample(began, posted, ended, delivered)
        return [samples[number] for number in range(len(refs))]

    def pull_behind(self, large: Case, large_ref: Ref, small: Case, small_refs: list[Ref]) -> list[Sample]:
        """Pull the large one, and small ones, one after the other, until it ends.

        Return the large one's sample, then those of the small ones, the last of which may end after it.
        """
        large_lists = self._blocks(large, 0)
        lists = [self._blocks(small, slot) for slot in range(small.slots)]
        started = self._start_pull(large_ref, large_lists, large)
        large_sample: Sample | None = None
        samples = []
        for number, ref in enumerate(small_refs):
            following = self._start_pull(ref, lists[number % len(lists)], small)
            ended: client.Delivered | None = None
            while ended is None or (large_sample is None and number == len(small_refs) - 1):
                event = _delivered_or_raise(self.events.next_event(time.perf_counter() + 2 * PULL_DEADLINE_S))
                now = time.perf_counter()
                if event is not None and event.ticket is following[0]:
                    # A small pull that waits until the large one ends is the worst case, so it counts too.
                    ended = event
                    samples.append(_sample(*following[1:], now, event))
                elif event is not None and event.ticket is started[0]:
                    large_sample = _sample(*started[1:], now, event)
            if large_sample is not None:
                break
        assert large_sample is not None
        return [large_sample, *samples]

    def _start_pull(
        self, ref: Ref, blocks: Blocks, case: Case, progressive: bool = False
    ) -> tuple[client.PullTicket, float, float]:
        num_tokens = case.num_tokens
        began = time.perf_counter()
        ticket = self.rank.pull(
            ref,
            blocks=blocks,
            num_tokens=num_tokens,
            deadline_s=PULL_DEADLINE_S,
            progressive=progressive,
        )
        return ticket, began, time.perf_counter()

    # --- content

    def stamp(self, case: Case, nonce: int) -> None:
        """Stamp this rank's runs of all slots, after restoring what another case had stamped."""
        former, self._stamped = self._stamped, case
        if former is not None and former != case:
            for runs in self._sent(former):
                content.unstamp(self._words, runs)
        stamp = stamp_of(nonce, self._rank_id)
        for runs in self._sent(case):
            content.stamp(self._words, runs, stamp)

    def wipe(self, case: Case) -> None:
        """Write zeros over this rank's runs of all slots."""
        for slot in range(case.slots):
            for runs in reads_of(case, self._rank_id, slot).values():
                content.wipe(self._words, runs)

    def count_wrong(self, case: Case, nonce: int, slots: int, is_whole: bool) -> int:
        """Return how many words of the first slots are wrong: of the ends of runs, or of all their words."""
        count = content.count_wrong if is_whole else content.count_unstamped
        return sum(
            count(self._words, runs, stamp_of(nonce, source))
            for slot in range(slots)
            for source, runs in reads_of(case, self._rank_id, slot).items()
        )

    def _sent(self, case: Case) -> Iterator[Runs]:
        """Yield what sink ranks read from this rank, of all slots."""
        for sink in readers_of(case.deployment, self._rank_id):
            for slot in range(case.slots):
                yield reads_of(case, sink, slot)[self._rank_id]

    def _blocks(self, case: Case, slot: int) -> Blocks:
        return self.block_lists(_request(case, "sink", slot))


def _request(case: Case, role: Role, slot: int) -> RequestBlocks:
    return RequestBlocks(0, block_lists(case, role, slot), case.num_tokens)


def _delivered_or_raise(event: client.Event) -> client.Delivered | None:
    if isinstance(event, client.Failed):
        raise KvxferdError(event.message, event.code)
    return event if isinstance(event, client.Delivered) else None


def _sample(began: float, posted: float, ended: float, event: client.Delivered) -> Sample:
    return Sample(began, began, posted, ended, event.bytes, event.runs)


def _wait_until(at: float) -> None:
    if (left := at - time.perf_counter()) > 0:
        time.sleep(left)
