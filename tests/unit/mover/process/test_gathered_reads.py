"""Gathered reads in the pull engine, against sources that pack: bytes, refusals, loans, and what fails."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from itertools import count

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.errors import Code
from kvxferd.ids import AgentName, PullId, RegionId
from kvxferd.layout.areas import BlockArea, block_areas
from kvxferd.mover.process.chunks import IDLE_S, ChunkState
from kvxferd.mover.process.gather_source import (
    CHUNK_LEASE_S,
    MAX_EARLY,
    MAX_WAITING_PER_AGENT,
    WAIT_S,
    GatherSource,
    _Part,
    pack,
)
from kvxferd.mover.process.gathered_reads import MAX_CHUNKS_PER_AGENT, MAX_OFFER_S, REPLY_TIMEOUT_S
from kvxferd.mover.transport.base import Span, TransportError
from kvxferd.mover.transport.reply_agents import MAX_LOADED
from kvxferd.plan.gathering import MAX_REACH, MAX_RUNS_PER_PATTERN, Pattern
from kvxferd.wire.codec import encode
from kvxferd.wire.common import RegionAddress
from kvxferd.wire.mover import GrantBlocks, PullOutcome
from kvxferd.wire.staging import (
    GatherMessage,
    GatherPattern,
    GatherReady,
    GatherRefused,
    GatherRelease,
    GatherRequest,
    decode_staging_message,
)
from tests.support.memory_transport import MemoryTransport
from tests.support.mover_harness import packed
from tests.support.pull_engine_harness import BLOCKS, WORD, Bench, layout, scattered, spec

CHUNK = 64 << 10
HEAD = 16
IDS = scattered(100)  # half of the blocks are granted, these among them


@pytest.fixture
def bench() -> Bench:
    return Bench(chunk_bytes=CHUNK, gathers=True)


def outcome_of(bench: Bench, number: PullId) -> PullOutcome:
    bench.run()
    return bench.outcomes()[number]


def check_arrived(bench: Bench, ids: range) -> None:
    mine = bench.local.array.reshape(4, BLOCKS, 4, 2, HEAD)
    for rank, memory in enumerate(bench.remote):
        theirs = memory.array.reshape(4, BLOCKS, 4, HEAD)
        assert np.array_equal(mine[..., rank, :][:, list(ids)], theirs[:, list(ids)])
    others = [block for block in range(BLOCKS) if block not in ids]
    assert not mine[:, others].any()


def lent(bench: Bench) -> int:
    return sum(pool.count(ChunkState.LENT) for pool in bench.source_chunks)


def pass_time(bench: Bench, seconds: float) -> None:
    bench.now += seconds
    bench.run()


# --- a pull


@pytest.mark.parametrize("chunk_bytes", [1 << 10, CHUNK, 4 << 20])
@pytest.mark.parametrize("polls", [0, 3])
@pytest.mark.parametrize("max_runs", [3, 1 << 20])
def test_bytes_arrive_packed(chunk_bytes: int, polls: int, max_runs: int) -> None:
    bench = Bench(max_runs=max_runs, chunk_bytes=chunk_bytes, gathers=True)
    bench.fabric.polls_per_read = polls
    outcome = outcome_of(bench, bench.start(IDS))
    assert (outcome.delivered, outcome.started, outcome.finished) == (True, True, True)
    check_arrived(bench, IDS)
    assert outcome.gathered_bytes == outcome.bytes == 100 * 4 * 4 * 2 * HEAD
    assert outcome.covered_bytes == 0
    assert all(num == 1 for _, num in bench.fabric.posts), "one descriptor a chunk, a stamp and the word"
    assert lent(bench) == 0


def test_blocks_that_are_not_granted_are_refused_at_once_and_read_directly(bench: Bench) -> None:
    beyond = range(BLOCKS - 50, BLOCKS)
    outcome = outcome_of(bench, bench.start(beyond))
    assert (outcome.delivered, outcome.gathered_bytes) == (True, 0)
    check_arrived(bench, beyond)
    assert bench.now == 0.0


def test_a_revoked_grant_is_refused_and_its_bytes_are_read_directly(bench: Bench) -> None:
    """At once: this reader has been served before."""
    outcome_of(bench, bench.start(IDS))
    for source in bench.sources:
        source.revoke(WORD)
    outcome = outcome_of(bench, bench.start(IDS))
    assert (outcome.delivered, outcome.gathered_bytes) == (True, 0)
    assert bench.now == 0.0


def test_a_source_that_does_not_reply_is_read_directly(bench: Bench) -> None:
    sources, bench.sources = bench.sources, []
    number = bench.start(IDS)
    bench.run()
    assert bench.told == []
    bench.now += REPLY_TIMEOUT_S + 0.01
    outcome = outcome_of(bench, number)
    assert (outcome.delivered, outcome.gathered_bytes) == (True, 0)
    check_arrived(bench, IDS)
    bench.sources = sources
    bench.serve()
    bench.staged.progress()
    bench.serve()
    assert lent(bench) == 0, "late replies are released"


def test_a_stopped_source_keeps_no_block_in_doubt(bench: Bench) -> None:
    """It does not reply, and then sends nothing of what is read otherwise: into chunks, and no block."""
    bench.sources = []
    bench.fabric.stalled |= set(bench.agents)
    number = bench.start(IDS)
    bench.run()
    for _ in range(3):
        bench.now += REPLY_TIMEOUT_S + 0.01
        bench.run()
    assert len(bench.fabric.posts) >= 2
    bench.engine.abort(number)
    outcome = outcome_of(bench, number)
    assert (outcome.code, outcome.started, outcome.finished) == (Code.CANCELLED, False, True)
    bench.fabric.stalled.clear()
    bench.run()
    assert not bench.local.array.any()


def test_a_release_between_packing_and_the_word_fails_the_pull(bench: Bench) -> None:
    number = bench.start(IDS)
    for _ in range(5):
        bench.engine.step()
        bench.serve()
    bench.fence.page[0:16] = bytes(16)
    outcome = outcome_of(bench, number)
    assert (outcome.delivered, outcome.code, outcome.finished) == (False, Code.RELEASED, True)


def test_a_chunk_that_was_taken_back_is_not_delivered(bench: Bench) -> None:
    """The loan expires while the packed bytes are read, and the chunk is filled for another reader."""
    bench.fabric.stalled |= set(bench.agents)
    number = bench.start(IDS)
    bench.run()
    pass_time(bench, CHUNK_LEASE_S + 0.1)
    for pool in bench.source_chunks:
        for chunk in pool._chunks:
            chunk.bytes[64:] = 0
    bench.fabric.stalled.clear()
    outcome = outcome_of(bench, number)
    assert outcome.delivered
    check_arrived(bench, IDS)
    assert outcome.gathered_bytes < outcome.bytes


def test_an_abort_returns_the_chunks(bench: Bench) -> None:
    bench.fabric.stalled |= set(bench.agents)
    number = bench.start(IDS)
    bench.run()
    assert lent(bench) > 0
    bench.engine.abort(number)
    outcome = outcome_of(bench, number)
    assert (outcome.started, outcome.finished, outcome.code) == (False, True, Code.CANCELLED)
    bench.serve()
    assert lent(bench) > 0, "a read of it is in flight: given back now, it might be deregistered"
    assert bench.chunks is not None
    assert bench.chunks.count(ChunkState.DRAINING) > 0
    bench.fabric.stalled.clear()
    bench.run()
    bench.serve()
    assert lent(bench) == 0
    assert bench.chunks.count(ChunkState.DRAINING) == 0
    assert not bench.local.array.any()


def test_an_abort_before_the_reply_leaves_nothing_behind(bench: Bench) -> None:
    sources, bench.sources = bench.sources, []
    number = bench.start(IDS)
    bench.run()
    bench.engine.abort(number)
    assert outcome_of(bench, number).finished
    assert not bench.engine.is_busy
    bench.sources = sources
    bench.serve()
    bench.staged.progress()
    bench.serve()
    assert lent(bench) == 0


def test_a_lost_connection_fails_the_pull_and_leaves_the_chunk_in_doubt(bench: Bench) -> None:
    bench.fabric.polls_per_read = 3
    bench.fabric.errors[bench.agents[1]] = TransportError("lost", settled=False, lost=True)
    outcome = outcome_of(bench, bench.start(IDS))
    assert (outcome.code, outcome.finished) == (Code.TRANSPORT, True)
    assert bench.chunks is not None
    assert bench.chunks.count(ChunkState.IN_DOUBT) == 1
    assert lent(bench) == 1, "of which a read may be in flight"
    bench.now += CHUNK_LEASE_S + 0.1
    bench.serve()
    assert lent(bench) == 0


def test_a_dead_reader_holds_a_chunk_for_so_long_and_its_memory_stays_mapped(bench: Bench) -> None:
    """Loans end by time; the memory that was lent is blanked when it is given back, and reads as zeros."""
    bench.fabric.stalled |= set(bench.agents)
    bench.start(IDS)
    bench.run()
    pool = bench.source_chunks[0]
    (chunk, *_) = (c for c in pool._chunks if c.state is ChunkState.LENT)
    assert chunk.bytes.any()
    bench.now += CHUNK_LEASE_S + 0.1
    for source in bench.sources:
        source.step()
    assert lent(bench) == 0
    bench.now += IDLE_S
    pool.release_idle(bench.now)
    assert pool.num_bytes == 0
    assert not chunk.bytes.any()
    again = pool.lend(bench.now)
    assert again is not None
    assert again.was_lent, "its address is used again"


def test_nothing_is_copied_into_the_blocks_of_a_pull_that_has_failed(bench: Bench) -> None:
    """One source's read fails in the step in which the other's stamp is verified."""
    bench.fabric.polls_per_read = 3
    bench.fabric.stalled.add(bench.agents[0])
    number = bench.start(IDS)
    for _ in range(100):
        bench.engine.step()
        bench.serve()
        bench.staged.progress()
        reads = {read.agent: read for read in bench.engine._by_id[number].covering}
        loan = reads[bench.agents[1]].loan if len(reads) == 2 else None
        if loan is not None and loan.verifies and not reads[bench.agents[1]].handle.polls_left:
            break
    bench.fabric.stalled.clear()
    bench.fabric.errors[bench.agents[0]] = TransportError("failed", settled=True)
    outcome = outcome_of(bench, number)
    assert (outcome.code, outcome.started, outcome.finished) == (Code.TRANSPORT, False, True)
    assert not bench.local.array.any()


def test_a_chunk_that_is_offered_for_long_is_not_read(bench: Bench) -> None:
    """The reader was stopped meanwhile. The loan may be over, and the chunk deregistered."""
    number = bench.start(IDS)
    bench.engine.step()
    bench.engine.step()
    bench.serve()
    bench.now += MAX_OFFER_S + 0.01
    bench.staged.progress()
    posts = list(bench.fabric.posts)
    bench.engine.step()
    read = [span for agent, span in bench.fabric.posts[len(posts) :]]
    assert all(num > 1 for num in read), "runs of the blocks, and no chunk"
    assert outcome_of(bench, number).delivered
    check_arrived(bench, IDS)


def test_the_source_reaches_no_memory_of_the_reader_that_counts(bench: Bench) -> None:
    """It loads what the request has, for its reply. Who can write a fence word can forge one."""
    bench.start(IDS)
    bench.engine.step()
    bench.engine.step()
    (_, note), *_ = bench.fabric.notes[bench.agents[0]]
    request = decode_staging_message(note)
    assert isinstance(request, GatherRequest)
    (span,) = msgspec.msgpack.decode(request.metadata)["spans"]
    assert bench.chunks is not None
    kept = [bench.engine._word_slots.span, bench.local.span, *(c.span for c in bench.chunks._chunks)]
    assert span[0] not in {one.address for one in kept}


def test_a_number_that_a_stranger_may_count_is_not_used(bench: Bench) -> None:
    """An agent's name in a message is what its sender writes there."""
    sources, bench.sources = bench.sources, []
    number = bench.start(IDS)
    bench.run()
    for guess in range(100):
        for agent in bench.agents:
            bench.engine.handle_gather_reply(agent, GatherRefused(number=guess, message="forged"))
    bench.sources = sources
    outcome = outcome_of(bench, number)
    assert outcome.delivered
    assert outcome.gathered_bytes == outcome.bytes


def rename_chunks(bench: Bench) -> None:
    """Have the sources' chunks get other metadata each time, as after a registration."""
    for number, transport in enumerate(bench.transports):

        def metadata(spans, original=transport.metadata, times=count(1)):  # noqa: B008
            return original(list(spans) * next(times))

        transport.metadata = metadata  # type: ignore[method-assign]
        assert number < 2


def test_a_source_whose_chunks_are_registered_anew_is_gathered_from_for_ever(bench: Bench) -> None:
    rename_chunks(bench)
    for _ in range(30):
        outcome = outcome_of(bench, bench.start(IDS))
        assert outcome.delivered
    assert outcome.gathered_bytes == outcome.bytes
    check_arrived(bench, IDS)


@pytest.mark.parametrize("address", [None, 8])
def test_what_a_source_has_the_reader_load_is_bounded(bench: Bench, address: int | None) -> None:
    """`address`: of chunks that cannot be read."""
    rename_chunks(bench)
    loads: dict[AgentName, int] = dict.fromkeys(bench.agents, 0)
    reader = bench.staged._inner
    load, drop = reader.load_remote, reader.drop_remote

    def counting_load(metadata: bytes, agent: AgentName | None = None) -> AgentName:
        loads[load(metadata, agent)] += 1  # type: ignore[index]
        return agent  # type: ignore[return-value]

    def counting_drop(agent: AgentName) -> None:
        loads[agent] = 0
        drop(agent)

    reader.load_remote, reader.drop_remote = counting_load, counting_drop  # type: ignore[method-assign]
    for transport in bench.transports if address else ():

        def notify(agent, payload, original=transport.notify):
            message = decode_staging_message(payload)
            if isinstance(message, GatherReady):
                payload = encode(msgspec.structs.replace(message, address=address))
            original(agent, payload)

        transport.notify = notify  # type: ignore[method-assign]
    for _ in range(3 * MAX_CHUNKS_PER_AGENT):
        assert outcome_of(bench, bench.start(IDS)).delivered
        assert max(loads.values()) <= MAX_CHUNKS_PER_AGENT + 2
    check_arrived(bench, IDS)


# --- requests of strangers


class Stranger:
    """An agent that sends a source whatever it likes."""

    def __init__(self, bench: Bench, name: str = "x/0") -> None:
        self.bench = bench
        self.transport = MemoryTransport(bench.fabric, AgentName(name))
        self.metadata = msgspec.msgpack.encode({"agent": self.transport.agent, "spans": []})
        self.memory = bench.remote[0]
        self._number = 0

    @property
    def source(self) -> GatherSource:
        return self.bench.sources[0]

    def ask(self, *patterns: GatherPattern, word: bytes = WORD, number: int = 0) -> None:
        self._number = number or self._number + 1
        request = GatherRequest(number=self._number, word=word, patterns=patterns, metadata=self.metadata)
        self.source.handle(self.transport.agent, request)

    def replies(self) -> list[GatherMessage]:
        self.source.step()
        self.source.step()
        self.source.step()
        notes = self.transport.receive_notifications()
        return [decode_staging_message(payload) for _, payload in notes]  # type: ignore[misc]

    def reply(self) -> GatherMessage:
        (one,) = self.replies()
        return one

    def pattern(self, block: int, length: int = 64, **shape: int) -> GatherPattern:
        start = np.array([self.memory.span.address + 64 * block], dtype="<u8").tobytes()
        values = {"outer": 1, "outer_stride": 0, "inner": 1, "inner_stride": 0, **shape}
        return GatherPattern(start, length, **values)


GRANTED = scattered(1)[0]


@pytest.fixture
def stranger(bench: Bench) -> Stranger:
    return Stranger(bench)


def test_a_granted_block_is_packed(stranger: Stranger) -> None:
    stranger.ask(stranger.pattern(GRANTED, 16, inner=2, inner_stride=32))
    reply = stranger.reply()
    assert isinstance(reply, GatherReady)
    (chunk, *_) = stranger.bench.source_chunks[0]._chunks
    block = stranger.memory.array[64 * GRANTED : 64 * GRANTED + 64]
    packed = chunk.bytes[64:96]
    assert packed.tobytes() == block[:16].tobytes() + block[32:48].tobytes()
    assert chunk.bytes[:16].tobytes() == reply.stamp


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"length": 65}, "granted"),
        ({"length": 0}, "1 or more"),
        ({"outer": 0}, "1 or more"),
        ({"inner": -1}, "1 or more"),
        ({"inner": 2, "inner_stride": 64}, "granted"),
        ({"inner": 2, "inner_stride": -1}, "granted"),
        ({"outer": MAX_RUNS_PER_PATTERN, "inner": 2, "length": 1}, "limit"),
        ({"outer": 2, "outer_stride": MAX_REACH}, "long"),
        ({"outer": 2, "outer_stride": -(1 << 62)}, "long"),
        ({"length": 1 << 30}, "limit"),
    ],
)
def test_what_leaves_a_granted_block_is_refused(stranger: Stranger, change: dict[str, int], why: str) -> None:
    stranger.ask(stranger.pattern(GRANTED, **{"length": 64, **change}))
    reply = stranger.reply()
    assert isinstance(reply, GatherRefused)
    assert why in reply.message
    assert lent(stranger.bench) == 0


def test_one_byte_of_another_transfers_block_refuses_all(stranger: Stranger) -> None:
    free = next(b for b in range(BLOCKS) if b not in scattered(BLOCKS // 2))
    stranger.ask(stranger.pattern(GRANTED), stranger.pattern(free, 1))
    assert isinstance(stranger.reply(), GatherRefused)


def test_addresses_outside_the_rank_are_refused(stranger: Stranger) -> None:
    for start in (0, 1, stranger.memory.span.address - 1, (1 << 64) - 1):
        stranger.ask(GatherPattern(np.array([start], dtype="<u8").tobytes(), 1, 1, 0, 1, 0))
        assert isinstance(stranger.reply(), GatherRefused)


def test_another_word_has_no_reply_unless_the_agent_is_known(stranger: Stranger) -> None:
    stranger.ask(stranger.pattern(GRANTED), word=bytes(16))
    assert stranger.replies() == []
    stranger.ask(stranger.pattern(GRANTED))
    assert isinstance(stranger.reply(), GatherReady)
    stranger.ask(stranger.pattern(GRANTED), word=bytes(16))
    assert isinstance(stranger.reply(), GatherRefused)


def test_a_request_may_overtake_the_grant(stranger: Stranger) -> None:
    """The daemon sends the grant before the reader can know the word, but on another way."""
    word = bytes(range(16))
    stranger.ask(stranger.pattern(GRANTED), word=word)
    stranger.source.step()
    areas = block_areas(layout(spec("P", 2, 0)))
    stranger.source.grant(GrantBlocks(word=word, areas=areas, blocks=packed(IDS)))
    assert isinstance(stranger.reply(), GatherReady)


def test_requests_with_unknown_words_take_no_memory(stranger: Stranger) -> None:
    for _ in range(1000):
        stranger.ask(stranger.pattern(GRANTED), word=bytes(16))
    assert len(stranger.source._early) <= MAX_EARLY
    assert stranger.replies() == []
    assert not stranger.source.is_busy
    assert not stranger.bench.transports[0].loaded


@pytest.mark.parametrize("starts", [b"", b"1234567", bytes(8 * 1025)])
def test_starts_are_counted(stranger: Stranger, starts: bytes) -> None:
    stranger.ask(GatherPattern(starts, 1, 1, 0, 1, 0))
    assert isinstance(stranger.reply(), GatherRefused)


def test_more_than_a_chunk_is_refused(stranger: Stranger) -> None:
    start = np.array([stranger.memory.span.address + 64 * GRANTED], dtype="<u8").tobytes()
    stranger.ask(GatherPattern(start * (CHUNK // 64), 64, 1, 0, 1, 0))
    reply = stranger.reply()
    assert isinstance(reply, GatherRefused)
    assert "limit" in reply.message


def test_who_takes_all_chunks_waits_and_others_come_first(stranger: Stranger) -> None:
    """Three of four chunks are lent. The next free one goes to the reader that has none."""
    other = Stranger(stranger.bench, "y/0")
    for _ in range(5):
        stranger.ask(stranger.pattern(GRANTED))
    assert [type(one) for one in stranger.replies()] == [GatherReady] * 3
    other.ask(other.pattern(GRANTED))
    assert other.replies() == []
    stranger.source.handle(stranger.transport.agent, GatherRelease(number=1))
    assert isinstance(other.reply(), GatherReady)
    assert stranger.replies() == []
    stranger.bench.now += WAIT_S
    assert [type(one) for one in stranger.replies()] == [GatherRefused] * 2


def test_requests_that_wait_are_bounded_and_numbers_are_used_once(stranger: Stranger) -> None:
    for _ in range(MAX_WAITING_PER_AGENT):
        stranger.ask(stranger.pattern(GRANTED))
    stranger.ask(stranger.pattern(GRANTED))
    assert isinstance(stranger.replies()[0], GatherRefused)
    stranger.ask(stranger.pattern(GRANTED), number=1)
    assert "twice" in str(stranger.replies()[-1])


def test_a_release_of_another_agent_changes_nothing(stranger: Stranger) -> None:
    stranger.ask(stranger.pattern(GRANTED))
    assert isinstance(stranger.reply(), GatherReady)
    stranger.source.handle(AgentName("y/0"), GatherRelease(number=1))
    assert lent(stranger.bench) == 1


def test_a_reply_of_another_agent_is_not_used(bench: Bench) -> None:
    sources, bench.sources = bench.sources, []
    number = bench.start(IDS)
    bench.run()
    forged = GatherReady(number=1, address=4096, stamp_address=4096, stamp=bytes(16), metadata=b"")
    bench.engine.handle_gather_reply(AgentName("x/0"), forged)
    bench.sources = sources
    outcome = outcome_of(bench, number)
    assert outcome.delivered
    check_arrived(bench, IDS)


def test_a_reader_that_was_dropped_meanwhile_is_loaded_again(stranger: Stranger) -> None:
    """This mover has read from it, too, and reads no more."""
    stranger.ask(stranger.pattern(GRANTED))
    assert isinstance(stranger.reply(), GatherReady)
    stranger.bench.transports[0].drop_remote(stranger.transport.agent)
    stranger.ask(stranger.pattern(GRANTED))
    assert isinstance(stranger.reply(), GatherReady)


def test_readers_are_bounded_and_the_one_that_was_served_last_stays(bench: Bench) -> None:
    first = Stranger(bench, "first/0")
    for number in range(2 * MAX_LOADED):
        for one in (first, Stranger(bench, f"x/{number}")):
            one.ask(one.pattern(GRANTED))
            assert isinstance(one.reply(), GatherReady)
            one.source.handle(one.transport.agent, GatherRelease(number=one._number))
    loaded = bench.transports[0].loaded
    assert len(loaded) <= MAX_LOADED
    assert first.transport.agent in loaded


def test_requests_are_checked_between_pieces_and_each_agents_in_turn(bench: Bench) -> None:
    """A check takes a millisecond, and a message none: who sends many keeps nobody waiting."""
    times = count()
    bench.sources[0]._clock = lambda: bench.now + next(times) * 1e-4
    flood, other = Stranger(bench, "x/0"), Stranger(bench, "y/0")
    for _ in range(MAX_WAITING_PER_AGENT):
        flood.ask(flood.pattern(GRANTED, 65))
    other.ask(other.pattern(GRANTED))
    assert flood.transport.receive_notifications() == []
    assert 0 < len(flood.replies()) < MAX_WAITING_PER_AGENT
    assert isinstance(other.reply(), GatherReady)
    for _ in range(MAX_WAITING_PER_AGENT):
        flood.source.step()
    assert not flood.source.is_busy


def test_a_check_takes_no_longer_where_layers_are_regions_of_their_own(stranger: Stranger) -> None:
    """64 patterns against 1,024 regions took 0.5 s, in which the mover read nothing."""
    source, pattern = stranger.source, stranger.pattern(GRANTED)
    request = GatherRequest(number=1, word=WORD, patterns=(pattern,) * 64, metadata=b"")
    calls = []
    memory = mmap.mmap(-1, 1024 * 4096)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    others = [RegionAddress(RegionId(f"r{i}"), first + 4096 * i, 4096) for i in range(1023)]
    for regions in ([], others):
        source.bind([*regions, *stranger.bench.regions_of(0)])
        calls.append(0)

        def count_call(frame: object, event: str, argument: object) -> None:
            calls[-1] += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            assert len(source._check(request)) == 64
        finally:
            sys.setprofile(None)
    assert calls[1] < 3 * calls[0]


def test_grants_on_one_rank_share_what_tells_where_its_blocks_lie(bench: Bench) -> None:
    """Some hundred areas, and as many grants as there are transfers."""
    there = layout(spec("P", 2, 0))
    for number in range(3):
        areas = msgspec.msgpack.decode(msgspec.msgpack.encode(block_areas(there)), type=tuple[BlockArea, ...])
        bench.sources[0].grant(GrantBlocks(word=bytes([number] * 16), areas=areas, blocks=packed(IDS)))
    kept = {id(area) for grant in bench.sources[0]._grants.values() for area in grant.areas}
    assert len(kept) <= 2 * len(areas)


def test_a_full_request_fits_into_a_message(bench: Bench) -> None:
    number = bench.start(scattered(BLOCKS // 2))
    bench.engine.step()
    bench.engine.step()
    notes = [note for agent in bench.agents for _, note in bench.fabric.notes.get(agent, [])]
    assert notes
    assert all(encode(decode_staging_message(note)) == note for note in notes)
    assert outcome_of(bench, number).delivered


@pytest.mark.parametrize("num_bytes", [10_000, 16_000])
def test_a_request_with_long_metadata_fits_into_a_message(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """Of a host with many network cards. With 16,000 bytes no request fits, and nothing is gathered."""
    metadata = MemoryTransport.metadata

    def long_metadata(self: MemoryTransport, spans: Sequence[Span]) -> bytes:
        one, two = (len(metadata(self, list(spans) * times)) for times in (1, 2))
        return metadata(self, list(spans) * (num_bytes // (two - one)))

    monkeypatch.setattr(MemoryTransport, "metadata", long_metadata)
    bench = Bench(chunk_bytes=4 << 20, gathers=True)
    outcome = outcome_of(bench, bench.start(scattered(BLOCKS // 2)))
    assert outcome.delivered
    assert (outcome.gathered_bytes == outcome.bytes) == (num_bytes < 16_000)
    assert bench.now == 0.0


def test_a_source_whose_reply_fits_into_no_message_refuses(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer message is dropped where it arrives: the reader would take the source for stopped."""
    metadata = MemoryTransport.metadata

    def long_metadata(self: MemoryTransport, spans: Sequence[Span]) -> bytes:
        return metadata(self, list(spans) * (1 if self.agent == bench.reader else 2000))

    monkeypatch.setattr(MemoryTransport, "metadata", long_metadata)
    outcome = outcome_of(bench, bench.start(IDS))
    assert (outcome.delivered, outcome.gathered_bytes) == (True, 0)
    check_arrived(bench, IDS)
    assert bench.now == 0.0
    assert lent(bench) == 0


def test_packing_is_cut_into_pieces() -> None:
    """Of 128 KiB, and of 4,096 runs."""
    memory = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
    target = np.zeros(600 << 10, dtype=np.uint8)
    long = _Part(memory, np.arange(5) * (100 << 10), Pattern(100 << 10, 1, 0, 1, 0))
    small = _Part(memory, np.array([7, 3]), Pattern(1, 4096, 9, 1, 0))
    assert len(list(pack([long, small], target))) == 7
    expected = b"".join(memory[s : s + (100 << 10)].tobytes() for s in long.starts)
    expected += b"".join(memory[s : s + 9 * 4096 : 9].tobytes() for s in (7, 3))
    assert target[: len(expected)].tobytes() == expected


WILD = st.integers(-(1 << 63), (1 << 64) - 1)
NEAR = st.integers(0, BLOCKS // 2).map(lambda number: 64 * 2 * number + number % 32)  # in granted blocks


@given(
    starts=st.just([]) | st.lists(st.integers(0, (1 << 64) - 1), max_size=3),
    near=st.lists(NEAR, min_size=1, max_size=3) | st.lists(st.integers(-300, 64 * BLOCKS), max_size=3),
    shape=st.lists(st.integers(1, 6), min_size=5, max_size=5)
    | st.lists(st.integers(-9, 40) | WILD, min_size=5, max_size=5),
)
def test_whatever_a_stranger_asks_for_is_packed_from_granted_blocks_or_refused(
    starts: list[int], near: list[int], shape: list[int]
) -> None:
    bench = Bench(chunk_bytes=CHUNK, gathers=True)
    stranger = Stranger(bench)
    memory = stranger.memory
    every = starts + [memory.span.address + one for one in near]
    pattern = GatherPattern(np.array(every, dtype="<u8").tobytes(), *shape)
    stranger.ask(pattern)
    reply = stranger.reply()
    if isinstance(reply, GatherRefused):
        assert lent(bench) == 0
        return
    assert isinstance(reply, GatherReady)
    length, outer, outer_stride, inner, inner_stride = shape
    granted = set(scattered(BLOCKS // 2))
    packed_bytes = []
    for start in every:
        for at in (start + i * outer_stride + j * inner_stride for i in range(outer) for j in range(inner)):
            first = at - memory.span.address
            assert first >= 0
            assert first + length <= len(memory.array)
            assert {byte // 64 % BLOCKS for byte in range(first, first + length)} <= granted
            packed_bytes.append(memory.array[first : first + length].tobytes())
    found = ctypes.string_at(reply.address, sum(map(len, packed_bytes)))
    assert found == b"".join(packed_bytes)
