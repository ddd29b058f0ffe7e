"""A transport for memory that the library cannot reach: by copies through a staging buffer of the mover.

`StagedTransport` stands between the pull engine and the real transport. Reads between memory that both
libraries can reach are passed on. A read into staged memory lands in a slot and is copied from there; a read
from staged memory is requested from the source's mover, which leases it in chunks (`StagingSource`). Several
chunks are in flight at once, so that copy and wire overlap.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, assert_never

from kvxferd.errors import DeviceError, ProtocolError
from kvxferd.ids import AgentName
from kvxferd.memory.driver import Driver
from kvxferd.mover.transport.base import HOST, MemoryRange, ReadHandle, ReadKinds, Transport, TransportError
from kvxferd.mover.transport.buffers import PinnedBuffer, SlotPool, WordSlots
from kvxferd.mover.transport.copy_probe import probe_copy_rows
from kvxferd.mover.transport.reply_agents import ReplyAgents
from kvxferd.mover.transport.runs import packed_addresses, single_run, split_into_chunks
from kvxferd.mover.transport.staging_source import CHUNK_REPLY_TIMEOUT_S, StagingSource
from kvxferd.plan import Runs
from kvxferd.wire.codec import encode
from kvxferd.wire.limits import MAX_ADDRESS, MAX_SENTENCE_CHARS
from kvxferd.wire.mover import MoverWorn
from kvxferd.wire.staging import (
    MAX_CHUNK_RUNS,
    STAMP_BYTES,
    ChunkReady,
    ChunkRefused,
    ChunkRelease,
    ChunkRequest,
    decode_staging_message,
)

_LOG = logging.getLogger(__name__)

# As long as the longest run that the pull engine posts. Two pools of eight slots are 64 MiB of pinned memory
# for a mover that stages, and enough that one slot is copied while others are on the wire.
SLOT_BYTES = 4 << 20
NUM_SLOTS = 8
MAX_ACTIVE_CHUNKS = 4  # of one read
MAX_PACKED_RUNS = 2048  # as in any post; a requested chunk has fewer


class PartState(Enum):
    """The step that a chunk is at."""

    REQUESTED = auto()  # the source copies it
    READING = auto()
    VERIFYING = auto()  # its stamp is read again, to see whether it was still the requested chunk
    COPYING = auto()  # to its destination


@dataclass(slots=True, eq=False)
class StagedPart:
    """A part of a read that fits into one slot."""

    runs: Runs
    state: PartState
    created_at: float
    slot: int | None = None  # of this mover's own
    number: int = 0  # of the request
    ready: ChunkReady | None = None
    refusal: str = ""  # instead of `ready`
    handle: ReadHandle | None = None
    stamp_slot: int | None = None
    copy_event: Any = None


@dataclass(slots=True, eq=False)
class StagedRead:
    """One posted read: its chunks in flight, and the runs of those to come."""

    agent: AgentName
    kinds: ReadKinds
    remaining: Iterator[Runs]
    next: Runs | None
    active: list[StagedPart] = field(default_factory=list)
    error: TransportError | None = None
    has_posted: bool = False  # a part of it was posted
    done: bool = False

    def cancel(self) -> None:
        """Start no more parts. It fails once those in flight have ended, and settled if they have."""
        self.error = self.error or TransportError("the read was cancelled", settled=True)


class StagedTransport:
    """Keeps the contract of `Transport` for staged memory too; `stage` makes memory staged."""

    def __init__(
        self,
        inner: Transport,
        clock: Callable[[], float] = time.perf_counter,
        slot_bytes: int = SLOT_BYTES,
        num_slots: int = NUM_SLOTS,
        report: Callable[[MoverWorn], None] = lambda worn: None,
    ) -> None:
        """`report` sends to the daemon."""
        self._report = report
        self._inner = inner
        self._clock = clock
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._pinned: PinnedBuffer | None = None
        self._slots: SlotPool | None = None
        self._source: StagingSource | None = None
        self._source_error: DeviceError | None = None  # since which nothing can be served
        self._stamp_slots: WordSlots | None = None
        self._unused_slots: WordSlots | None = None
        self._reply_metadata = b""  # which a source loads to reply
        self._requested: dict[int, tuple[AgentName, StagedPart]] = {}
        self._loaded_agents: set[AgentName] = set()
        self._reply_agents = ReplyAgents(inner, self._loaded_agents.__contains__)

    # --- calls that are passed on

    @property
    def agent(self) -> AgentName:
        return self._inner.agent

    @property
    def library(self) -> str:
        return self._inner.library

    def register(self, span: MemoryRange) -> None:
        self._inner.register(span)

    def deregister(self, span: MemoryRange) -> None:
        self._inner.deregister(span)

    def metadata(self, spans: Sequence[MemoryRange]) -> bytes:
        return self._inner.metadata(spans)

    def load_remote(self, metadata: bytes, agent: AgentName | None = None) -> AgentName:
        if agent is not None and agent not in self._loaded_agents:
            self._reply_agents.give_up(agent)
        name = self._inner.load_remote(metadata, agent)
        self._loaded_agents.add(name)
        return name

    def drop_remote(self, agent: AgentName) -> None:
        self._loaded_agents.discard(agent)
        self._inner.drop_remote(agent)

    def notify(self, agent: AgentName, payload: bytes) -> None:
        self._inner.notify(agent, payload)

    def receive_notifications(self) -> list[tuple[AgentName, bytes]]:
        """Return none: all notifications are between instances of this class."""
        self.progress()
        return []

    # --- memory that the library cannot reach

    def stage(self, driver: Driver, uuid: str, spans: Sequence[MemoryRange]) -> tuple[MemoryRange, ...]:
        """Serve this memory of a device by copies. Returns the spans that readers load instead.

        Raises KvxferdError.
        """
        source = self._source or self._open_buffers(driver, uuid)
        for span in spans:
            source.add(span)
        return (source.pinned.span,)

    def _open_buffers(self, driver: Driver, uuid: str) -> StagingSource:
        """Make both buffers, or none."""
        if why := probe_copy_rows(driver, uuid):
            _LOG.warning("staged runs copied one by one: device=%s reason=%s", uuid, why)
        slots, size_bytes = (self._slot_bytes, self._num_slots), self._slot_bytes * self._num_slots
        source = StagingSource(self._inner, driver, uuid, *slots, not why, self._reply_agents)
        try:
            self._pinned = PinnedBuffer(self._inner, driver, uuid, size_bytes, not why)
        except BaseException:
            source.pinned.discard(self._inner)
            raise
        self._slots = SlotPool(self._pinned.address, *slots)
        self._source = source
        return source

    # --- reads

    def can_stage(self, agent: AgentName) -> bool:
        """Whether a read from this agent into staged memory would start now, or be refused."""
        return self._slots is None or self._slots.is_exhausted or self._slots.is_free_for(agent)

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
        if not (kinds.local.staged or kinds.remote.staged):
            return self._inner.post(agent, runs, kinds)
        if kinds.local.staged and self._slots is None:
            raise TransportError("cannot read into memory that is not staged here", settled=True)
        max_runs = MAX_CHUNK_RUNS if kinds.remote.staged else MAX_PACKED_RUNS
        left = split_into_chunks(runs, self._slot_bytes, max_runs)
        read = StagedRead(agent, kinds, left, next(left, None))
        self._advance_read(read)
        if read.error is not None and not read.active and not read.has_posted:
            raise read.error
        return read

    def poll(self, handle: ReadHandle) -> bool:
        if not isinstance(handle, StagedRead):
            if self._source is not None:
                self._serve_notifications()
            return self._inner.poll(handle)
        if not handle.done:
            self._serve_notifications()
            self._advance_read(handle)
            if handle.error is not None and not handle.active:
                raise handle.error
        return handle.done

    def release(self, handle: ReadHandle) -> None:
        if not isinstance(handle, StagedRead):
            self._inner.release(handle)

    def progress(self) -> None:
        if self._source is not None or self._requested:
            self._serve_notifications()
        else:
            self._inner.progress()
        if self._source_error is not None:
            raise self._source_error  # the mover ends, and its rank gets another

    def close(self) -> None:
        self._inner.close()
        if self._source is not None:
            self._source.pinned.close()
        if self._pinned is not None:
            self._pinned.close()
        self._source = self._pinned = None

    # --- one read's chunks

    def _advance_read(self, read: StagedRead) -> None:
        """Advance all chunks of a read, and start new ones where there is room."""
        for chunk in tuple(read.active):
            self._try_step(read, chunk, self._advance_chunk)
        while read.error is None and read.next is not None and len(read.active) < MAX_ACTIVE_CHUNKS:
            slot = None
            if read.kinds.local.staged:
                assert self._slots is not None
                if (slot := self._slots.acquire(read.agent)) is None:
                    if self._slots.is_exhausted:
                        read.error = TransportError("cannot stage: every buffer is in doubt", settled=True)
                    break
            chunk = StagedPart(read.next, PartState.READING, self._clock(), slot)
            read.next = next(read.remaining, None)
            read.active.append(chunk)
            self._try_step(read, chunk, self._start_chunk)
        read.done = read.error is None and read.next is None and not read.active

    def _try_step(
        self, read: StagedRead, chunk: StagedPart, step: Callable[[StagedRead, StagedPart], None]
    ) -> None:
        try:
            step(read, chunk)
        except TransportError as error:
            self._fail_chunk(read, chunk, error)
        except DeviceError as error:
            # A copy that failed may be a copy that still runs.
            self._fail_chunk(read, chunk, TransportError(error.message, settled=False))

    def _start_chunk(self, read: StagedRead, chunk: StagedPart) -> None:
        if read.kinds.remote.staged:
            self._request_chunk(read, chunk)
        else:
            self._post_read(read, chunk, chunk.runs.remote, read.kinds)

    def _request_chunk(self, read: StagedRead, chunk: StagedPart) -> None:
        chunk.state = PartState.REQUESTED
        # Who replies with the number has received the request. The name of an agent in a message is no proof:
        # it is what its sender wrote.
        chunk.number = secrets.randbits(63)
        self._open_reply_metadata()
        request = ChunkRequest(
            number=chunk.number,
            addresses=chunk.runs.remote.astype("<u8").tobytes(),
            lengths=chunk.runs.length.astype("<u4").tobytes(),
            metadata=self._reply_metadata,
        )
        self._inner.notify(read.agent, encode(request))
        self._requested[chunk.number] = (read.agent, chunk)

    def _open_stamp_slots(self) -> WordSlots:
        if self._stamp_slots is None:
            self._stamp_slots = WordSlots(self._inner)
        return self._stamp_slots

    def _open_reply_metadata(self) -> None:
        """Describe memory that nothing uses: who has the metadata can write there, over no stamp."""
        if self._unused_slots is None:
            self._unused_slots = WordSlots(self._inner)
            self._reply_metadata = self._inner.metadata([self._unused_slots.span])

    def _post_read(self, read: StagedRead, chunk: StagedPart, remote: Any, kinds: ReadKinds) -> None:
        runs = chunk.runs
        local = runs.local if chunk.slot is None else packed_addresses(chunk.slot, runs.length)
        place = kinds.local if chunk.slot is None else HOST.local
        chunk.state = PartState.READING
        chunk.handle = self._inner.post(
            read.agent, Runs(local, remote, runs.length), ReadKinds(place, kinds.remote)
        )
        read.has_posted = True
        if chunk.handle.done:
            self._advance_chunk(read, chunk)

    def _advance_chunk(self, read: StagedRead, chunk: StagedPart) -> None:
        match chunk.state:
            case PartState.REQUESTED:
                self._check_reply(read, chunk)
            case PartState.READING if self._is_read_done(chunk):
                if chunk.ready is not None:
                    self._post_stamp_read(read, chunk, chunk.ready)
                else:
                    self._start_copy(read, chunk)
            case PartState.VERIFYING if self._is_read_done(chunk):
                self._verify_stamp(read, chunk)
            case PartState.COPYING:
                assert self._pinned is not None
                if self._pinned.is_done(chunk.copy_event):
                    self._end_chunk(read, chunk)
            case _:
                pass

    def _is_read_done(self, chunk: StagedPart) -> bool:
        assert chunk.handle is not None
        if not self._inner.poll(chunk.handle):
            return False
        self._inner.release(chunk.handle)
        chunk.handle = None
        return True

    def _check_reply(self, read: StagedRead, chunk: StagedPart) -> None:
        if chunk.refusal:
            raise TransportError(f"cannot read from agent {read.agent}: {chunk.refusal}", settled=True)
        if chunk.ready is not None:
            remote = packed_addresses(chunk.ready.address, chunk.runs.length)
            self._post_read(read, chunk, remote, ReadKinds(read.kinds.local, HOST.remote))
        elif self._clock() > chunk.created_at + CHUNK_REPLY_TIMEOUT_S:
            raise TransportError(
                f"cannot read from agent {read.agent}: it sent no chunk in {CHUNK_REPLY_TIMEOUT_S:.0f} s",
                settled=True,
            )

    def _post_stamp_read(self, read: StagedRead, chunk: StagedPart, ready: ChunkReady) -> None:
        chunk.state = PartState.VERIFYING
        chunk.stamp_slot = self._open_stamp_slots().acquire()
        if chunk.stamp_slot is None:
            raise TransportError("cannot read a chunk's stamp: too many are read", settled=True)
        chunk.handle = self._inner.post(
            read.agent, single_run(chunk.stamp_slot, ready.stamp_address, len(ready.stamp)), HOST
        )
        if chunk.handle.done:
            self._advance_chunk(read, chunk)

    def _verify_stamp(self, read: StagedRead, chunk: StagedPart) -> None:
        assert chunk.ready is not None and chunk.stamp_slot is not None
        word = self._open_stamp_slots().read(chunk.stamp_slot)
        self._open_stamp_slots().release(chunk.stamp_slot)
        chunk.stamp_slot = None
        self._release_chunk(read, chunk)
        if word != chunk.ready.stamp:
            raise TransportError(
                f"cannot read from agent {read.agent}: it took a chunk back before it was read", settled=True
            )
        self._start_copy(read, chunk)

    def _start_copy(self, read: StagedRead, chunk: StagedPart) -> None:
        if chunk.slot is None:
            self._end_chunk(read, chunk)
            return
        assert self._pinned is not None
        local, length = chunk.runs.local, chunk.runs.length
        chunk.state = PartState.COPYING  # set before: a driver that refuses the second copy runs the first
        chunk.copy_event = self._pinned.start_copies(
            Runs(local, packed_addresses(chunk.slot, length), length)
        )

    def _end_chunk(self, read: StagedRead, chunk: StagedPart) -> None:
        read.active.remove(chunk)
        if chunk.slot is not None and self._slots is not None:
            self._slots.release(chunk.slot)

    def _release_chunk(self, read: StagedRead, chunk: StagedPart) -> None:
        """Release the chunk at its source, which may use its slot again."""
        self._requested.pop(chunk.number, None)
        try:
            self._inner.notify(read.agent, encode(ChunkRelease(number=chunk.number)))
        except TransportError as error:
            # The lease expires at the source.
            _LOG.info("chunk not released: agent=%s reason=%s", read.agent, error.message)
        chunk.number = 0

    def _fail_chunk(self, read: StagedRead, chunk: StagedPart, error: TransportError) -> None:
        """End a chunk, and with it the read once its other chunks are terminal."""
        read.active.remove(chunk)
        if chunk.number:
            self._release_chunk(read, chunk)
        self._release_slots(chunk, error.settled)
        settled = error.settled
        if chunk.slot is not None:
            # A read lands in the slot; only the copy writes the destination.
            settled |= chunk.state is not PartState.COPYING
        elif chunk.state is PartState.VERIFYING:
            settled = True  # the chunk's own read has ended
        first, message = read.error, error.message if read.error is None else read.error.message
        if first is None or (first.settled and not settled):
            read.error = TransportError(message, settled=settled, lost=error.lost)

    def _release_slots(self, chunk: StagedPart, over: bool) -> None:
        """Release a failed chunk's slots, or quarantine them where something may still land there."""
        if chunk.stamp_slot is not None and over:
            self._open_stamp_slots().release(chunk.stamp_slot)
        if chunk.slot is not None and self._slots is not None:
            if over:
                self._slots.release(chunk.slot)
            else:
                self._slots.quarantine(chunk.slot)
                if self._slots.is_exhausted:
                    self._report(MoverWorn())

    # --- messages of other movers

    def _serve_notifications(self) -> None:
        now = self._clock()
        for agent, payload in self._inner.receive_notifications():
            try:
                self._handle(agent, payload, now)
            except ProtocolError as error:
                _LOG.warning("malformed staging message: agent=%s reason=%s", agent, error.message)
        if self._source is not None and self._source_error is None:
            try:
                self._source.step(now)
            except DeviceError as error:
                self._source_error = error  # of no read that is polled here: `progress` raises it

    def _handle(self, agent: AgentName, payload: bytes, now: float) -> None:
        message = decode_staging_message(payload)
        match message:
            case ChunkRequest():
                if self._source is not None:
                    self._source.handle_request(agent, message, now)
            case ChunkRelease():
                if self._source is not None:
                    self._source.handle_release(agent, message.number)
            case ChunkReady() | ChunkRefused():
                source, chunk = self._requested.get(message.number, (None, None))
                if source != agent or chunk is None or chunk.ready is not None:
                    return
                if isinstance(message, ChunkRefused):
                    chunk.refusal = message.message[:MAX_SENTENCE_CHARS] or "it gives no reason"
                elif _is_plausible(message):
                    chunk.ready = message
                else:
                    chunk.refusal = "it lends what cannot be"
            case _:
                assert_never(message)


def _is_plausible(ready: ChunkReady) -> bool:
    """Whether a chunk's addresses and stamp can be used: this mover reads there, as a peer has written it."""
    addresses = (ready.address, ready.stamp_address)
    return len(ready.stamp) == STAMP_BYTES and all(0 < one < MAX_ADDRESS - SLOT_BYTES for one in addresses)
