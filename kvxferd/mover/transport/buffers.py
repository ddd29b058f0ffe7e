"""Memory that a mover itself owns and registers: slots, fence words' slots, and pinned buffers for copies."""

from __future__ import annotations

import ctypes
import logging
import mmap
from typing import Any

import numpy as np

from kvxferd.errors import DeviceError
from kvxferd.ids import AgentName
from kvxferd.memory.driver import Driver, Rows
from kvxferd.mover.transport.base import MemoryRange, Transport
from kvxferd.plan import Runs
from kvxferd.plan.run_shapes import distinct
from kvxferd.wire.limits import FENCE_WORD_BYTES

_LOG = logging.getLogger(__name__)

_WORD_SLOT_BYTES = 64  # a cache line each, so that a word that lands touches no other slot's line
_NUM_WORD_SLOTS = 1024  # pulls that read their fence word at the same time; more wait
# A copy takes 2 us of host time and more, and a call for all runs of one length about 30
# (docs/adr/0070-gpu-scatter.md). Of runs from this length on, copies are fast enough: 16 GB/s.
_LONG_RUN_BYTES = 64 << 10
_MIN_RUNS_PER_CALL = 16


class SlotPool:
    """Equal slots side by side. A slot in doubt is never handed out again."""

    def __init__(self, address: int, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self._free = [address + slot_bytes * number for number in reversed(range(num_slots))]
        self._acquired: dict[int, AgentName | None] = {}  # for whom

    def is_free_for(self, agent: AgentName | None) -> bool:
        """Whether there is a free slot: for an agent, only while more are free than it has.

        So agents whose reads do not end leave a slot for the next one.
        """
        num_held = 0 if agent is None else list(self._acquired.values()).count(agent)
        return len(self._free) > num_held

    def acquire(self, agent: AgentName | None = None) -> int | None:
        """Return the address of a free slot, None while there is none."""
        if not self.is_free_for(agent):
            return None
        slot = self._free.pop()
        self._acquired[slot] = agent
        return slot

    def release(self, slot: int) -> None:
        """Make a slot free that nothing reads or writes any more."""
        del self._acquired[slot]
        self._free.append(slot)

    def quarantine(self, slot: int) -> None:
        """Never hand a slot out again, because something may write it at any time."""
        del self._acquired[slot]

    @property
    def is_exhausted(self) -> bool:
        """Whether every slot is quarantined."""
        return not self._free and not self._acquired


class WordSlots:
    """Registered host memory into which fence words and stamps are read, one slot a word.

    A slot that is never released, because something may still land there, is not handed out again.
    """

    def __init__(self, transport: Transport) -> None:
        self._memory = mmap.mmap(-1, _WORD_SLOT_BYTES * _NUM_WORD_SLOTS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._slots = SlotPool(address, _WORD_SLOT_BYTES, _NUM_WORD_SLOTS)
        self._base = address
        self.span = MemoryRange(address, len(self._memory))
        transport.register(self.span)

    def acquire(self) -> int | None:
        """Return the address of a slot that holds zeros, None while there is none."""
        slot = self._slots.acquire()
        if slot is not None:
            # A word left from an earlier read of the same transfer must never pass for this one's.
            start = slot - self._base
            self._memory[start : start + FENCE_WORD_BYTES] = bytes(FENCE_WORD_BYTES)
        return slot

    def read(self, slot: int) -> bytes:
        """Return the word that has landed in a slot."""
        start = slot - self._base
        return self._memory[start : start + FENCE_WORD_BYTES]

    def release(self, slot: int) -> None:
        """Make a slot free, whose read is terminal."""
        self._slots.release(slot)


class PinnedBuffer:
    """A pinned and registered buffer, and the stream of its copies. Its maker calls `close` once."""

    def __init__(
        self, transport: Transport, driver: Driver, uuid: str, size_bytes: int, copies_rows: bool
    ) -> None:
        """`copies_rows`: whether the driver's `copy_rows` is proved right.

        Raises DeviceError or TransportError, and then leaves nothing behind.
        """
        self._driver = driver
        self._uuid = uuid
        self._copies_rows = copies_rows
        with driver.on(uuid):
            self.span = MemoryRange(driver.allocate_host(size_bytes), size_bytes)
            try:
                self._stream = driver.open_stream()
            except BaseException:
                driver.free_host(self.span.address)
                raise
        try:
            transport.register(self.span)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> int:
        """The buffer's first address."""
        return self.span.address

    def start_copies(self, runs: Runs) -> Any:
        """Start copies from `remote` to `local` addresses; return the event that is done after the last."""
        is_short = runs.length < np.uint64(_LONG_RUN_BYTES)
        lengths = distinct(runs.length[is_short].view(np.int64)).tolist() if self._copies_rows else []
        if np.count_nonzero(is_short) < _MIN_RUNS_PER_CALL * len(lengths):
            lengths = []
        with self._driver.on(self._uuid):
            for length in lengths:
                to, source, _ = (column[runs.length == length] for column in runs)
                self._driver.copy_rows(to.data, source.data, Rows(length), self._stream)
            to, source, size = (column[~is_short] if lengths else column for column in runs)
            self._driver.copy(to.tolist(), source.tolist(), size.tolist(), self._stream)
            return self._driver.record(self._stream)

    def is_done(self, event: Any) -> bool:
        """Whether the copies before an event are done; never waits. An event that is done is freed."""
        with self._driver.on(self._uuid):
            if not self._driver.is_done(event):
                return False
            self._driver.drop_event(event)
        return True

    def discard(self, transport: Transport) -> None:
        """Free a buffer that nothing has used."""
        transport.deregister(self.span)
        self.close()

    def close(self) -> None:
        """Free it, when the transport is closed and nothing reads it any more.

        Raises nothing: memory that a broken driver does not free goes with the process, and the end of the
        mover must not wait for that.
        """
        driver = self._driver
        for step, what in (
            (driver.synchronize, self._stream),
            (driver.close_stream, self._stream),
            (driver.free_host, self.span.address),
        ):
            try:
                with driver.on(self._uuid):
                    step(what)
            except DeviceError as error:
                _LOG.error("staging buffer not freed: reason=%s", error.message)
