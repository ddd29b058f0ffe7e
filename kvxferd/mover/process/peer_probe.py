"""A probe's part in a mover: a region of random bytes that another mover reads, or a read of such a region.

The mover has no rank and does nothing else. Every call here blocks until it is done; the daemon kills a mover
that takes too long, as after any failure.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from kvxferd.mover.process.backoff import PollBackoff
from kvxferd.mover.transport.base import ReadHandle, Span, Transport
from kvxferd.mover.transport.runs import single_run
from kvxferd.wire.limits import PROBE_SLICE_BYTES
from kvxferd.wire.probe import DIGEST_BYTES, MAX_PROBE_PASSES, ProbeRead, ProbeRegion

Slice = tuple[int, int]  # where it begins and ends in the region

# Slices in flight: enough that a long way is full, and few that a slow link has little to finish.
MAX_IN_FLIGHT = 4


class PeerProbe:
    """One region, which is served or read into."""

    def __init__(self, transport: Transport, backoff: PollBackoff) -> None:
        self._transport = transport
        self._backoff = backoff
        self._memory: mmap.mmap | None = None
        self._span = Span(0, 0)

    def serve(self, size_bytes: int) -> ProbeRegion:
        """Return a region filled with random bytes. Raises MoverError; OSError where there is no memory."""
        memory = self._allocate(size_bytes)
        # Nobody who has not read a slice knows its bytes, and so its digest; and no two slices are equal.
        generator = np.random.Generator(np.random.SFC64(int.from_bytes(os.urandom(32))))
        digests = []
        for start, end in _slices(size_bytes):
            content = generator.bytes(end - start)
            memory[start:end] = content
            digests.append(hashlib.sha256(content).digest())
        metadata = self._transport.metadata([self._span])
        agent = self._transport.agent
        return ProbeRegion(agent, self._span.address, size_bytes, metadata, b"".join(digests))

    def read(self, region: ProbeRegion, for_s: float) -> ProbeRead:
        """Read the region as often as it can be in `for_s`, once at least in part, and verify every slice.

        Raises MoverError where a read fails, OSError where there is no memory.
        """
        memory = self._allocate(region.size_bytes)
        self._transport.load_remote(region.metadata, region.agent)
        slices = list(_slices(region.size_bytes))
        first_s = self._read_slices(region, slices[:1], for_s)[1]
        verified, wrong = self._verify(memory, region, slices[:1])
        wire_bytes, wire_s = 0, 0.0
        for _ in range(MAX_PROBE_PASSES):
            done, elapsed_s = self._read_slices(region, slices, for_s - wire_s)
            wire_bytes, wire_s = wire_bytes + sum(end - start for start, end in done), wire_s + elapsed_s
            right, not_right = self._verify(memory, region, done)
            verified, wrong = verified + right, wrong + not_right
            if wire_s >= for_s or wrong:
                break
        return ProbeRead(verified, wrong, wire_s, wire_bytes, first_s)

    def _allocate(self, size_bytes: int) -> mmap.mmap:
        """Return the memory of the region, the same each time: a mover has one at a time."""
        if self._memory is None or self._span.size_bytes < size_bytes:
            memory = mmap.mmap(-1, size_bytes)
            for start, end in _slices(size_bytes):
                # Else the first pass measures page faults: 0.09 GB/s by CMA where the next has 1.1.
                memory[start:end] = bytes(end - start)
            span = Span(ctypes.addressof(ctypes.c_char.from_buffer(memory)), size_bytes)
            self._transport.register(span)
            self._memory, self._span = memory, span
        return self._memory

    def _read_slices(
        self, region: ProbeRegion, slices: list[Slice], for_s: float
    ) -> tuple[list[Slice], float]:
        """Read slices in order, some at a time. Return those that were read in `for_s`, and the time."""
        in_flight: deque[tuple[Slice, ReadHandle]] = deque()
        waiting = deque(slices)
        done: list[Slice] = []
        began = time.perf_counter()
        while True:
            in_time = not done or time.perf_counter() - began < for_s
            while in_time and waiting and len(in_flight) < MAX_IN_FLIGHT:
                start, end = waiting.popleft()
                run = single_run(self._span.address + start, region.address + start, end - start)
                in_flight.append(((start, end), self._transport.post(region.agent, run)))
            if not in_flight:
                return done, time.perf_counter() - began
            read, handle = in_flight.popleft()
            self._wait(handle)
            done.append(read)

    def _wait(self, handle: ReadHandle) -> None:
        self._backoff.reset()
        while not self._transport.poll(handle):
            if (pause_s := self._backoff.pause_s(True)) > 0:
                time.sleep(pause_s)
        self._transport.release(handle)

    def _verify(self, memory: mmap.mmap, region: ProbeRegion, slices: list[Slice]) -> tuple[int, int]:
        """Return how many bytes are those of the source, and how many are in other slices. Clear them all."""
        right = wrong = 0
        for start, end in slices:
            first = start // PROBE_SLICE_BYTES * DIGEST_BYTES
            digest = region.digests[first : first + DIGEST_BYTES]
            if hashlib.sha256(memory[start:end]).digest() == digest:
                right += end - start
            else:
                wrong += end - start
            memory[start:end] = bytes(end - start)  # else a read that writes nothing would pass
        return right, wrong


def _slices(size_bytes: int) -> Iterator[Slice]:
    """Yield where each slice of a region begins and ends."""
    for start in range(0, size_bytes, PROBE_SLICE_BYTES):
        yield start, min(start + PROBE_SLICE_BYTES, size_bytes)
