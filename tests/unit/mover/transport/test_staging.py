"""Reads of memory that the library cannot reach: chunks, slots, loans, and what is said of failures."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxferd.errors import DeviceError, ProtocolError
from kvxferd.ids import AgentName
from kvxferd.memory.driver import Rows
from kvxferd.mover.transport import staging, staging_source
from kvxferd.mover.transport.base import HOST, MemoryKind, MemoryRange, ReadHandle, ReadKinds, TransportError
from kvxferd.mover.transport.buffers import PinnedBuffer
from kvxferd.mover.transport.runs import packed_addresses, single_run
from kvxferd.mover.transport.staging import StagedRead, StagedTransport
from kvxferd.plan import Runs
from kvxferd.wire.codec import encode
from kvxferd.wire.mover import MoverWorn
from kvxferd.wire.staging import (
    MAX_CHUNK_RUNS,
    MAX_STAGING_MESSAGE_BYTES,
    STAMP_BYTES,
    ChunkReady,
    ChunkRefused,
    ChunkRelease,
    ChunkRequest,
)
from tests.support.devices import Segment
from tests.support.fake_driver import FAKE_DEVICES, GRANULARITY, FakeDriver
from tests.support.memory_transport import Fabric, MemoryTransport

UUID = FAKE_DEVICES[0].uuid
SLOT = 4096
NUM_SLOTS = 3
SIZE = GRANULARITY
STAGED = MemoryKind("DRAM", 0, staged=True)
Triple = tuple[int, int, int]


class Side:
    """One mover's transport, and one stretch of its GPU's memory: staged, or registered."""

    def __init__(self, world: World, name: str, is_staged: bool) -> None:
        self.world = world
        self.segment = Segment(world.driver, UUID, [SIZE])
        self.agent = AgentName(name)
        self.inner = MemoryTransport(world.fabric, self.agent)
        self.reported: list[MoverWorn] = []
        self.transport = StagedTransport(
            self.inner, lambda: world.now, SLOT, NUM_SLOTS, report=self.reported.append
        )
        span = MemoryRange(self.segment.address, SIZE)
        self.place = STAGED if is_staged else HOST.local
        if is_staged:
            described = self.transport.stage(world.driver, UUID, [span])
        else:
            self.transport.register(span)
            described = (span,)
        self.metadata = self.transport.metadata(described)

    def close(self) -> None:
        self.transport.close()
        self.segment.close()


class World:
    """A reader and a source, on a fabric whose reads take a few polls."""

    def __init__(
        self, sink_staged: bool, source_staged: bool, polls: int = 2, driver: FakeDriver | None = None
    ) -> None:
        self.now = 100.0
        self.driver = driver or FakeDriver()
        self.fabric = Fabric(polls_per_read=polls)
        self.sink = Side(self, "sink", sink_staged)
        self.source = Side(self, "source", source_staged)
        self.sink.transport.load_remote(self.source.metadata)
        self.kinds = ReadKinds(self.sink.place, self.source.place)
        self.content = random.Random(7).randbytes(SIZE)
        self.source.segment.write(self.content)
        self.sink.segment.write(bytes(SIZE))

    def post(self, *triples: Triple) -> ReadHandle:
        """Offsets in the sink's and the source's memory, and lengths."""
        local, remote, length = (np.array(c, dtype=np.uint64) for c in zip(*triples, strict=True))
        runs = Runs(
            local + np.uint64(self.sink.segment.address),
            remote + np.uint64(self.source.segment.address),
            length,
        )
        return self.sink.transport.post(self.source.agent, runs, self.kinds)

    def run(self, *handles: ReadHandle, polls: int = 5000, source_serves: bool = True) -> None:
        """Poll until all are done; both movers take turns."""
        for _ in range(polls):
            if not [handle for handle in handles if not self.sink.transport.poll(handle)]:
                return
            if source_serves:
                self.source.transport.progress()
        raise AssertionError("never done")

    def failure_of(
        self, handle: ReadHandle, match: str | None = None, *, source_serves: bool = True
    ) -> TransportError:
        """Run until the read has failed."""
        with pytest.raises(TransportError, match=match) as raised:
            self.run(handle, source_serves=source_serves)
        return raised.value

    def settle(self) -> None:
        """Let what is on its way arrive."""
        for _ in range(50):
            self.sink.transport.progress()
            self.source.transport.progress()

    def free_slots(self) -> list[int]:
        """Of the reader's ring and of the lender's, where there are such."""
        rings = []
        if self.sink.transport._slots is not None:
            rings.append(self.sink.transport._slots)
        if self.source.transport._source is not None:
            rings.append(self.source.transport._source.slots)
        return [len(ring._free) for ring in rings]

    def close(self) -> None:
        self.sink.close()
        self.source.close()


SIDES = [(True, True), (True, False), (False, True)]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Only the source is staged, unless the test says otherwise."""
    made = World(*getattr(request, "param", (False, True)))
    yield made
    made.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sides=st.sampled_from(SIDES),
    polls=st.integers(0, 3),
    lengths=st.lists(st.one_of(st.integers(1, 64), st.integers(1, 3 * SLOT)), min_size=1, max_size=30),
    seed=st.integers(0, 1000),
)
def test_any_runs_at_any_speed(sides: tuple[bool, bool], polls: int, lengths: list[int], seed: int) -> None:
    """Runs longer than a slot, many in one, several reads at a time: the same as a copy."""
    world = World(*sides, polls=polls)
    try:
        rng = random.Random(seed)
        wanted, triples, at = bytearray(SIZE), [], 0
        for length in lengths:
            if at + length > SIZE:
                break
            source = rng.randrange(SIZE - length + 1)
            triples.append((at, source, length))
            wanted[at : at + length] = world.content[source : source + length]
            at += length + rng.randrange(3)
        cut = rng.randrange(len(triples) + 1)
        world.run(*[world.post(*part) for part in (triples[:cut], triples[cut:]) if part])
        assert world.sink.segment.read(SIZE) == bytes(wanted)
        world.settle()
        assert all(free == NUM_SLOTS for free in world.free_slots())
    finally:
        world.close()


class CountingDriver(FakeDriver):
    """Notes each call: the width of rows, 0 for copies one by one, and how many."""

    def __init__(self, has_kernel: bool = True) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []
        self._has_kernel = has_kernel

    def copy_rows(self, to: memoryview, source: memoryview, rows: Rows, stream: Any) -> None:
        if not self._has_kernel:
            raise DeviceError("cannot cuModuleLoadData: an unsupported toolchain")
        super().copy_rows(to, source, rows, stream)
        self.calls.append((rows.width, len(to)))

    def copy(self, to: Sequence[int], source: Sequence[int], length: Sequence[int], stream: Any) -> None:
        super().copy(to, source, length, stream)
        self.calls.append((0, len(to)))


LONG = 64 << 10


@pytest.mark.parametrize(
    ("lengths", "copies_rows", "calls"),
    [
        ([64] * 30 + [70] * 20 + [200], True, [(64, 30), (70, 20), (200, 1)]),
        ([64] * 30 + [LONG] * 2 + [LONG - 1] * 9, True, [(64, 30), (LONG - 1, 9), (0, 2)]),
        ([64] * 15, True, [(0, 15)]),  # few
        (list(range(1, 41)), True, [(0, 40)]),  # few of each length
        ([64] * 30 + [70] * 9, False, [(0, 39)]),
    ],
)
def test_many_short_runs_of_a_length_are_one_call(
    lengths: list[int], copies_rows: bool, calls: list[tuple[int, int]]
) -> None:
    random.Random(1).shuffle(lengths)
    size = GRANULARITY * -(-sum(lengths) // GRANULARITY)
    content = random.Random(2).randbytes(sum(lengths))
    length = np.array(lengths, dtype=np.uint64)
    driver, transport = CountingDriver(), MemoryTransport(Fabric(), AgentName("me"))
    with Segment(driver, UUID, [size]) as segment:
        segment.write(content)
        pinned = PinnedBuffer(transport, driver, UUID, size, copies_rows)
        remote = packed_addresses(segment.address, length)
        order = np.random.default_rng(3).permutation(len(lengths))
        local = packed_addresses(pinned.address, length[order])[np.argsort(order)]
        driver.calls.clear()
        event = pinned.start_copies(Runs(local, remote, length))
        made = [call for call in driver.calls if call[1]]
        while not pinned.is_done(event):
            pass
        wanted = b"".join(content[int(remote[i]) - segment.address :][: lengths[i]] for i in order)
        assert ctypes.string_at(pinned.address, sum(lengths)) == wanted
        assert (sorted(made), made[-1]) == (sorted(calls), calls[-1])
        pinned.discard(transport)


def test_copy_and_wire_overlap() -> None:
    """With all slots in use, a read of ten chunks takes far fewer turns than ten times one chunk's."""

    def turns(num_chunks: int) -> int:
        world = World(True, True, polls=5)
        try:
            handle = world.post((0, 0, num_chunks * SLOT))
            for turn in range(5000):
                if world.sink.transport.poll(handle):
                    return turn
                world.source.transport.progress()
            raise AssertionError("never done")
        finally:
            world.close()

    assert turns(10) < 0.6 * 10 * turns(1)


@pytest.mark.parametrize("world", [(True, False), (True, True)], indirect=True)
def test_a_source_that_is_stopped_leaves_a_slot_for_others(world: World) -> None:
    """However much is read from it. What holds a slot may be written until the mover is dead."""
    other = Side(world, "other", world.source.place.staged)
    other.segment.write(world.content)
    world.sink.transport.load_remote(other.metadata)
    world.fabric.stalled.add(world.source.agent)
    for offset in (0, 8 * SLOT):
        world.post((offset, offset, 8 * SLOT))
    assert not world.sink.transport.can_stage(world.source.agent)
    theirs = single_run(world.sink.segment.address, other.segment.address, 8 * SLOT)
    handle = world.sink.transport.post(other.agent, theirs, world.kinds)
    for _ in range(200):
        other.transport.progress()
        world.sink.transport.poll(handle)
    assert handle.done
    other.close()


@pytest.mark.parametrize("world", SIDES, ids=["both", "sink", "source"], indirect=True)
def test_a_read_that_is_cancelled_starts_no_more_parts_and_ends(world: World) -> None:
    handle = world.post((0, 0, 16 * SLOT))
    assert isinstance(handle, StagedRead)
    num_parts = len(handle.active)
    assert num_parts
    handle.cancel()
    assert world.failure_of(handle).settled
    after = world.sink.segment.read(SIZE)[num_parts * SLOT :]
    assert not any(after)


@pytest.mark.parametrize("world", [(False, False, 0)], indirect=True)
def test_what_both_sides_can_reach_goes_straight_on(world: World) -> None:
    handle = world.post((0, 0, SIZE))
    assert handle.done
    assert world.sink.segment.read(SIZE) == world.content
    assert world.fabric.posts == [(world.source.agent, 1)]


# --- failures


@pytest.mark.parametrize("world", SIDES, ids=["both", "sink", "source"], indirect=True)
def test_a_source_that_dies_settles_the_read_and_frees_the_slots(world: World) -> None:
    handle = world.post((0, 0, 8 * SLOT))
    world.source.inner.close()
    world.now += staging_source.CHUNK_REPLY_TIMEOUT_S + 1  # one that was asked is given up in time
    assert world.failure_of(handle, source_serves=False).settled
    if world.sink.transport._slots is not None:
        assert len(world.sink.transport._slots._free) == NUM_SLOTS


@pytest.mark.parametrize("world", [(True, False)], indirect=True)
def test_a_read_in_doubt_costs_slots_but_touches_nothing(world: World) -> None:
    """What may still land lands in the ring: the blocks are safe, and the slot is not used again."""
    for num_left in reversed(range(NUM_SLOTS)):
        handle = world.post((0, 0, SLOT))
        world.fabric.errors[world.source.agent] = TransportError("a descriptor failed", settled=False)
        assert world.failure_of(handle).settled
        assert world.free_slots() == [num_left]
    with pytest.raises(TransportError, match="every buffer is in doubt"):
        world.post((0, 0, SLOT))
    assert world.sink.reported == [MoverWorn()]


def test_a_direct_destination_in_doubt_is_said_to_be(world: World) -> None:
    handle = world.post((0, 0, SLOT))
    world.settle()
    world.fabric.errors[world.source.agent] = TransportError("a descriptor failed", settled=False)
    assert not world.failure_of(handle).settled


def test_a_lost_connection_hides_no_failure_that_proves_nothing(world: World) -> None:
    """One chunk's connection is lost, and that may prove it over; the other's may still land."""
    handle = world.post((0, 0, SLOT), (SLOT, SLOT, SLOT))
    assert isinstance(handle, StagedRead)
    world.fabric.stalled.add(world.source.agent)
    world.settle()
    while any(chunk.handle is None for chunk in handle.active):
        world.sink.transport.poll(handle)
        world.source.transport.progress()
    world.fabric.stalled.clear()
    for fault in (
        TransportError("disconnected", settled=False, lost=True),
        TransportError("a descriptor failed", settled=False),
    ):
        assert handle.active
        world.fabric.errors[world.source.agent] = fault
        with suppress(TransportError):
            world.sink.transport.poll(handle)
    assert not handle.active
    with pytest.raises(TransportError) as raised:
        world.sink.transport.poll(handle)
    assert not raised.value.settled


@pytest.mark.parametrize("method", ["copy", "record", "is_done"])
@pytest.mark.parametrize("world", [(True, False), (True, True)], indirect=True)
def test_a_copy_that_fails_or_was_half_started_is_in_doubt(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Of a list of copies the first may run when the driver refuses the second."""
    real, own = getattr(world.driver, method), world.sink.transport._pinned
    assert own is not None

    def fail(*arguments: object) -> object:
        if getattr(arguments[-1], "stream", arguments[-1]) is not own._stream:
            return real(*arguments)  # the lender's
        raise DeviceError(f"cannot {method}: an illegal address")

    handle = world.post((0, 0, SLOT))
    with monkeypatch.context() as patch:
        patch.setattr(world.driver, method, fail)
        assert not world.failure_of(handle, "illegal address").settled


@pytest.mark.parametrize("world", [(True, True)], indirect=True)
def test_a_copy_for_a_reader_that_fails_is_no_failure_of_a_read_here(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender, real = world.sink.transport._source, world.driver.record
    assert lender is not None

    def fail(stream: object) -> object:
        if stream is lender.pinned._stream:
            raise DeviceError("cannot cuEventRecord: an illegal address")
        return real(stream)

    handle = world.post((0, 0, SLOT))
    world.source.transport.load_remote(world.sink.metadata)
    theirs = single_run(world.source.segment.address, world.sink.segment.address, SLOT)
    world.source.transport.post(world.sink.agent, theirs, world.kinds)
    with monkeypatch.context() as patch:
        patch.setattr(world.driver, "record", fail)
        world.run(handle)
        with pytest.raises(DeviceError, match="illegal address"):
            world.sink.transport.progress()


@pytest.mark.parametrize(
    ("method", "when"), [("allocate_host", 3), ("allocate_host", 4), ("open_stream", 2), ("open_stream", 3)]
)
def test_what_cannot_be_staged_leaves_nothing_and_can_be_closed(
    monkeypatch: pytest.MonkeyPatch, method: str, when: int
) -> None:
    """Whoever waits for a resident mover's end waits for this close. The probe's own come first."""
    driver = FakeDriver()
    inner = MemoryTransport(Fabric(), AgentName("me"))
    transport = StagedTransport(inner, slot_bytes=SLOT, num_slots=NUM_SLOTS)
    calls, real = iter(range(1, 9)), getattr(driver, method)

    def runs_out(*arguments: int) -> object:
        if next(calls) == when:
            raise DeviceError("cannot allocate: out of memory")
        return real(*arguments)

    with Segment(driver, UUID, [SIZE]) as segment:
        monkeypatch.setattr(driver, method, runs_out)
        with pytest.raises(DeviceError, match="out of memory"):
            transport.stage(driver, UUID, [MemoryRange(segment.address, SIZE)])
        assert (inner._spans, driver._host) == (set(), {})
        transport.close()
        transport.close()


@pytest.mark.parametrize("world", [(True, True)], indirect=True)
def test_a_driver_that_breaks_does_not_keep_a_mover_from_ending(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a kernel's illegal access every call of the process fails, those of its mover's thread too."""

    def fail(_: object) -> None:
        raise DeviceError("cannot cuStreamSynchronize: an illegal address")

    with monkeypatch.context() as patch:
        for method in ("synchronize", "close_stream", "free_host"):
            patch.setattr(world.driver, method, fail)
        world.sink.transport.close()
        world.source.transport.close()
    assert "illegal address" in caplog.text


def test_a_chunk_that_was_taken_back_is_not_delivered(world: World) -> None:
    """A reader so slow that its loan has ended finds another stamp, whatever the clocks say."""
    handle = world.post((0, 0, SLOT))
    world.settle()  # lent
    world.now += staging_source.CHUNK_LEASE_S + 1
    world.source.transport.progress()  # ended
    assert world.free_slots() == [NUM_SLOTS]
    world.now -= staging_source.CHUNK_LEASE_S + 1
    assert world.failure_of(handle, "took a chunk back").settled


# --- notes from anybody


class Stranger:
    """An agent that says what it likes."""

    def __init__(self, world: World, to: Side) -> None:
        self.world, self.to = world, to
        self.transport = MemoryTransport(world.fabric, AgentName("stranger"))
        self.segment = Segment(world.driver, UUID, [SIZE])
        span = MemoryRange(self.segment.address, SIZE)
        self.transport.register(span)
        self.metadata = self.transport.metadata([span])
        self.transport.load_remote(to.metadata)

    def say(self, note: bytes) -> None:
        self.transport.notify(self.to.agent, note)
        self.to.transport.progress()

    def send_request(self, *stretches: tuple[int, int], number: int = 1) -> list[object]:
        """Return what is answered, once copies have had time to be made."""
        addresses = np.array([start for start, _ in stretches], dtype="<u8").tobytes()
        lengths = np.array([length for _, length in stretches], dtype="<u4").tobytes()
        self.say(
            encode(ChunkRequest(number=number, addresses=addresses, lengths=lengths, metadata=self.metadata))
        )
        return self.answers()

    def answers(self) -> list[object]:
        for _ in range(5):
            self.to.transport.progress()
        return [staging.decode_staging_message(note) for _, note in self.transport.receive_notifications()]


@pytest.fixture
def stranger(world: World) -> Iterator[Stranger]:
    made = Stranger(world, world.source)
    yield made
    made.segment.close()


def test_a_reader_that_is_gone_keeps_no_slot_for_long(world: World, stranger: Stranger) -> None:
    """It has requested many chunks, of which it takes none, and takes back no request."""
    base = world.source.segment.address
    for number in range(5 * NUM_SLOTS):
        stranger.send_request((base, 10), number=number)
    handle = world.post((0, 0, SLOT))
    world.settle()
    assert not world.sink.transport.poll(handle)
    world.now += staging_source.CHUNK_KEPT_S
    world.run(handle)
    assert world.sink.segment.read(SLOT) == world.content[:SLOT]


def test_what_its_reader_has_given_up_is_not_served(world: World, stranger: Stranger) -> None:
    base = world.source.segment.address
    served = [stranger.send_request((base, 10), number=number) for number in range(NUM_SLOTS + 1)]
    assert [len(replies) for replies in served] == [1] * NUM_SLOTS + [0]
    world.now += staging_source.CHUNK_REPLY_TIMEOUT_S
    assert stranger.answers() == []


@pytest.mark.parametrize(
    "stretches",
    [
        [],
        [(-1, 8)],  # before
        [(SIZE - 4, 8)],  # across the end
        [(SIZE, 1)],
        [(0, 0)],
        [(0, SLOT), (SLOT, 1)],  # more than a slot
        [(0, 8), (1 << 40, 8)],  # one right, one far away
        [(-(1 << 40), 8)],
        [(n, 1) for n in range(MAX_CHUNK_RUNS + 1)],
        [(0, (1 << 32) - 1)],
    ],
)
def test_an_ask_for_what_is_not_lent_is_denied(
    world: World, stranger: Stranger, stretches: list[tuple[int, int]]
) -> None:
    base = world.source.segment.address
    replies = stranger.send_request(*[(base + offset, length) for offset, length in stretches])
    replies += stranger.send_request(((1 << 64) - 8, 16), number=2)  # its end wraps around
    assert [type(reply) for reply in replies] == [ChunkRefused] * 2
    assert world.free_slots() == [NUM_SLOTS]


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"\xff" * 100,
        b"x" * (1 << 20),
        encode(ChunkReady(number=1, address=1, stamp_address=1, stamp=bytes(16))),
        encode(ChunkRefused(number=1, message="no")),
        encode(ChunkRelease(number=77)),
        encode(ChunkRequest(number=1, addresses=b"123", lengths=b"1", metadata=b"")),
        encode(ChunkRequest(number=-1, addresses=bytes(8), lengths=bytes(4), metadata=b"nonsense")),
    ],
)
def test_nonsense_changes_nothing(world: World, stranger: Stranger, note: bytes) -> None:
    handle = world.post((0, 0, SLOT))
    stranger.say(note)
    world.run(handle)
    assert world.sink.segment.read(SLOT) == world.content[:SLOT]


def test_a_message_that_is_longer_than_any_needs_to_be_is_not_decoded() -> None:
    note = encode(ChunkRefused(number=1, message="x" * MAX_STAGING_MESSAGE_BYTES))
    with pytest.raises(ProtocolError, match="the limit is"):
        staging.decode_staging_message(note)


def test_whoever_knows_a_sources_name_does_not_know_a_requests_number(world: World) -> None:
    """The name of an agent in a message is what its sender wrote."""
    handle = world.post((0, 0, SLOT))
    notes = world.fabric.notes.setdefault(world.sink.agent, [])
    for number in range(100):
        notes.append((world.source.agent, encode(ChunkRefused(number=number, message="no"))))
    world.run(handle)
    assert world.sink.segment.read(SLOT) == world.content[:SLOT]


def test_a_source_cannot_write_where_the_stamps_of_others_are_read(world: World) -> None:
    """Its own metadata for the reply is all that a source learns of the reader's memory."""
    slots = world.sink.transport._open_stamp_slots()
    world.source.inner.register(MemoryRange(world.source.segment.address, SLOT))
    world.post((0, 0, SLOT))
    ((_, note),) = world.source.inner.receive_notifications()
    request = staging.decode_staging_message(note)
    assert isinstance(request, ChunkRequest)
    world.source.inner.load_remote(request.metadata)
    with pytest.raises(TransportError, match="not registered"):
        world.source.inner.post(
            world.sink.agent, single_run(world.source.segment.address, slots.span.address, STAMP_BYTES)
        )


def test_an_agent_that_came_by_a_request_does_not_say_where_reads_go(world: World) -> None:
    base, other = world.source.segment.address, world.sink.segment.address + SLOT
    span = MemoryRange(other, SLOT)
    world.sink.inner.register(span)
    world.source.inner.register(MemoryRange(base, SLOT))
    request = ChunkRequest(
        number=1,
        addresses=np.array([base], dtype="<u8").tobytes(),
        lengths=np.array([8], dtype="<u4").tobytes(),
        metadata=world.sink.inner.metadata([span]),
    )
    notes = world.fabric.notes.setdefault(world.source.agent, [])

    def is_readable() -> bool:
        with suppress(TransportError):
            world.source.inner.post(world.sink.agent, single_run(base, other, 8))
            return True
        return False

    notes.append((world.sink.agent, encode(request)))
    world.settle()
    assert is_readable()
    registered = MemoryRange(world.sink.segment.address, 8)
    world.sink.inner.register(registered)
    metadata = world.sink.inner.metadata([registered])
    world.source.transport.load_remote(metadata, world.sink.agent)
    assert not is_readable()
    # Nor does one that comes later, when the connection is lost.
    world.source.inner.drop_remote(world.sink.agent)
    notes = world.fabric.notes.setdefault(world.source.agent, [])
    notes.append((world.sink.agent, encode(request)))
    world.settle()
    assert not is_readable()


@pytest.mark.parametrize("stamp", [b"", bytes(15), bytes(4096)])
def test_a_source_that_lends_what_cannot_be_fails_the_read(world: World, stamp: bytes) -> None:
    handle = world.post((0, 0, SLOT))
    ((_, note),) = world.source.inner.receive_notifications()
    number = staging.decode_staging_message(note).number
    world.source.inner.load_remote(world.sink.metadata)
    reply = ChunkReady(number=number, address=world.source.segment.address, stamp_address=4096, stamp=stamp)
    world.source.inner.notify(world.sink.agent, encode(reply))
    world.failure_of(handle, "cannot be")


def test_waiting_asks_are_limited(world: World, stranger: Stranger) -> None:
    base = world.source.segment.address
    for number in range(1, staging_source.MAX_WAITING_PER_AGENT + NUM_SLOTS + 2):
        replies = stranger.send_request((base, 8), number=number)
    assert [type(reply) for reply in replies] == [ChunkRefused]
    assert [type(reply) for reply in stranger.send_request((base, 8), number=1)] == [ChunkRefused], (
        "the number is in use"
    )
