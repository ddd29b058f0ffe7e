"""A transport for memory that the library cannot reach: by copies through a ring of the mover's own.

`StagedTransport` stands between the pull engine and the real transport. What both sides can reach goes
straight on. A read into staged memory lands in a slot and is copied from there; a read from staged
memory is asked of the source's mover, which lends it in chunks (`Lender`). Several chunks are under
way at once, so that copy and wire overlap.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvxferd.errors import DeviceError, ProtocolError
from kvxferd.ids import AgentName
from kvxferd.memory.driver import Driver
from kvxferd.mover.chunk import Chunk, Stage, StagedRead
from kvxferd.mover.disconnects import Disconnects
from kvxferd.mover.lending import Lender
from kvxferd.mover.pinned import Pinned
from kvxferd.mover.ring import Ring, chunks, packed_at
from kvxferd.mover.scratch import Scratch
from kvxferd.mover.transport import HOST, Kinds, ReadHandle, Span, Transport, TransportError
from kvxferd.plan import Runs
from kvxferd.wire.codec import encode
from kvxferd.wire.limits import MAX_ADDRESS, MAX_SENTENCE_CHARS
from kvxferd.wire.notes import MAX_ASKED_RUNS, STAMP_BYTES, Ask, Denied, Lent, Returned, decode_note

_LOG = logging.getLogger(__name__)

# As long as the longest run that the pull engine posts. Two rings of eight are 64 MiB of pinned memory for
# a mover that stages, and enough that one slot is copied while others are on the wire.
SLOT_BYTES = 4 << 20
NUM_SLOTS = 8
MAX_ACTIVE = 4  # chunks of one read
MAX_PACKED_RUNS = 2048  # as in any post; a chunk that is asked for has fewer
ANSWER_S = 10.0  # a source that is asked and does not answer is gone


class StagedTransport:
    """See `Transport` for the promises, which hold for staged memory too; and `stage`, which makes it so."""

    def __init__(
        self,
        inner: Transport,
        clock: Callable[[], float] = time.perf_counter,
        slot_bytes: int = SLOT_BYTES,
        num_slots: int = NUM_SLOTS,
        disconnects: Disconnects | None = None,
    ) -> None:
        self._disconnects = Disconnects() if disconnects is None else disconnects
        self._inner = inner
        self._clock = clock
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._pinned: Pinned | None = None
        self._ring: Ring | None = None
        self._lender: Lender | None = None
        self._scratch: Scratch | None = None
        self._metadata = b""  # by which a source finds its way back
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[AgentName, Chunk]] = {}
        self._denied: dict[int, str] = {}
        self._loaded: set[AgentName] = set()

    # --- what is passed on

    @property
    def agent(self) -> AgentName:
        return self._inner.agent

    @property
    def library(self) -> str:
        return self._inner.library

    def register(self, span: Span) -> None:
        self._inner.register(span)

    def deregister(self, span: Span) -> None:
        self._inner.deregister(span)

    def metadata(self, spans: Sequence[Span]) -> bytes:
        return self._inner.metadata(spans)

    def load_remote(self, metadata: bytes, agent: AgentName | None = None) -> AgentName:
        name = self._inner.load_remote(metadata, agent)
        self._loaded.add(name)
        return name

    def drop_remote(self, agent: AgentName) -> None:
        self._loaded.discard(agent)
        self._inner.drop_remote(agent)

    def notify(self, agent: AgentName, note: bytes) -> None:
        self._inner.notify(agent, note)

    def take_notes(self) -> list[tuple[AgentName, bytes]]:
        """Return none: they are this class's own."""
        self.progress()
        return []

    # --- memory that the library cannot reach

    def stage(self, driver: Driver, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Serve this memory by copies. Returns what readers must load instead; raises KvxferdError.

        The memory's device is current on the calling thread, which is the mover's.
        """
        lender = self._lender or self._open(driver)
        for span in spans:
            lender.add(span)
        return (lender.pinned.span,)

    def _open(self, driver: Driver) -> Lender:
        """Make both buffers, or none."""
        slots = self._slot_bytes, self._num_slots
        lender = Lender(self._inner, driver, *slots, self._loaded.__contains__)
        try:
            self._pinned = Pinned(self._inner, driver, self._slot_bytes * self._num_slots)
        except BaseException:
            lender.pinned.undo(self._inner)
            raise
        self._ring = Ring(self._pinned.address, *slots)
        self._lender = lender
        return lender

    # --- reads

    def post(self, agent: AgentName, runs: Runs, kinds: Kinds = HOST) -> ReadHandle:
        if not (kinds.local.staged or kinds.remote.staged):
            return self._inner.post(agent, runs, kinds)
        if kinds.local.staged and self._ring is None:
            raise TransportError("cannot read into memory that is not staged here", settled=True)
        max_runs = MAX_ASKED_RUNS if kinds.remote.staged else MAX_PACKED_RUNS
        left = chunks(runs, self._slot_bytes, max_runs)
        read = StagedRead(agent, kinds, left, next(left, None))
        self._advance(read)
        if read.fault is not None and not read.active and not read.touched:
            raise read.fault
        return read

    def poll(self, handle: ReadHandle) -> bool:
        if not isinstance(handle, StagedRead):
            if self._lender is not None:
                self._serve()
            return self._inner.poll(handle)
        if not handle.done:
            self._serve()
            self._advance(handle)
            if handle.fault is not None and not handle.active:
                raise handle.fault
        return handle.done

    def release(self, handle: ReadHandle) -> None:
        if not isinstance(handle, StagedRead):
            self._inner.release(handle)

    def progress(self) -> None:
        if self._lender is not None or self._asked:
            self._serve()
        else:
            self._inner.progress()

    def close(self) -> None:
        self._inner.close()
        if self._lender is not None:
            self._lender.pinned.close()
        if self._pinned is not None:
            self._pinned.close()
        self._lender = self._pinned = None

    # --- one read's chunks

    def _advance(self, read: StagedRead) -> None:
        """Move all chunks of a read on, and begin new ones where there is room."""
        for chunk in tuple(read.active):
            self._attempt(read, chunk, self._step)
        while read.fault is None and read.next is not None and len(read.active) < MAX_ACTIVE:
            slot = None
            if read.kinds.local.staged:
                assert self._ring is not None
                if (slot := self._ring.take()) is None:
                    if self._ring.is_spent:
                        read.fault = TransportError("cannot stage: every buffer is in doubt", settled=True)
                    break
            chunk = Chunk(read.next, Stage.READING, self._clock(), slot)
            read.next = next(read.left, None)
            read.active.append(chunk)
            self._attempt(read, chunk, self._begin)
        read.done = read.fault is None and read.next is None and not read.active

    def _attempt(self, read: StagedRead, chunk: Chunk, move: Callable[[StagedRead, Chunk], None]) -> None:
        try:
            move(read, chunk)
        except TransportError as error:
            self._fail(read, chunk, error)
        except DeviceError as error:
            # A copy that failed may be a copy that still runs.
            self._fail(read, chunk, TransportError(error.message, settled=False))

    def _begin(self, read: StagedRead, chunk: Chunk) -> None:
        if read.kinds.remote.staged:
            self._ask(read, chunk)
        else:
            self._read(read, chunk, chunk.runs.remote, read.kinds)

    def _ask(self, read: StagedRead, chunk: Chunk) -> None:
        chunk.stage, chunk.number = Stage.ASKED, next(self._numbers)
        self._stamps()
        ask = Ask(
            number=chunk.number,
            addresses=chunk.runs.remote.astype("<u8").tobytes(),
            lengths=chunk.runs.length.astype("<u4").tobytes(),
            metadata=self._metadata,
        )
        self._inner.notify(read.agent, encode(ask))
        self._asked[chunk.number] = (read.agent, chunk)

    def _stamps(self) -> Scratch:
        if self._scratch is None:
            self._scratch = Scratch(self._inner)
            self._metadata = self._inner.metadata([self._scratch.span])
        return self._scratch

    def _read(self, read: StagedRead, chunk: Chunk, remote: Any, kinds: Kinds) -> None:
        runs = chunk.runs
        local = runs.local if chunk.slot is None else packed_at(chunk.slot, runs.length)
        place = kinds.local if chunk.slot is None else HOST.local
        chunk.stage = Stage.READING
        chunk.handle = self._inner.post(
            read.agent, Runs(local, remote, runs.length), Kinds(place, kinds.remote)
        )
        read.touched = True
        if chunk.handle.done:
            self._step(read, chunk)

    def _step(self, read: StagedRead, chunk: Chunk) -> None:
        match chunk.stage:
            case Stage.ASKED:
                self._await_answer(read, chunk)
            case Stage.READING if self._is_read(chunk):
                if chunk.lent is not None:
                    self._check_stamp(read, chunk, chunk.lent)
                else:
                    self._copy(read, chunk)
            case Stage.CHECKING if self._is_read(chunk):
                self._judge(read, chunk)
            case Stage.COPYING:
                assert self._pinned is not None
                if self._pinned.driver.is_done(chunk.copied):
                    self._pinned.driver.drop_event(chunk.copied)
                    self._end(read, chunk)
            case _:
                pass

    def _is_read(self, chunk: Chunk) -> bool:
        assert chunk.handle is not None
        if not self._inner.poll(chunk.handle):
            return False
        self._inner.release(chunk.handle)
        chunk.handle = None
        return True

    def _await_answer(self, read: StagedRead, chunk: Chunk) -> None:
        if (why := self._denied.pop(chunk.number, None)) is not None:
            raise TransportError(f"cannot read from agent {read.agent}: {why}", settled=True)
        if chunk.lent is not None:
            remote = packed_at(chunk.lent.address, chunk.runs.length)
            self._read(read, chunk, remote, Kinds(read.kinds.local, HOST.remote))
        elif self._clock() > chunk.since + ANSWER_S:
            raise TransportError(
                f"cannot read from agent {read.agent}: it did not lend a chunk in {ANSWER_S:.0f} s",
                settled=True,
            )

    def _check_stamp(self, read: StagedRead, chunk: Chunk, lent: Lent) -> None:
        chunk.stage = Stage.CHECKING
        chunk.stamp_slot = self._stamps().take()
        if chunk.stamp_slot is None:
            raise TransportError("cannot read a chunk's stamp: too many are read", settled=True)
        chunk.handle = self._inner.post(
            read.agent, one_run(chunk.stamp_slot, lent.stamp_address, len(lent.stamp)), HOST
        )
        if chunk.handle.done:
            self._step(read, chunk)

    def _judge(self, read: StagedRead, chunk: Chunk) -> None:
        assert chunk.lent is not None and chunk.stamp_slot is not None
        word = self._stamps().word(chunk.stamp_slot)
        self._stamps().give_back(chunk.stamp_slot)
        chunk.stamp_slot = None
        self._return(read, chunk)
        if word != chunk.lent.stamp:
            raise TransportError(
                f"cannot read from agent {read.agent}: it took a chunk back before it was read", settled=True
            )
        self._copy(read, chunk)

    def _copy(self, read: StagedRead, chunk: Chunk) -> None:
        if chunk.slot is None:
            self._end(read, chunk)
            return
        assert self._pinned is not None
        runs, driver, stream = chunk.runs, self._pinned.driver, self._pinned.stream
        source = packed_at(chunk.slot, runs.length)
        chunk.stage = Stage.COPYING  # before: where a driver refuses the second copy, the first runs
        driver.copy(runs.local.tolist(), source.tolist(), runs.length.tolist(), stream)
        chunk.copied = driver.record(stream)

    def _end(self, read: StagedRead, chunk: Chunk) -> None:
        read.active.remove(chunk)
        if chunk.slot is not None and self._ring is not None:
            self._ring.give_back(chunk.slot)

    def _return(self, read: StagedRead, chunk: Chunk) -> None:
        """Tell the source that the chunk is not needed any more."""
        self._asked.pop(chunk.number, None)
        self._denied.pop(chunk.number, None)
        try:
            self._inner.notify(read.agent, encode(Returned(number=chunk.number)))
        except TransportError as error:
            _LOG.info("%s", error.message)  # its loan ends by itself
        chunk.number = 0

    def _fail(self, read: StagedRead, chunk: Chunk, error: TransportError) -> None:
        """End a chunk, and with it the read once its other chunks are terminal."""
        read.active.remove(chunk)
        if chunk.number:
            self._return(read, chunk)
        if error.lost and not error.settled:
            self._disconnects.ask(lambda over: self._free(chunk, over))
        else:
            self._free(chunk, error.settled)
        settled = error.settled
        if chunk.slot is not None:
            # What may still land lands in the slot; only a copy writes the place where it belongs.
            settled |= chunk.stage is not Stage.COPYING
        elif chunk.stage is Stage.CHECKING:
            settled = True  # the chunk itself is read
        first, message = read.fault, error.message if read.fault is None else read.fault.message
        fault = TransportError(message, settled=settled, lost=error.lost)
        if first is None or _doubt(fault) > _doubt(first):
            read.fault = fault

    def _free(self, chunk: Chunk, over: bool) -> None:
        """Take a failed chunk's slots back, or lose them where something may still land."""
        if chunk.stamp_slot is not None and over:
            self._stamps().give_back(chunk.stamp_slot)
        if chunk.slot is not None and self._ring is not None:
            if over:
                self._ring.give_back(chunk.slot)
            else:
                self._ring.lose(chunk.slot)

    # --- what other movers say

    def _serve(self) -> None:
        now = self._clock()
        for agent, payload in self._inner.take_notes():
            try:
                self._hear(agent, payload, now)
            except ProtocolError as error:
                _LOG.warning("agent %s: %s", agent, error.message)
        if self._lender is not None:
            self._lender.step(now)

    def _hear(self, agent: AgentName, payload: bytes, now: float) -> None:
        note = decode_note(payload)
        match note:
            case Ask():
                if self._lender is not None:
                    self._lender.asked(agent, note, now)
            case Returned():
                if self._lender is not None:
                    self._lender.returned(agent, note.number)
            case Lent() | Denied():
                whose, chunk = self._asked.get(note.number, (None, None))
                if whose != agent or chunk is None or chunk.lent is not None:
                    return
                if isinstance(note, Denied):
                    self._denied[note.number] = note.message[:MAX_SENTENCE_CHARS]
                elif _can_be(note):
                    chunk.lent = note
                else:
                    self._denied[note.number] = "it lends what cannot be"


def _doubt(fault: TransportError) -> int:
    """How little a failure proves: 0: it is over, 1: it is over where a disconnect proves it, 2: nothing."""
    return 0 if fault.settled else 1 if fault.lost else 2


def _can_be(lent: Lent) -> bool:
    """Whether another mover's word can be used: what it says is where this one reads, and how much."""
    places = (lent.address, lent.stamp_address)
    return len(lent.stamp) == STAMP_BYTES and all(0 < place < MAX_ADDRESS - SLOT_BYTES for place in places)


def one_run(local: int, remote: int, size_bytes: int) -> Runs:
    """Return a single stretch."""

    return Runs(*(np.array([number], dtype=np.uint64) for number in (local, remote, size_bytes)))
