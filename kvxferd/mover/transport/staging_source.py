"""The source's side of staging: it copies chunks of memory that the library cannot reach to where it can.

A reader that is gone never releases its chunks, and never takes back what it has requested. So readers take
turns: the next slot is for the one that has fewest. A lease ends after `CHUNK_LEASE_S`, or after
`CHUNK_KEPT_S` where others wait for a slot, and a request that its reader has given up is dropped. The stamp
of a chunk is overwritten before its slot is used again: a reader that finds it unchanged after it has read
the chunk has read that chunk; no clock decides that.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxferd.errors import EngineError
from kvxferd.ids import AgentName
from kvxferd.memory.driver import Driver
from kvxferd.mover.transport.base import MemoryRange, Transport
from kvxferd.mover.transport.buffers import PinnedBuffer, SlotPool
from kvxferd.mover.transport.reply_agents import ReplyAgents
from kvxferd.mover.transport.runs import Uint64s, packed_addresses
from kvxferd.plan import Runs
from kvxferd.wire.codec import encode
from kvxferd.wire.staging import (
    MAX_CHUNK_RUNS,
    STAMP_BYTES,
    ChunkReady,
    ChunkRefused,
    ChunkRequest,
    StagingMessage,
)

_LOG = logging.getLogger(__name__)

CHUNK_REPLY_TIMEOUT_S = 10.0  # a reader takes a source that does not reply by then for gone
# A reader has read a chunk long before: eight of 4 MiB, all slots, take 4.5 s over a link of 60 Mb/s.
CHUNK_LEASE_S, CHUNK_KEPT_S = 30.0, 5.0
# A reader requests a dozen chunks at a time; more than this are 5,000 reads waiting for one GPU.
MAX_WAITING = 4096
MAX_WAITING_PER_AGENT = 256

_ChunkKey = tuple[AgentName, int]


@dataclass(slots=True)
class _ChunkLease:
    agent: AgentName
    request: ChunkRequest
    began_at: float  # to wait, and then to be served
    slot: int = 0
    stamp: bytes = b""
    copy_event: Any = None  # None once it is done
    expires_at: float = 0.0


class StagingSource:
    """Serves requests for one mover's staged memory, in order, through its own slots and stream."""

    def __init__(
        self,
        transport: Transport,
        driver: Driver,
        uuid: str,
        slot_bytes: int,
        num_slots: int,
        copies_rows: bool,
        readers: ReplyAgents,
    ) -> None:
        """`copies_rows`: as `PinnedBuffer`. Raises DeviceError, TransportError."""
        self._readers = readers
        self._slot_bytes = slot_bytes
        size_bytes = num_slots * (slot_bytes + STAMP_BYTES)
        self.pinned = PinnedBuffer(transport, driver, uuid, size_bytes, copies_rows)
        self._stamps_address = self.pinned.address + num_slots * slot_bytes
        self.slots = SlotPool(self.pinned.address, slot_bytes, num_slots)
        self._spans: list[MemoryRange] = []
        self._waiting: deque[_ChunkLease] = deque()
        self._leases: dict[_ChunkKey, _ChunkLease] = {}

    def add(self, span: MemoryRange) -> None:
        """Serve this memory too."""
        self._spans.append(span)

    # --- messages of readers

    def handle_request(self, agent: AgentName, request: ChunkRequest, now: float) -> None:
        """Queue a request, or refuse it."""
        try:
            self._check_request(agent, request)
        except EngineError as error:
            refused = ChunkRefused(number=request.number, message=error.message)
            self._notify_reader(agent, request, refused, now)
            return
        self._waiting.append(_ChunkLease(agent, request, now))

    def _check_request(self, agent: AgentName, request: ChunkRequest) -> None:
        waiting = sum(lease.agent == agent for lease in self._waiting)
        if len(self._waiting) >= MAX_WAITING or waiting >= MAX_WAITING_PER_AGENT:
            raise EngineError(f"cannot stage more: {len(self._waiting)} chunks are waited for")
        if (agent, request.number) in self._leases or any(
            (lease.agent, lease.request.number) == (agent, request.number) for lease in self._waiting
        ):
            raise EngineError(f"cannot stage chunk {request.number} twice")
        num_runs, odd = divmod(len(request.addresses), 8)
        if odd or len(request.lengths) != 4 * num_runs or not 0 < num_runs <= MAX_CHUNK_RUNS:
            raise EngineError(f"cannot stage {num_runs} stretches: 1 to {MAX_CHUNK_RUNS}, each with a length")
        start, length = _requested_ranges(request)
        if not length.all() or int(length.sum()) > self._slot_bytes:
            raise EngineError(f"cannot stage {int(length.sum())} bytes: stretches of 1 to {self._slot_bytes}")
        inside = np.zeros(num_runs, dtype=bool)
        for span in self._spans:
            first, end = np.uint64(span.address), np.uint64(span.address + span.size_bytes)
            # Not start + length, which a malicious request makes wrap around.
            inside |= (start >= first) & (start < end) & (length <= end - np.minimum(start, end))
        if not inside.all():
            raise EngineError("cannot stage memory that is not this rank's")

    def handle_release(self, agent: AgentName, number: int) -> None:
        """End a chunk's lease, or its request: the reader has read it, or does not need it any more."""
        lease = self._leases.get((agent, number))
        if lease is not None:
            lease.expires_at = 0.0  # a running copy ends first
            return
        for waiting in self._waiting:
            if (waiting.agent, waiting.request.number) == (agent, number):
                self._waiting.remove(waiting)
                return

    # --- work

    def step(self, now: float) -> None:
        """Advance every lease. Raises DeviceError where copies fail, and then no chunk can be served."""
        for key, lease in list(self._leases.items()):
            if lease.copy_event is not None:
                if not self.pinned.is_done(lease.copy_event):
                    continue
                lease.copy_event = None
                if lease.expires_at:
                    self._send_ready(lease, now)
            if now >= lease.expires_at:
                self._end_lease(key)
        while self._waiting and now >= self._waiting[0].began_at + CHUNK_REPLY_TIMEOUT_S:
            self._waiting.popleft()
        while self._waiting and (slot := self._acquire_slot(now)) is not None:
            num_leases = Counter(agent for agent, _ in self._leases)
            following = min(self._waiting, key=lambda lease: num_leases[lease.agent])
            self._waiting.remove(following)
            self._start_copy(following, slot, now)
        self._readers.forget_idle(now)

    def _acquire_slot(self, now: float) -> int | None:
        """Return a free slot, or that of a chunk which its reader has had for long."""
        if (slot := self.slots.acquire()) is not None:
            return slot
        for key, lease in self._leases.items():  # the oldest first
            if lease.copy_event is None and now >= lease.began_at + CHUNK_KEPT_S:
                self._end_lease(key)
                return self.slots.acquire()
        return None

    def _start_copy(self, lease: _ChunkLease, slot: int, now: float) -> None:
        lease.slot, lease.began_at, lease.expires_at = slot, now, now + CHUNK_LEASE_S
        lease.stamp = os.urandom(STAMP_BYTES)
        # Before the first byte of the copy, so that a reader of an earlier lease finds the stamp changed.
        ctypes.memmove(self._stamp_address(slot), lease.stamp, STAMP_BYTES)
        start, length = _requested_ranges(lease.request)
        self._leases[lease.agent, lease.request.number] = lease
        lease.copy_event = self.pinned.start_copies(Runs(packed_addresses(slot, length), start, length))

    def _stamp_address(self, slot: int) -> int:
        return self._stamps_address + (slot - self.pinned.address) // self._slot_bytes * STAMP_BYTES

    def _send_ready(self, lease: _ChunkLease, now: float) -> None:
        ready = ChunkReady(
            number=lease.request.number,
            address=lease.slot,
            stamp_address=self._stamp_address(lease.slot),
            stamp=lease.stamp,
        )
        if not self._notify_reader(lease.agent, lease.request, ready, now):
            lease.expires_at = 0.0

    def _end_lease(self, key: _ChunkKey) -> None:
        lease = self._leases.pop(key)
        ctypes.memmove(self._stamp_address(lease.slot), os.urandom(STAMP_BYTES), STAMP_BYTES)
        self.slots.release(lease.slot)

    def _notify_reader(
        self, agent: AgentName, request: ChunkRequest, message: StagingMessage, now: float
    ) -> bool:
        """Send a reply; return whether it was sent."""
        if why := self._readers.send(agent, request.metadata, encode(message), now):
            _LOG.warning("staging reply not sent: agent=%s reason=%s", agent, why)
        return not why


def _requested_ranges(request: ChunkRequest) -> tuple[Uint64s, Uint64s]:
    """Return addresses and lengths."""
    lengths = np.frombuffer(request.lengths, dtype="<u4").astype(np.uint64)
    return np.frombuffer(request.addresses, dtype="<u8"), lengths
