"""The source's side of gathered reads: it packs scattered bytes of granted blocks for a peer to read.

Any agent may send a request with any content. One is served that names the fence word of a transfer under a
live grant, and bytes of that transfer's blocks alone; any other is refused at once. A stranger that names no
such word has no reply: nothing is loaded for it. The fence word proves to the reader, as in every read, that
the blocks were still the transfer's when the bytes were packed.

A chunk begins with a stamp, which is overwritten before the chunk is filled for another reader. A reader
that finds the stamp unchanged after it has read the chunk has read what was packed for it. No clock decides
that: a loan that is not returned in `CHUNK_LEASE_S` ends, whatever its reader does.
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from kvxferd.errors import EngineError
from kvxferd.ids import AgentName
from kvxferd.layout.areas import BlockArea
from kvxferd.mover.process.chunks import ChunkPool, ChunkState, HostChunk
from kvxferd.mover.process.covering import Bytes, at_any_byte
from kvxferd.mover.process.covering_reads import bytes_of
from kvxferd.mover.transport.base import Transport
from kvxferd.mover.transport.reply_agents import ReplyAgents
from kvxferd.plan.gathering import MAX_REACH, MAX_RUNS_PER_PATTERN, GrantedBlocks, Pattern
from kvxferd.plan.run_shapes import Int64s
from kvxferd.plan.stretches import MAX_STRETCH_BYTES
from kvxferd.wire.codec import encode
from kvxferd.wire.common import Message, RegionAddress
from kvxferd.wire.mover import GrantBlocks
from kvxferd.wire.staging import (
    MAX_GATHER_STARTS,
    MAX_STAGING_MESSAGE_BYTES,
    STAMP_BYTES,
    GatherMessage,
    GatherPattern,
    GatherReady,
    GatherRefused,
    GatherRelease,
    GatherRequest,
)

_LOG = logging.getLogger(__name__)

PACK_PIECE_BYTES = 128 << 10  # packed at a time: it stays in the cache, and takes under 0.1 ms
STEP_S = 0.3e-3  # of packing in one step of the mover's loop, which serves reads between two of them
CHUNK_LEASE_S = 5.0  # a reader reads a chunk of 4 MiB in milliseconds
WAIT_S = 0.05  # for a chunk: a reader that waits longer had better read otherwise
# A reader has three reads of a pull under way. More than these are no reader of ours. A request is 16 KiB.
MAX_WAITING, MAX_WAITING_PER_AGENT = 256, 32
MAX_EARLY = 64  # requests whose word is not known yet, in one step of the loop
HEADER_BYTES = 64  # for the stamp, a cache line of its own
# Of the blocks of live grants: 2 million. What is granted beyond that is not packed.
MAX_GRANTED_BYTES = 16 << 20

_LeaseKey = tuple[AgentName, int]


class _Part(NamedTuple):
    """Runs of one pattern from some starts on, in one region."""

    memory: Bytes
    starts: Int64s  # offsets in the region
    pattern: Pattern


@dataclass(slots=True, eq=False)
class _ChunkLease:
    """One request, from its arrival until its chunk is returned."""

    agent: AgentName
    request: GatherRequest
    requested_at: float
    parts: tuple[_Part, ...] | None = None  # once it is checked
    chunk: HostChunk | None = None
    pieces: Iterator[None] | None = None  # while it is packed
    stamp: bytes = b""
    expires_at: float = 0.0  # once it is lent

    @property
    def key(self) -> _LeaseKey:
        return self.agent, self.request.number


class GatherSource:
    """Serves requests for one mover's memory, a piece at a time, each reader in its turn."""

    def __init__(
        self,
        transport: Transport,
        chunks: ChunkPool,
        readers: ReplyAgents,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._transport = transport
        self._chunks = chunks
        self._readers = readers
        self._clock = clock
        self._regions: list[tuple[RegionAddress, Bytes]] = []  # by ascending address
        self._grants: dict[bytes, GrantedBlocks] = {}
        self._granted_bytes = 0
        # A grant comes from the daemon before the request with its word, but by a stream that is read later.
        self._early: list[tuple[AgentName, GatherRequest]] = []  # since the last step
        self._overdue: list[tuple[AgentName, GatherRequest]] = []  # since the step before
        self._waiting: dict[AgentName, deque[_ChunkLease]] = {}
        self._packing: deque[_ChunkLease] = deque()
        self._loans: dict[_LeaseKey, _ChunkLease] = {}  # that are packed, or are being packed
        self._areas: tuple[BlockArea, ...] = ()  # of the last grant: a rank's grants all have the same

    def bind(self, regions: Sequence[RegionAddress]) -> None:
        """Pack bytes of these regions, which are plain host memory."""
        ascending = sorted(regions, key=attrgetter("address"))
        self._regions = [(region, bytes_of(region)) for region in ascending]

    def grant(self, message: GrantBlocks) -> None:
        """Pack bytes of these blocks for who names the word."""
        self.revoke(message.word)
        if message.areas != self._areas:
            self._areas = message.areas
        blocks = GrantedBlocks(self._areas, message.blocks)
        if self._granted_bytes + blocks.num_bytes > MAX_GRANTED_BYTES:
            blocks = GrantedBlocks((), {})  # its readers are refused at once
        self._grants[message.word] = blocks
        self._granted_bytes += blocks.num_bytes
        if blocks.num_bytes:
            self._chunks.ask_for_memory(self._clock())  # a request that waits for the reply may wait too long

    def revoke(self, word: bytes) -> None:
        """Pack nothing more for who names the word. What is packed stays: its reader checks the word."""
        grant = self._grants.pop(word, None)
        if grant is None:
            return
        self._granted_bytes -= grant.num_bytes
        for loan in [loan for loan in self._packing if loan.request.word == word]:
            self._refuse(loan, "cannot gather: no grant on the transfer is left")
        for loan in [loan for queue in self._waiting.values() for loan in queue]:
            if loan.request.word == word:
                loan.parts = None  # it is checked again, and refused, when its turn comes

    @property
    def is_busy(self) -> bool:
        """Whether `step` has something to pack, or to refuse soon."""
        return bool(self._packing or self._waiting or self._early or self._overdue)

    @property
    def has_loans(self) -> bool:
        """Whether a chunk is lent, which `step` takes back some time."""
        return bool(self._loans)

    # --- messages of readers

    def handle(self, agent: AgentName, message: GatherMessage) -> None:
        """Queue a request, which `step` checks, or refuse it; take back a chunk that is released."""
        if isinstance(message, GatherRelease):
            self._handle_release((agent, message.number))
        elif isinstance(message, GatherRequest):
            if message.word in self._grants:
                self._queue(agent, message)
            elif len(self._early) < MAX_EARLY:
                self._early.append((agent, message))

    def _queue_early(self) -> bool:
        """Queue requests whose grants have come in the meantime, and those that can be refused."""
        overdue, self._overdue, self._early = self._overdue, self._early, []
        for agent, message in overdue:
            if message.word in self._grants or self._readers.is_known(agent):
                self._queue(agent, message)
        return bool(overdue)

    def _queue(self, agent: AgentName, message: GatherRequest) -> None:
        if why := self._find_no_room(agent, message.number):
            self._reply(agent, message, GatherRefused(number=message.number, message=why))
            return
        self._waiting.setdefault(agent, deque()).append(_ChunkLease(agent, message, self._clock()))

    def _find_no_room(self, agent: AgentName, number: int) -> str:
        """Return why a request cannot even wait, "" if it can."""
        num_waiting = sum(map(len, self._waiting.values()))
        own = self._waiting.get(agent, ())
        if num_waiting >= MAX_WAITING or len(own) >= MAX_WAITING_PER_AGENT:
            return f"cannot gather: {num_waiting} requests wait, {len(own)} of this reader"
        if (agent, number) in self._loans or any(one.request.number == number for one in own):
            return f"cannot gather under the number {number} twice"
        return ""

    def _check(self, request: GatherRequest) -> tuple[_Part, ...]:
        """Return what to pack. Raises EngineError."""
        grant = self._grants.get(request.word)
        if grant is None:
            raise EngineError("cannot gather: no grant with this word is known here")
        num_bytes = sum(len(one.starts) for one in request.patterns)
        if not 0 < num_bytes <= 8 * MAX_GATHER_STARTS or any(len(p.starts) % 8 for p in request.patterns):
            raise EngineError(f"cannot gather from {num_bytes} bytes of starts: 8 to {8 * MAX_GATHER_STARTS}")
        parts = tuple(map(self._part_of, request.patterns))
        total = sum(len(part.starts) * part.pattern.size_bytes for part in parts)
        if total > (limit := self._chunks.chunk_bytes - HEADER_BYTES):
            raise EngineError(f"cannot gather {total} bytes: {limit} are the limit")
        started_in = {id(part.memory) for part in parts}
        for region, memory in self._regions:
            if id(memory) not in started_in:
                continue
            here = [part for part in parts if part.memory is memory]
            extents = [part.pattern.extent for part in here]
            begins = np.concatenate([p.starts + low for p, (low, _) in zip(here, extents, strict=True)])
            sizes = np.repeat([high - low for low, high in extents], [len(part.starts) for part in here])
            # The memory's own end, too: what is granted comes from a layout that this mover does not check.
            is_inside = int(begins.min()) >= 0 and int((begins + sizes).max()) <= region.size_bytes
            if not is_inside or not grant.holds(region.region, begins, sizes):
                raise EngineError("cannot gather bytes that are not of granted blocks")
        return parts

    def _part_of(self, asked: GatherPattern) -> _Part:
        """Return a pattern with the region in which it starts. Raises EngineError."""
        pattern = Pattern(asked.length, asked.outer, asked.outer_stride, asked.inner, asked.inner_stride)
        what = f"cannot gather by the pattern {tuple(pattern)}"
        if min(pattern.length, pattern.outer, pattern.inner) <= 0:
            raise EngineError(f"{what}: lengths and counts are 1 or more")
        if pattern.num_runs > MAX_RUNS_PER_PATTERN or pattern.size_bytes > MAX_STRETCH_BYTES:
            raise EngineError(
                f"{what}: {MAX_RUNS_PER_PATTERN} runs and {MAX_STRETCH_BYTES} bytes are the limit"
            )
        if max(abs(pattern.outer_stride), abs(pattern.inner_stride)) > MAX_REACH // MAX_RUNS_PER_PATTERN:
            raise EngineError(f"{what}: no block is that long")
        starts = np.frombuffer(asked.starts, dtype="<u8")
        low, high = (int(starts.min()), int(starts.max())) if len(starts) else (0, 0)
        number = bisect_right(self._regions, low, key=lambda one: one[0].address) - 1
        if number >= 0:
            region, memory = self._regions[number]
            if high < region.address + region.size_bytes:
                return _Part(memory, (starts - np.uint64(region.address)).astype(np.int64), pattern)
        raise EngineError("cannot gather bytes that are not of one region of this rank")

    def _handle_release(self, key: _LeaseKey) -> None:
        if (loan := self._loans.get(key)) is not None:
            self._end(loan)
            return
        for loan in self._waiting.get(key[0], ()):
            if loan.key == key:
                self._end(loan)
                return
        for early in (self._early, self._overdue):
            early[:] = [one for one in early if (one[0], one[1].number) != key]

    # --- work

    def step(self) -> bool:
        """Pack for `STEP_S` at most; end loans that are over. Return whether anything was done."""
        now = self._clock()
        moved = self._queue_early()
        for loan in list(self._loans.values()):
            if loan.expires_at and now >= loan.expires_at:
                _LOG.info("chunk not returned: agent=%s", loan.agent)
                self._end(loan)
        if self._waiting:
            moved |= self._check_some(now)
            moved |= self._start_some(now)
        while self._packing:
            moved = True
            loan = self._packing.popleft()
            self._packing.append(loan)  # the others come first
            self._pack_piece(loan)
            if self._clock() >= now + STEP_S:
                break
        self._readers.forget_idle(now)
        return moved

    def _check_some(self, now: float) -> bool:
        """Check requests for `STEP_S` at most, one of each reader in turn; refuse what is not granted."""
        moved = False
        while (loan := self._find_unchecked()) is not None:
            moved = True
            self._waiting[loan.agent] = self._waiting.pop(loan.agent)  # the others come first
            try:
                loan.parts = self._check(loan.request)
            except EngineError as error:
                self._refuse(loan, error.message)
            except Exception:  # of what a stranger sends: it must not end this mover
                _LOG.exception("request not checked: agent=%s", loan.agent)
                self._refuse(loan, "cannot gather: the request cannot be checked")
            if self._clock() >= now + STEP_S:
                break
        return moved

    def _find_unchecked(self) -> _ChunkLease | None:
        loans = (loan for queue in self._waiting.values() for loan in queue)
        return next((loan for loan in loans if loan.parts is None), None)

    def _start_some(self, now: float) -> bool:
        """Give free chunks to readers that have fewest; refuse who has waited for long."""
        moved = False
        while ready := [queue[0] for queue in self._waiting.values() if queue[0].parts is not None]:
            held = [loan.agent for loan in self._loans.values()]
            loan = min(ready, key=lambda one: held.count(one.agent))
            if (chunk := self._chunks.lend(now)) is None:
                break
            self._forget_waiting(loan)
            self._start(loan, chunk)
            moved = True
        for loan in [one for queue in self._waiting.values() for one in queue]:
            if now >= loan.requested_at + WAIT_S:
                self._refuse(loan, "cannot gather: there is no memory for a chunk")
                moved = True
                if self._clock() >= now + STEP_S:
                    break
        return moved

    def _start(self, loan: _ChunkLease, chunk: HostChunk) -> None:
        loan.chunk, loan.stamp = chunk, os.urandom(STAMP_BYTES)
        assert loan.parts is not None
        # Before the first byte is packed, so that a reader of an earlier loan finds the stamp changed.
        _write_stamp(chunk, loan.stamp)
        loan.pieces = pack(loan.parts, chunk.bytes[HEADER_BYTES:])
        self._loans[loan.key] = loan
        self._packing.append(loan)

    def _pack_piece(self, loan: _ChunkLease) -> None:
        assert loan.pieces is not None and loan.chunk is not None
        try:
            if next(loan.pieces, loan) is not loan:
                return
            metadata = self._transport.metadata([loan.chunk.span])
        except Exception:
            _LOG.exception("chunk not packed: agent=%s", loan.agent)
            self._refuse(loan, "cannot gather: packing has failed")
            return
        ready = GatherReady(
            number=loan.request.number,
            address=loan.chunk.address + HEADER_BYTES,
            stamp_address=loan.chunk.address,
            stamp=loan.stamp,
            metadata=metadata,
        )
        if len(encode(ready)) > MAX_STAGING_MESSAGE_BYTES:  # its reader would not receive it
            self._refuse(loan, f"cannot gather: a chunk's metadata is {len(metadata)} bytes")
            return
        self._packing.remove(loan)
        loan.pieces = None
        loan.expires_at = self._clock() + CHUNK_LEASE_S
        if not self._reply(loan.agent, loan.request, ready):
            self._end(loan)

    def _refuse(self, loan: _ChunkLease, why: str) -> None:
        self._end(loan)
        self._reply(loan.agent, loan.request, GatherRefused(number=loan.request.number, message=why))

    def _end(self, loan: _ChunkLease) -> None:
        """Forget a request, or take its chunk back."""
        self._forget_waiting(loan)
        if loan in self._packing:
            self._packing.remove(loan)
        self._loans.pop(loan.key, None)
        if loan.chunk is not None:
            _write_stamp(loan.chunk, os.urandom(STAMP_BYTES))
            self._chunks.move(loan.chunk, ChunkState.FREE, self._clock())
            loan.chunk = None

    def _forget_waiting(self, loan: _ChunkLease) -> None:
        queue = self._waiting.get(loan.agent)
        if queue is not None and loan in queue:
            queue.remove(loan)
            if not queue:
                del self._waiting[loan.agent]

    def _reply(self, agent: AgentName, request: GatherRequest, message: Message) -> bool:
        """Send a reply; return whether it was sent."""
        if why := self._readers.send(agent, request.metadata, encode(message), self._clock()):
            _LOG.warning("gather reply not sent: agent=%s reason=%s", agent, why)
        return not why


def pack(parts: Sequence[_Part], target: Bytes) -> Iterator[None]:
    """Copy the runs of all parts, one behind the other, and yield after each piece."""
    at = 0
    for memory, starts, pattern in parts:
        offsets = pattern.offsets()
        source = at_any_byte(memory, pattern.length)
        rows = max(1, min(PACK_PIECE_BYTES // pattern.size_bytes, MAX_RUNS_PER_PATTERN // pattern.num_runs))
        for first in range(0, len(starts), rows):
            chosen = (starts[first : first + rows, None] + offsets).ravel()
            end = at + len(chosen) * pattern.length
            target[at:end].view(f"V{pattern.length}")[:] = source[chosen]
            at = end
            yield


def _write_stamp(chunk: HostChunk, stamp: bytes) -> None:
    chunk.bytes[:STAMP_BYTES] = np.frombuffer(stamp, dtype=np.uint8)
