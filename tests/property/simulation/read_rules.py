"""The order that a mover's reads must keep, and the memory that they may use, whatever its pulls come to."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxferd.ids import AgentName, PullId
from kvxferd.mover.chunks.chunk_pool import ChunkPool, ChunkState
from kvxferd.wire import mover as mv
from kvxferd.wire.common import Message
from kvxferd.wire.limits import CHUNK_BYTES, FENCE_WORD_BYTES
from tests.property.simulation.memory import UNIT_BYTES
from tests.property.simulation.oracle import Violation

if TYPE_CHECKING:
    from tests.property.simulation.mover import Mover
    from tests.property.simulation.transport import Read

Run = tuple[int, int, int]  # address here, address there, bytes


@dataclass(slots=True, eq=False)
class _Pull:
    """What has been seen of one pull."""

    start: mv.StartPull
    blocks: set[int] = field(default_factory=set)
    has_data_read: bool = False  # one was posted into its blocks
    has_word_read: bool = False
    is_aborted: bool = False
    is_doubtful: bool = False  # a read into its blocks failed, and may still land
    may_be_doubtful: bool = False  # a read of its word failed, which may have been another's of the same word
    told: mv.PullDone | None = None


class ReadRules:
    """Watches what one mover posts, and what it reports. Everything here raises `Violation`."""

    def __init__(self, mover: Mover, chunks: ChunkPool) -> None:
        self._mover = mover
        self._chunks = chunks
        self._pulls: dict[PullId, _Pull] = {}
        self._doubtful: list[tuple[int, int]] = []  # where failed reads may land until the mover is dead
        self._granted_bytes = self._held_bytes = 0  # of chunks

    def _fail(self, text: str) -> None:
        raise Violation("violations", f"{self._mover.name} {text}")

    # --- messages

    def handle(self, message: Message) -> None:
        """Note a message of the daemon, with all its block ids."""
        match message:
            case mv.StartPull():
                blocks = list(memoryview(message.local["full"].ids).cast("i"))
                self._pulls[message.pull] = _Pull(message, set(blocks))
                self._check_ids(message, blocks)
            case mv.AbortPull() if (pull := self._pulls.get(message.pull)) is not None:
                pull.is_aborted = True
            case mv.ChunkMemoryGranted():
                self._granted_bytes = message.num_chunks * CHUNK_BYTES

    def _check_ids(self, start: mv.StartPull, blocks: list[int]) -> None:
        process = self._mover.process
        if start.ticket is None or (process, start.ticket) not in process.engine.pulls:
            return
        requested = process.engine.pulls[process, start.ticket].ids
        first = requested.index(blocks[0]) if blocks and blocks[0] in requested else 0
        if requested[first : first + len(blocks)] != blocks:
            self._fail(f"is to read pull {start.pull} into blocks {blocks}: its rank has named {requested}")

    def reported(self, message: Message) -> None:
        """Check what the mover tells its daemon."""
        match message:
            case mv.PullDone():
                pull = self._pulls[message.pull]
                pull.told, outcome = message, message.outcome
                if pull.has_data_read and not outcome.started:
                    self._fail(f"says that no read of pull {message.pull} was posted")
                if outcome.delivered and pull.is_aborted:
                    self._fail(f"delivers pull {message.pull}, which was cancelled")
                if outcome.delivered or outcome.finished:
                    self._check_is_over(pull)
                    del self._pulls[message.pull]
            case mv.PullQuiesced():
                pull = self._pulls.pop(message.pull)
                self._check_is_over(pull)
                told = pull.told
                if told is None or not told.outcome.quiesced_follows:
                    self._fail(f"says that pull {message.pull} is quiet, and had said that it never would")

    def _check_is_over(self, pull: _Pull) -> None:
        if pull.is_doubtful:
            self._fail(f"calls pull {pull.start.pull} over, of which a failed read may still land")

    # --- reads

    def posted(self, agent: AgentName, runs: Sequence[Run]) -> None:
        """A read is about to begin."""
        for local, remote, size in runs:
            if any(local < end and start < local + size for start, end in self._doubtful):
                self._fail("reads into memory where a failed read may still land")
            if (block := self._block_at(local)) is not None:
                self._data_posted(block)
            elif size == FENCE_WORD_BYTES:
                self._word_posted(agent, local, remote)

    def _block_at(self, address: int) -> int | None:
        """Return which block of the rank's memory is there."""
        memory, content = self._mover.bound, self._mover.process.content
        if memory is None or content is None:
            return None
        offset = address - memory.address
        return content.block_of[offset // UNIT_BYTES] if 0 <= offset < len(memory.bytes) else None

    def _data_posted(self, block: int) -> None:
        for number, pull in self._pulls.items():
            if block not in pull.blocks or pull.told is not None:
                continue
            pull.has_data_read = True
            if pull.is_aborted:
                self._fail(f"reads on for pull {number}, which was cancelled")
            if pull.has_word_read:
                self._fail(f"reads data of pull {number} after its word")

    def _of_word(self, agent: AgentName, remote: int) -> list[_Pull]:
        """Return the pulls whose fence word is there."""
        named = (pull for pull in self._pulls.values() if pull.told is None)
        return [p for p in named if (p.start.fence.agent, p.start.fence.address) == (agent, remote)]

    def _word_posted(self, agent: AgentName, local: int, remote: int) -> None:
        pulls = self._of_word(agent, remote)
        if pulls and any(ctypes.string_at(local, FENCE_WORD_BYTES)):
            self._fail(f"reads the word of pull {pulls[0].start.pull} to where an earlier word is left")
        if len(pulls) == 1:
            pulls[0].has_word_read = True

    def failed(self, read: Read) -> None:
        """A read has failed in a way that does not prove that it is over."""
        for index, piece in enumerate(read.pieces):
            if index in read.landed:
                continue
            for local, remote, size in piece:
                self._doubtful.append((local, local + size))
                block = self._block_at(local)
                for pull in self._pulls.values():
                    pull.is_doubtful |= block is not None and block in pull.blocks
                    fence = pull.start.fence
                    pull.may_be_doubtful |= (fence.agent, fence.address) == (read.agent, remote)

    # --- between two steps

    def check(self, is_known: Collection[PullId]) -> None:
        """Check what the mover has left. `is_known`: the pulls that its engine has not forgotten."""
        for number, pull in self._pulls.items():
            if pull.told is None or number in is_known:
                continue
            if pull.told.outcome.quiesced_follows and not (pull.is_doubtful or pull.may_be_doubtful):
                self._fail(f"has forgotten pull {number}, and never says that it is quiet")
        self._check_chunks()

    def _check_chunks(self) -> None:
        chunks = self._chunks
        held, self._held_bytes = self._held_bytes, chunks.num_bytes
        if max(held, self._granted_bytes) < chunks.num_bytes:
            self._fail(f"holds {chunks.num_bytes} bytes of chunks: it may hold {self._granted_bytes}")
        for chunk in chunks._chunks:
            span = chunk.span
            if chunk.state is ChunkState.LOST and not any(
                span.address <= start < span.address + span.size_bytes for start, _ in self._doubtful
            ):
                self._fail("gives up a chunk that nothing writes any more")
