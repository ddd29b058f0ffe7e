"""How a baseline moves requests: it posts up to a window of them, polls by hand, and records the times."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple, Protocol

from kvxferd.bench.cases import Case
from kvxferd.bench.samples import Sample


class PostedRead(NamedTuple):
    """A request in flight."""

    handle: Any
    slot: int
    began: float
    built: float
    posted: float
    is_done: bool


class SlotReader(Protocol):
    """A way to read the slots of a case from another agent's memory."""

    def prepare(self, case: Case) -> None:
        """Compute everything that need not be timed."""
        ...

    def post(self, slot: int) -> PostedRead:
        """Start reading a slot."""
        ...

    def is_done(self, handle: Any) -> bool:
        """Poll the library, which progresses the request; return whether it is done."""
        ...

    def release(self, handle: Any) -> None:
        """Release a request's handle."""
        ...

    def slot_size(self, slot: int) -> tuple[int, int]:
        """Return the bytes and the descriptors of a slot."""
        ...


def run_reads(reads: SlotReader, case: Case, count: int, window: int) -> list[Sample]:
    """Move `count` requests, the n-th in slot n modulo the number of slots. Return their samples in order."""
    reads.prepare(case)
    samples: dict[int, Sample] = {}
    under_way: deque[tuple[int, PostedRead]] = deque()
    following = 0
    while len(samples) < count:
        while following < count and len(under_way) < window:
            under_way.append((following, reads.post(following % case.slots)))
            following += 1
        number, posted = under_way.popleft()
        if not posted.is_done and not reads.is_done(posted.handle):
            under_way.append((number, posted))
            continue
        ended = posted.posted if posted.is_done else time.perf_counter()
        reads.release(posted.handle)
        num_bytes, num_runs = reads.slot_size(posted.slot)
        samples[number] = Sample(posted.began, posted.built, posted.posted, ended, num_bytes, num_runs)
    return [samples[number] for number in range(count)]
