"""The registered memory that covering reads land in, and who holds each part of it.

A chunk whose read may still write it is never handed out again: it is draining until the read is terminal,
and lost until the mover dies where nothing will ever prove that the read is over. The network writes chunks
alone, so none of that touches an engine's blocks.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from kvxferd.errors import DeviceError, KvxferdError
from kvxferd.ids import AgentName
from kvxferd.mover.transport.base import MemoryRange, Transport, TransportError
from kvxferd.wire.limits import CHUNK_BYTES, MAX_CHUNKS_PER_MOVER
from kvxferd.wire.mover import ChunkMemoryRequest

_LOG = logging.getLogger(__name__)

IDLE_S = 10.0  # after which a free chunk's memory is given back
SLOW_S = 0.05  # a read that takes longer has a source that is stopped, or far behind
RETRY_S = 1.0  # after a chunk could not be made
STUCK_S = 5.0  # a read that takes longer may never end: where its pull has ended, as good as lost


class ChunkState(Enum):
    """Who may write a chunk, and who reads it."""

    FREE = auto()
    READING = auto()  # for a pull
    SCATTERING = auto()  # its read is terminal
    DRAINING = auto()  # its pull has ended before its read
    LOST = auto()


# The states in which a read is not over, and may be any time.
_READ = frozenset({ChunkState.READING, ChunkState.DRAINING})

# A pair that is not here is a bug: a chunk would be used twice.
MOVES = frozenset(
    {
        (ChunkState.FREE, ChunkState.READING),
        (ChunkState.FREE, ChunkState.LOST),  # the library does not let it go
        (ChunkState.READING, ChunkState.SCATTERING),
        (ChunkState.READING, ChunkState.FREE),  # refused, or failed and over
        (ChunkState.READING, ChunkState.DRAINING),
        (ChunkState.READING, ChunkState.LOST),
        (ChunkState.SCATTERING, ChunkState.FREE),
        (ChunkState.SCATTERING, ChunkState.LOST),  # a GPU's copy, of which nothing shows when it is done
        (ChunkState.DRAINING, ChunkState.FREE),
        (ChunkState.DRAINING, ChunkState.LOST),
    }
)


class Chunk:
    """A range of this process's own memory, registered by itself."""

    def __init__(self, span: MemoryRange) -> None:
        self.span = span
        self.state = ChunkState.FREE
        self.agent: AgentName | None = None  # that it is read from
        self.since = 0.0  # when it came into its state

    @property
    def address(self) -> int:
        """The chunk's first address."""
        return self.span.address

    def free(self) -> None:
        """Free the memory, which is no longer registered. Raises DeviceError."""


class HostChunk(Chunk):
    """A chunk in host memory, which goes with the object."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        super().__init__(MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), size_bytes))
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)


class ChunkPool:
    """The chunks of one mover: made when they are first needed, given back when they are not.

    How many there may be is the daemon's to grant. It is asked when a chunk is first needed.
    """

    def __init__(
        self,
        transport: Transport,
        chunk_bytes: int = CHUNK_BYTES,
        max_chunks: int = 0,
        report: Callable[[ChunkMemoryRequest], None] | None = None,
    ) -> None:
        """`max_chunks`: the grant to begin with. `report` sends to the daemon; None: no grant will come."""
        self._transport = transport
        self._make_chunk: Callable[[int], Chunk] = HostChunk
        self.chunk_bytes = chunk_bytes
        self._max_chunks = max_chunks
        self._report = report
        self._reported: ChunkMemoryRequest | None = None
        self._is_wanted = False  # the daemon was asked, and is not told otherwise since
        self._awaits_grant = False
        self._last_used = 0.0
        self._make_again_at = 0.0
        self._chunks: list[Chunk] = []

    def use_chunks(self, make: Callable[[int], Chunk]) -> None:
        """Make chunks of other memory than the host's, of a given size. Called before any is made."""
        self._make_chunk = make

    @property
    def num_bytes(self) -> int:
        """The bytes that are held."""
        return sum(chunk.span.size_bytes for chunk in self._chunks)

    def count(self, state: ChunkState) -> int:
        """Return how many chunks are in a state."""
        return sum(chunk.state is state for chunk in self._chunks)

    def may_acquire_soon(self, agent: AgentName, now: float) -> bool:
        """Whether a chunk to read into from this agent is likely to be free before long."""
        if self._awaits_grant:
            return True
        num_lost = sum(c.state is ChunkState.LOST and c.agent == agent for c in self._chunks)
        if self._max_chunks > 1 and num_lost >= self._max_chunks - 1:
            return False  # as many as an agent ever gets
        num_useless = sum(c.state is ChunkState.LOST or _is_slow(c, now) for c in self._chunks)
        return min(len(self._chunks) + self._num_more(now), self._max_chunks) > num_useless

    def awaits_source(self, agent: AgentName, now: float) -> bool:
        """Whether the next chunk for this agent waits for a read from it, and not for memory.

        A read that is stuck may never end: it is not waited for.
        """
        held = (chunk for chunk in self._chunks if chunk.agent == agent)
        return any(_is_slow(chunk, now) and now < chunk.since + STUCK_S for chunk in held)

    @property
    def is_wanted(self) -> bool:
        """Whether the daemon counts on chunks being used, which `release_idle` may end."""
        return self._is_wanted or bool(self.count(ChunkState.FREE))

    def set_grant(self, num_chunks: int, now: float) -> None:
        """Hold so many chunks at most, lost ones included; give back what is free and more than that.

        Until the report says so, the daemon gives nobody what is over a smaller grant.
        """
        self._awaits_grant, self._max_chunks = False, num_chunks
        self._give_back(max(0, len(self._chunks) - num_chunks))
        self.report_changes(now)

    def acquire(self, agent: AgentName, now: float, *, is_wanted_elsewhere: bool) -> Chunk | None:
        """Return a chunk to read into from this agent, None while there is none for it.

        Where a pull waits for a chunk to read from elsewhere, the last chunk is not for an agent that has
        one. An agent whose reads are slow gets no second one in any case, and none gets all: a source that is
        stopped holds those that it had, and leaves one.
        """
        self._request_memory(now)
        held = [chunk for chunk in self._chunks if chunk.agent == agent]
        if any(_is_slow(chunk, now) for chunk in held):
            return None
        if self._max_chunks > 1 and len(held) >= self._max_chunks - 1:
            return None
        free = [c for c in self._chunks if c.state is ChunkState.FREE]
        if len(free) + self._num_more(now) < (2 if held and is_wanted_elsewhere else 1):
            return None
        chunk = free[-1] if free else self._make(now)
        if chunk is not None:
            self.move(chunk, ChunkState.READING, now, agent)
        return chunk

    def _num_more(self, now: float) -> int:
        """Return how many chunks may be made now."""
        return max(0, self._max_chunks - len(self._chunks)) if now >= self._make_again_at else 0

    def _request_memory(self, now: float) -> None:
        """Ask the daemon, unless it was asked, so that there may be a chunk when one is needed."""
        self._last_used = now
        if not self._is_wanted and self._report is not None:
            self._is_wanted = self._awaits_grant = True
            self.report_changes(now)

    def _make(self, now: float) -> Chunk | None:
        try:
            chunk = self._make_registered()
        except (OSError, KvxferdError) as error:
            _LOG.warning("chunk not made: reason=%s", error)
            self._make_again_at = now + RETRY_S
            return None
        self._chunks.append(chunk)
        return chunk

    def _make_registered(self) -> Chunk:
        chunk = self._make_chunk(self.chunk_bytes)
        try:
            self._transport.register(chunk.span)
        except TransportError:
            chunk.free()
            raise
        return chunk

    def move(self, chunk: Chunk, state: ChunkState, now: float, agent: AgentName | None = None) -> None:
        """Note that a chunk has come into a state. `agent`: as `Chunk.agent`, where it is acquired."""
        assert (chunk.state, state) in MOVES, f"a chunk cannot go from {chunk.state} to {state}"
        if state is ChunkState.FREE:
            chunk.agent = None
        elif agent is not None:
            chunk.agent = agent
        # A read that drains counts from its post.
        if state is not ChunkState.DRAINING:
            chunk.since = now
        chunk.state = state
        if state is ChunkState.FREE and len(self._chunks) > self._max_chunks:
            self._give_back(1)
        self.report_changes(now)

    def release_idle(self, now: float) -> None:
        """Give the memory back where no chunk was needed for `IDLE_S`."""
        if now >= self._last_used + IDLE_S and self.is_wanted:
            self._is_wanted = self._awaits_grant = False
            self._give_back(len(self._chunks))
            self.report_changes(now)

    def _give_back(self, num_chunks: int) -> None:
        """Give back so many chunks of those that are free.

        Nothing reads a chunk from outside: its registration is in no metadata that a peer has.
        """
        free = [chunk for chunk in self._chunks if chunk.state is ChunkState.FREE][:num_chunks]
        for chunk in free:
            try:
                self._transport.deregister(chunk.span)
            except TransportError as error:
                _LOG.warning("chunk not given back: reason=%s", error.message)
                self.move(chunk, ChunkState.LOST, self._last_used)
                continue
            self._chunks.remove(chunk)
            try:
                chunk.free()
            except DeviceError as error:
                _LOG.error("memory of a chunk not freed: reason=%s", error.message)

    def report_changes(self, now: float) -> None:
        """Report what the mover wants and holds, where that has changed.

        A read of an ended pull that is stuck counts as lost until it ends after all: only the mover's death
        frees its chunk.
        """
        stuck = [c for c in self._chunks if c.state is ChunkState.DRAINING and now >= c.since + STUCK_S]
        report = ChunkMemoryRequest(
            num_wanted=MAX_CHUNKS_PER_MOVER if self._is_wanted else 0,
            num_held=max(self._max_chunks, len(self._chunks)),
            num_lost=self.count(ChunkState.LOST) + len(stuck),
        )
        if self._report is not None and report != self._reported:
            self._reported = report
            self._report(report)


def _is_slow(chunk: Chunk, now: float) -> bool:
    """Whether the read into a chunk takes longer than reads do."""
    return chunk.state in _READ and now > chunk.since + SLOW_S
