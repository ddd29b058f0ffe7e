"""One rank of an engine that uses kvxferd as an engine would: source or sink of the bench."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvxferd import client
from kvxferd.bench.cases import Case, block_lists
from kvxferd.errors import KvxferdError
from kvxferd.ids import Rank
from kvxferd.tooling.engine_pair import EnginePair, Role
from kvxferd.tooling.engine_process import EngineRank

PULL_DEADLINE_S = 60.0

Ref = dict[str, Any]  # as an engine gets it from its router


class Sample(NamedTuple):
    """One moved request. Times are of the monotonic clock, in seconds."""

    began: float  # the request is known: its block ids
    built: float  # the timed part begins: `began`, or when the request that raw NIXL posts is built
    posted: float  # the call that starts it has returned
    ended: float  # the bytes are known to have arrived
    bytes: int
    runs: int

    @property
    def seconds(self) -> float:
        """The time that counts."""
        return self.ended - self.built


class ProcessMemory(NamedTuple):
    """Memory that another process of this machine can open: a process id and a file descriptor of it."""

    pid: int
    fd: int


@dataclass
class Batch:
    """Published transfers of a case; the n-th has the blocks of slot n modulo the number of slots."""

    case: Case
    names: list[str]
    refs: list[Ref]


class BenchRank(EngineRank):
    """A rank whose memory is moved by every contender in turn."""

    def begin(self, pair: EnginePair, role: Role, rank: Rank, worker_socket: str) -> ProcessMemory:
        """Register as this rank, and return its memory."""
        spec, layout = pair.engine(role)[rank]
        self.register(worker_socket, msgspec.structs.replace(spec, publish_implies_ready=True), layout)
        return ProcessMemory(os.getpid(), self.store.memory.fd)

    def fill_store(self) -> None:
        """Map every page before anything is timed; `background` would take twice the memory more."""
        self.store.bytes[:] = 0

    def write_all(self, case: Case, number: int, ends_of: int = 0) -> None:
        """Write every slot's content of `number`, or its ends of so many tokens."""
        for slot in range(case.slots):
            self.write(case.request("prefill", slot, number), ends_of=ends_of)

    def count_wrong(self, case: Case, number: int, slots: int, ends_of: int = 0) -> int:
        """Return how many items of the first slots are wrong, of those that `write_all` writes."""
        requests = [case.request("decode", slot, number) for slot in range(slots)]
        return sum(self.check(request, ends_of).wrong_items for request in requests)

    # --- as a source

    def publish_all(self, case: Case, names: list[str]) -> Batch:
        """Publish one transfer for each name, whose content is already written."""
        requests = [case.request("prefill", slot) for slot in range(min(case.slots, len(names)))]
        refs = [self.publish(name, requests[n % case.slots]).to_dict() for n, name in enumerate(names)]
        return Batch(case, names, refs)

    def publish_unwritten(self, case: Case, name: str) -> Batch:
        """Publish a transfer of the first slot's blocks before any of them is written."""
        none = {group: client.BlockList(ids=[]) for group in block_lists(case, "prefill", 0)}
        return Batch(case, [name], [self.rank.publish(name, none, case.num_tokens, ready_tokens=0).to_dict()])

    def extend(self, case: Case, name: str, num_chunks: int, gap_s: float) -> float:
        """Report an unwritten transfer in equal chunks, each `gap_s` after the one before, the first too.

        Return when the last one was reported, of the monotonic clock, in seconds.
        """
        lists = block_lists(case, "prefill", 0)
        size, tokens = case.blocks // num_chunks, case.num_tokens // num_chunks
        chunks = [
            {name: client.BlockList(ids=ids[n * size : (n + 1) * size].data) for name, ids in lists.items()}
            for n in range(num_chunks)
        ]
        began = last_at = time.perf_counter()
        for number, blocks in enumerate(chunks, 1):
            time.sleep(max(0.0, began + number * gap_s - time.perf_counter()))
            last_at = time.perf_counter()
            self.rank.ready(name, None if number == num_chunks else number * tokens, blocks)
        return last_at

    # --- as a sink

    def prepare_all(self, batch: Batch) -> None:
        """Prepare the pulls of a batch."""
        for ref in batch.refs:
            self.prepare(ref)

    def abandon_from(self, batch: Batch, first: int) -> None:
        """Abandon the rest of a batch, which was prepared and will not be pulled."""
        for ref in batch.refs[first:]:
            self.abandon(ref)

    def pull_all(self, batch: Batch, window: int = 1, progressive: bool = False) -> list[Sample]:
        """Pull a batch, at most `window` transfers at a time; return a sample of each in order.

        `progressive`: read what is ready meanwhile. Raises KvxferdError with a pull's code.
        """
        return self._pull_all([batch], window, is_progressive=progressive)

    def pull_behind(self, large: Batch, small: Batch) -> list[Sample]:
        """Pull the one large transfer, and small ones, one after the other, until it has ended.

        Return the large one's sample, then those of the small ones, the last of which may end after it: a
        small pull that waits until the large one ends is the worst case, so it counts too.
        """
        return self._pull_all([large, small], 2, until_first=True)

    def _pull_all(
        self, batches: list[Batch], window: int, until_first: bool = False, is_progressive: bool = False
    ) -> list[Sample]:
        waiting = []
        for batch in batches:
            case = batch.case
            lists = [self.block_lists(case.request("decode", slot)) for slot in range(case.slots)]
            waiting += [
                (ref, lists[n % case.slots], case.num_tokens, PULL_DEADLINE_S)
                for n, ref in enumerate(batch.refs)
            ]
        running: dict[client.PullTicket, tuple[int, float, float]] = {}
        samples: dict[int, Sample] = {}
        begun = 0
        while True:
            while begun < len(waiting) and len(running) < window and not (until_first and 0 in samples):
                began = time.perf_counter()
                ticket = self.rank.pull(*waiting[begun], progressive=is_progressive)
                running[ticket] = (begun, began, time.perf_counter())
                begun += 1
            if not running:
                return [samples[number] for number in range(begun)]
            event = self.events.next_event(time.perf_counter() + 2 * PULL_DEADLINE_S)
            ended = time.perf_counter()
            if isinstance(event, client.Failed):
                raise KvxferdError(event.message, event.code)
            if isinstance(event, client.Delivered) and event.ticket in running:
                number, began, posted = running.pop(event.ticket)
                samples[number] = Sample(began, began, posted, ended, event.bytes, event.runs)
