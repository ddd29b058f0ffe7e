"""The source's side of staging: chunks of memory that the library cannot reach, copied to where it can.

A reader that is gone never gives back: a loan ends by itself after `LOAN_S`, its stamp overwritten
before its slot is used again. A reader that finds its stamp unchanged after it has read the chunk has
read the chunk; no clock decides that.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxferd.errors import EngineError
from kvxferd.ids import AgentName
from kvxferd.memory.driver import Driver
from kvxferd.mover.transport.base import Span, Transport, TransportError
from kvxferd.mover.transport.buffers import PinnedBuffer
from kvxferd.mover.transport.ring import SlotPool, Uint64s, packed_addresses
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

CHUNK_LEASE_S = 30.0  # a reader has read a chunk long before
# A reader asks for a dozen chunks at a time; more than this are 5,000 reads waiting for one GPU.
MAX_WAITING = 4096
MAX_WAITING_PER_AGENT = 256
READER_IDLE_S = 60.0  # after which a reader that asks for nothing is forgotten

_ChunkKey = tuple[AgentName, int]


@dataclass(slots=True)
class _ChunkLease:
    agent: AgentName
    request: ChunkRequest
    slot: int = 0
    stamp: bytes = b""
    copy_event: Any = None  # event; None once it is done
    expires_at: float = 0.0


class StagingSource:
    """Serves asks for one mover's staged memory, in order, through its own ring and stream."""

    def __init__(
        self,
        transport: Transport,
        driver: Driver,
        slot_bytes: int,
        num_slots: int,
        is_loaded_elsewhere: Callable[[AgentName], bool],
    ) -> None:
        """`keep` says whether somebody else needs an agent loaded. Raises DeviceError, TransportError."""
        self._transport = transport
        self._driver = driver
        self._is_loaded_elsewhere = is_loaded_elsewhere
        self._slot_bytes = slot_bytes
        self.pinned = PinnedBuffer(transport, driver, num_slots * (slot_bytes + STAMP_BYTES))
        self._stamps_address = self.pinned.address + num_slots * slot_bytes
        self.slots = SlotPool(self.pinned.address, slot_bytes, num_slots)
        self._spans: list[Span] = []
        self._waiting: deque[_ChunkLease] = deque()
        self._leases: dict[_ChunkKey, _ChunkLease] = {}
        self._readers: dict[AgentName, float] = {}  # loaded to be answered: when they last asked

    def add(self, span: Span) -> None:
        """Lend from this memory too."""
        self._spans.append(span)

    @property
    def is_busy(self) -> bool:
        """Something is to be copied, or to be given back."""
        return bool(self._waiting or self._leases)

    # --- what readers say

    def handle_request(self, agent: AgentName, ask: ChunkRequest, now: float) -> None:
        """Take an ask, or deny it."""
        self._readers[agent] = now
        try:
            self._check_request(agent, ask)
        except EngineError as error:
            self._notify_reader(agent, ask, ChunkRefused(number=ask.number, message=error.message))
            return
        self._waiting.append(_ChunkLease(agent, ask))

    def _check_request(self, agent: AgentName, ask: ChunkRequest) -> None:
        waiting = sum(loan.agent == agent for loan in self._waiting)
        if len(self._waiting) >= MAX_WAITING or waiting >= MAX_WAITING_PER_AGENT:
            raise EngineError(f"cannot lend more: {len(self._waiting)} chunks are waited for")
        if (agent, ask.number) in self._leases or any(
            (loan.agent, loan.request.number) == (agent, ask.number) for loan in self._waiting
        ):
            raise EngineError(f"cannot lend chunk {ask.number} twice")
        num_runs, odd = divmod(len(ask.addresses), 8)
        if odd or len(ask.lengths) != 4 * num_runs or not 0 < num_runs <= MAX_CHUNK_RUNS:
            raise EngineError(f"cannot lend {num_runs} stretches: 1 to {MAX_CHUNK_RUNS}, each with a length")
        start, length = _requested_ranges(ask)
        if not length.all() or int(length.sum()) > self._slot_bytes:
            raise EngineError(f"cannot lend {int(length.sum())} bytes: stretches of 1 to {self._slot_bytes}")
        inside = np.zeros(num_runs, dtype=bool)
        for span in self._spans:
            first, end = np.uint64(span.address), np.uint64(span.address + span.size_bytes)
            # Not start + length, which a lie makes wrap around.
            inside |= (start >= first) & (start < end) & (length <= end - np.minimum(start, end))
        if not inside.all():
            raise EngineError("cannot lend memory that is not this rank's")

    def handle_release(self, agent: AgentName, number: int) -> None:
        """The reader has read it, or does not want it any more."""
        loan = self._leases.get((agent, number))
        if loan is not None:
            loan.expires_at = 0.0  # a copy that is under way comes first
            return
        for waiting in self._waiting:
            if (waiting.agent, waiting.request.number) == (agent, number):
                self._waiting.remove(waiting)
                return

    # --- work

    def step(self, now: float) -> None:
        """Move every loan on. Raises DeviceError where copies fail: nothing can be lent any more."""
        for key, loan in list(self._leases.items()):
            if loan.copy_event is not None:
                if not self._driver.is_done(loan.copy_event):
                    continue
                self._driver.drop_event(loan.copy_event)
                loan.copy_event = None
                if loan.expires_at:
                    self._send_ready(loan)
            if now >= loan.expires_at:
                self._end_lease(key)
        while self._waiting and (slot := self.slots.acquire()) is not None:
            self._start_copy(self._waiting.popleft(), slot, now)
        for agent in [a for a, asked in self._readers.items() if now > asked + READER_IDLE_S]:
            self._forget_reader(agent)

    def _start_copy(self, loan: _ChunkLease, slot: int, now: float) -> None:
        loan.slot, loan.expires_at = slot, now + CHUNK_LEASE_S
        loan.stamp = os.urandom(STAMP_BYTES)
        # Before the first byte of the copy: who still reads an earlier loan must find out.
        ctypes.memmove(self._stamp_address(slot), loan.stamp, STAMP_BYTES)
        start, length = _requested_ranges(loan.request)
        self._leases[loan.agent, loan.request.number] = loan
        stream = self.pinned.stream
        self._driver.copy(packed_addresses(slot, length).tolist(), start.tolist(), length.tolist(), stream)
        loan.copy_event = self._driver.record(stream)

    def _stamp_address(self, slot: int) -> int:
        return self._stamps_address + (slot - self.pinned.address) // self._slot_bytes * STAMP_BYTES

    def _send_ready(self, loan: _ChunkLease) -> None:
        lent = ChunkReady(
            number=loan.request.number,
            address=loan.slot,
            stamp_address=self._stamp_address(loan.slot),
            stamp=loan.stamp,
        )
        if not self._notify_reader(loan.agent, loan.request, lent):
            loan.expires_at = 0.0

    def _end_lease(self, key: _ChunkKey) -> None:
        loan = self._leases.pop(key)
        ctypes.memmove(self._stamp_address(loan.slot), os.urandom(STAMP_BYTES), STAMP_BYTES)
        self.slots.release(loan.slot)

    def _notify_reader(self, agent: AgentName, ask: ChunkRequest, note: StagingMessage) -> bool:
        """Answer a reader; return whether that could be tried. It is loaded from what it sent, if need be."""
        payload = encode(note)
        try:
            self._transport.notify(agent, payload)
        except TransportError:
            try:
                if (name := self._transport.load_remote(ask.metadata, agent)) != agent:
                    _LOG.warning("an ask of agent %s came with the metadata of %s", agent, name)
                    return False
                self._transport.notify(agent, payload)
            except TransportError as error:
                _LOG.warning("%s", error.message)
                return False
        return True

    def _forget_reader(self, agent: AgentName) -> None:
        if any(loan.agent == agent for loan in (*self._leases.values(), *self._waiting)):
            return
        del self._readers[agent]
        if not self._is_loaded_elsewhere(agent):
            try:
                self._transport.drop_remote(agent)
            except TransportError as error:
                _LOG.warning("%s", error.message)


def _requested_ranges(ask: ChunkRequest) -> tuple[Uint64s, Uint64s]:
    return np.frombuffer(ask.addresses, dtype="<u8"), np.frombuffer(ask.lengths, dtype="<u4").astype(
        np.uint64
    )
