"""The gathered reads of a mover: a source packs what is asked for, one read fetches it, a scatter follows.

A request is answered by the source's chunk or by a refusal. The chunk is read in one piece into a chunk of
this mover's own, and then its stamp: unchanged, the bytes are those that were packed for this request. From
there on it is a covering read. Whatever comes in between (a refusal, no reply in `REPLY_TIMEOUT_S`, a chunk
that the source took back) makes the bytes of that request be read directly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvxferd.errors import Code
from kvxferd.ids import AgentName
from kvxferd.mover.process.chunks import ChunkPool, ChunkState, HostChunk
from kvxferd.mover.process.covering_reads import CoveringReads
from kvxferd.mover.process.gathering import GatherSlicer
from kvxferd.mover.process.pull_state import CoveringRead, Loan, PullFailure, PullState, Unposted
from kvxferd.mover.process.remote_agents import RemoteAgents
from kvxferd.mover.transport.base import Transport, TransportError
from kvxferd.mover.transport.buffers import WordSlots
from kvxferd.mover.transport.runs import single_run
from kvxferd.mover.transport.staging import new_request_number
from kvxferd.wire.codec import encode
from kvxferd.wire.limits import MAX_ADDRESS, MAX_SENTENCE_CHARS
from kvxferd.wire.staging import (
    MAX_GATHER_PATTERNS,
    MAX_GATHER_STARTS,
    MAX_STAGING_MESSAGE_BYTES,
    STAMP_BYTES,
    GatherReady,
    GatherRefused,
    GatherRelease,
    GatherReply,
    GatherRequest,
)

_LOG = logging.getLogger(__name__)

# A source packs 4 MiB in 2 ms, and serves others between two pieces. One that is stopped is read into chunks.
REPLY_TIMEOUT_S = 0.5
# A chunk is read so long after its request. Its source lends it for 5 s, and may then deregister it: a
# network card loses the connection over such a read.
MAX_OFFER_S = 2.0
STAMP_SLOT_BYTES = 64  # at the end of a chunk, where the source's stamp is read into
# A source has a few chunks, and names each anew after it was registered anew: every 10 s at most. The
# library forgets what it has loaded of an agent only with the agent.
MAX_CHUNKS_PER_AGENT = 16
# Of a request without starts and metadata: 49 bytes a pattern, and the fields.
OTHER_REQUEST_BYTES = 49 * MAX_GATHER_PATTERNS + 256


@dataclass(slots=True)
class _LoadedChunks:
    """What is loaded of an agent for gathered reads."""

    metadata: set[bytes] = field(default_factory=set)
    num_loads: int = 0  # since the agent was loaded


class GatheredReads:
    """Requests, loans and their reads. One thread, as `CoveringReads`, whose scatters it starts."""

    def __init__(
        self,
        transport: Transport,
        remote_agents: RemoteAgents,
        clock: Callable[[], float],
        chunks: ChunkPool,
        covering: CoveringReads,
    ) -> None:
        self._transport = transport
        self._remote_agents = remote_agents
        self._clock = clock
        self._chunks = chunks
        self._covering = covering
        # A source loads this to reply. It names memory that nothing uses: who has it can write there.
        self._unused_slots = WordSlots(transport)
        self._reply_metadata = transport.metadata([self._unused_slots.span])
        left = MAX_STAGING_MESSAGE_BYTES - OTHER_REQUEST_BYTES - len(self._reply_metadata)
        self._max_starts = min(MAX_GATHER_STARTS, left // 8)
        self._requested: dict[int, CoveringRead] = {}
        self._loaded: dict[AgentName, _LoadedChunks] = {}

    @property
    def is_available(self) -> bool:
        """Whether a request fits into a message, though hosts with many network cards have long metadata."""
        return self._max_starts > 0

    def forget(self, agent: AgentName) -> None:
        """Forget the chunks of an agent that is dropped."""
        self._loaded.pop(agent, None)

    def handle(self, agent: AgentName, reply: GatherReply) -> None:
        """Note a source's reply. A late one changes nothing: its chunk was released with the request."""
        read = self._requested.get(reply.number)
        if read is None or read.loan is None or read.agent != agent:
            return
        if isinstance(reply, GatherRefused):
            read.loan.refusal = reply.message[:MAX_SENTENCE_CHARS] or "refused"
        elif read.loan.ready is None:
            if _is_plausible(reply):
                read.loan.ready = reply
            else:
                read.loan.refusal = "its reply names what cannot be"

    def post(self, pull: PullState, one: Unposted, others_wait: bool) -> bool:
        """Ask for the next chunk of a pull, and queue what is left; return False where there is no chunk."""
        assert isinstance(one.slicer, GatherSlicer)
        now = self._clock()
        chunk = self._covering.acquire(pull, one, others_wait)
        if chunk is None:
            return False
        max_bytes = chunk.span.size_bytes - STAMP_SLOT_BYTES
        gathering = one.slicer.next_gathering(max_bytes, self._max_starts)
        if not one.slicer.is_empty:
            pull.unposted.append(one)
        loan = Loan(number := new_request_number(), one.rank, gathering, now)
        read = CoveringRead(one.agent, chunk, gathering.fill, now, False, loan=loan)
        problem = self._remote_agents.ensure_loaded(one.agent)
        if problem:
            self._chunks.move(chunk, ChunkState.FREE, now)
            pull.fail(PullFailure(Code.TRANSPORT, problem, now, one.agent))
            return True
        pull.covering.append(read)
        self._requested[number] = read
        request = GatherRequest(
            number=number,
            word=pull.request.fence.word,
            patterns=gathering.patterns,
            metadata=self._reply_metadata,
        )
        try:
            self._transport.notify(one.agent, encode(request))
        except TransportError as error:
            loan.refusal = error.message
        return True

    def poll(self, pull: PullState) -> bool:
        """Advance the gathered reads of a pull that are not scattered yet."""
        moved = False
        for read in tuple(pull.covering):
            if read.loan is not None:
                moved |= self._advance(pull, read, read.loan)
        return moved

    def let_go(self, pull: PullState) -> None:
        """Return the chunks of a pull that has failed. A read that is posted drains."""
        for read in tuple(pull.covering):
            if read.loan is not None:
                loan = self._end_loan(read, read.loan)
                if read.handle is not None:
                    read.on_terminal = partial(self._release, read.agent, loan.number)
                    continue
                self._release(read.agent, loan.number)
                pull.covering.remove(read)
                self._chunks.move(read.chunk, ChunkState.FREE, self._clock())

    def _advance(self, pull: PullState, read: CoveringRead, loan: Loan) -> bool:
        if read.handle is None:
            return self._advance_request(pull, read, loan)
        try:
            if not self._transport.poll(read.handle):
                return False
        except Exception as error:
            self._on_failed(pull, read, loan, error)
            return True
        self._on_read_done(pull, read, loan)
        return True

    def _advance_request(self, pull: PullState, read: CoveringRead, loan: Loan) -> bool:
        if pull.failure is not None:
            return False  # `let_go` follows
        age_s = self._clock() - loan.requested_at
        if loan.refusal:
            self._read_otherwise(pull, read, loan, loan.refusal)
            pull.gather_no_more(loan.rank, is_stopped=False)
        elif loan.ready is not None and age_s <= MAX_OFFER_S:
            self._post_read(pull, read, loan, loan.ready)
        elif loan.ready is not None:
            self._read_otherwise(pull, read, loan, f"its chunk was offered for {age_s:.1f} s")
        elif age_s > REPLY_TIMEOUT_S:
            self._read_otherwise(pull, read, loan, f"no reply in {REPLY_TIMEOUT_S:g} s", is_stopped=True)
            pull.gather_no_more(loan.rank, is_stopped=True)
        else:
            return False
        return True

    def _post_read(self, pull: PullState, read: CoveringRead, loan: Loan, ready: GatherReady) -> None:
        """Read the packed bytes."""
        if problem := self._load(read.agent, ready.metadata):
            self._read_otherwise(pull, read, loan, problem)
            pull.gather_no_more(loan.rank, is_stopped=False)
            return
        if pull.first_post_at is None:
            pull.first_post_at = self._clock()
        self._post(pull, read, loan, read.chunk.address, ready.address, loan.gathering.fill.num_bytes)

    def _post(
        self, pull: PullState, read: CoveringRead, loan: Loan, local: int, remote: int, size: int
    ) -> None:
        self._remote_agents.read_started(read.agent)
        began = self._clock()
        try:
            read.handle = self._transport.post(read.agent, single_run(local, remote, size))
        except Exception as error:
            if isinstance(error, TransportError) and error.settled and not error.lost:
                # The library does not know the chunk: the agent was loaded anew since, or it names nonsense.
                self._remote_agents.read_ended(read.agent)
                self._forget_chunks(read.agent)
                self._read_otherwise(pull, read, loan, error.message)
            else:
                self._on_failed(pull, read, loan, error)
            return
        finally:
            pull.post_s += self._clock() - began
        if read.handle.done:
            self._on_read_done(pull, read, loan)

    def _on_read_done(self, pull: PullState, read: CoveringRead, loan: Loan) -> None:
        assert read.handle is not None and loan.ready is not None
        self._transport.release(read.handle)
        self._remote_agents.read_ended(read.agent)
        read.handle = None
        if pull.failure is not None:
            return  # `let_go` follows
        assert isinstance(read.chunk, HostChunk)
        slot = read.chunk.span.size_bytes - STAMP_SLOT_BYTES
        if not loan.verifies:
            loan.verifies = True
            read.chunk.bytes[slot : slot + STAMP_BYTES] = 0
            self._post(pull, read, loan, read.chunk.address + slot, loan.ready.stamp_address, STAMP_BYTES)
            return
        stamp = read.chunk.bytes[slot : slot + STAMP_BYTES].tobytes()
        if stamp != loan.ready.stamp:
            self._read_otherwise(pull, read, loan, "it took the chunk back before it was read")
            return
        self._return(read, loan)
        pull.data_done_at = self._clock()
        self._covering.start_scatter(pull, read)

    def _on_failed(self, pull: PullState, read: CoveringRead, loan: Loan, error: Exception) -> None:
        self._end_loan(read, loan)
        read.on_terminal = partial(self._release, read.agent, loan.number)
        self._forget_chunks(read.agent)
        if read in pull.covering:
            pull.covering.remove(read)
        self._covering.on_failed(read, error, pull)

    def _read_otherwise(
        self, pull: PullState, read: CoveringRead, loan: Loan, why: str, is_stopped: bool = False
    ) -> None:
        """Give a request up. Nothing of it is in flight."""
        _LOG.info("not gathered: agent=%s reason=%s", read.agent, why)
        self._return(read, loan)
        pull.covering.remove(read)
        self._chunks.move(read.chunk, ChunkState.FREE, self._clock())
        pull.read_otherwise(loan.rank, loan.gathering.parts, is_stopped)

    def _return(self, read: CoveringRead, loan: Loan) -> None:
        """Release the source's chunk, whatever became of it. No read of it is in flight."""
        self._end_loan(read, loan)
        self._release(read.agent, loan.number)

    def _end_loan(self, read: CoveringRead, loan: Loan) -> Loan:
        read.loan = None
        self._requested.pop(loan.number, None)
        return loan

    def _release(self, agent: AgentName, number: int) -> None:
        try:
            self._transport.notify(agent, encode(GatherRelease(number=number)))
        except TransportError as error:
            # The loan expires at the source.
            _LOG.info("chunk not released: agent=%s reason=%s", agent, error.message)

    def _load(self, agent: AgentName, metadata: bytes) -> str:
        """Load a chunk's metadata; return why that cannot be, "" if it can."""
        loaded = self._loaded.setdefault(agent, _LoadedChunks())
        if metadata in loaded.metadata:
            return ""
        if loaded.num_loads >= MAX_CHUNKS_PER_AGENT:
            if not self._remote_agents.reload(agent):
                return f"it has named {loaded.num_loads} chunks"
            self._loaded[agent] = loaded = _LoadedChunks()
        loaded.num_loads += 1
        try:
            self._transport.load_remote(metadata, agent)
        except TransportError as error:
            return error.message
        loaded.metadata.add(metadata)
        return ""

    def _forget_chunks(self, agent: AgentName) -> None:
        """Load chunks again before they are read. They may be loaded still, and count."""
        if (loaded := self._loaded.get(agent)) is not None:
            loaded.metadata.clear()


def _is_plausible(ready: GatherReady) -> bool:
    """Whether the addresses can be used: this mover reads there, as a peer has written it."""
    addresses = (ready.address, ready.stamp_address)
    limit = MAX_ADDRESS - (1 << 32)
    return len(ready.stamp) == STAMP_BYTES and all(0 < one < limit for one in addresses)
