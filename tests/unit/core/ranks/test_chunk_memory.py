"""The memory for covering reads: one limit, equal shares, and nothing counted as free before it is."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToMover
from kvxferd.core.node import LOST_CHUNKS_CHECK_S
from kvxferd.core.ranks.chunk_memory import ChunkMemory, fair_shares
from kvxferd.core.settings import Settings
from kvxferd.ids import BootId, Endpoint, MoverId
from kvxferd.records import PullRecord
from kvxferd.wire.limits import CHUNK_BYTES, MAX_CHUNKS_PER_MOVER
from kvxferd.wire.mover import ChunkMemoryGranted, ChunkMemoryRequest, MoverWorn, PullDone, PullOutcome
from kvxferd.wire.worker import TicketDelivered
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Mover, Worker, held_pull, mover_of


class ManyMovers:
    """Movers that make and give back chunks as they are told, when the test lets them."""

    def __init__(self, limit: int) -> None:
        self.context = NodeContext(
            boot=BootId("b"),
            endpoint=Endpoint("tcp://a:1"),
            settings=Settings(),
            new_token=map(str, itertools.count()).__next__,
        )
        self.memory = ChunkMemory(self.context, limit * CHUNK_BYTES)
        self.granted: dict[int, int] = {}  # as each mover has it
        self.held: dict[int, int] = {}
        self.wanted: dict[int, int] = {}
        self.lost: dict[int, int] = {}
        self.under_way: deque[tuple[int, int]] = deque()  # grants

    def want(self, mover: int, wanted: int, lost: int = 0) -> None:
        self.wanted[mover], self.lost[mover] = wanted, lost
        self.held.setdefault(mover, 0)
        self.report(mover)
        self.receive()

    def report(self, mover: int) -> None:
        num_held = max(self.granted.get(mover, 0), self.held[mover])
        message = ChunkMemoryRequest(self.wanted[mover], num_held, self.lost.get(mover, 0))
        self.memory.handle(MoverId(mover), message)
        self.memory.check_integrity()
        self.take_grants()

    def hold(self, mover: int, held: int) -> None:
        self.held[mover] = held
        self.want(mover, self.wanted[mover])

    def die(self, mover: int) -> None:
        for table in (self.granted, self.held, self.wanted):
            table.pop(mover, None)
        self.under_way = deque(sent for sent in self.under_way if sent[0] != mover)
        self.memory.forget(MoverId(mover))
        self.take_grants()
        self.receive()

    def take_grants(self) -> None:
        for effect in self.context.pop_effects():
            assert isinstance(effect, SendToMover)
            assert isinstance(effect.message, ChunkMemoryGranted)
            self.under_way.append((effect.mover, effect.message.num_chunks))

    def receive(self) -> None:
        """Have the movers receive their grants, and acknowledge them."""
        while self.under_way:
            mover, num_chunks = self.under_way.popleft()
            if mover in self.wanted:
                self.granted[mover] = num_chunks
                self.report(mover)


@pytest.mark.parametrize(
    ("wanted", "limit", "want"),
    [
        ([4, 4], 64, [4, 4]),  # all that is wanted
        ([4, 4, 4], 6, [2, 2, 2]),
        ([1, 4, 4], 7, [1, 3, 3]),  # who wants less gets that
        ([4, 4], 5, [3, 2]),  # the odd one goes to the first
        ([4, 4, 4], 2, [1, 1, 0]),
        ([4], 0, [0]),
        ([], 4, []),
    ],
)
def test_shares_are_equal(wanted: list[int], limit: int, want: list[int]) -> None:
    shares = fair_shares({MoverId(i): num for i, num in enumerate(wanted)}, limit)
    assert list(shares.values()) == want


def test_a_late_mover_gets_its_share_once_the_others_have_given_it_back() -> None:
    movers = ManyMovers(4)
    movers.want(1, 4)
    movers.hold(1, 4)
    movers.want(2, 4)
    assert movers.granted == {1: 2, 2: 0}, "told at once, but nothing is free"
    movers.hold(1, 3)
    assert movers.granted == {1: 2, 2: 1}
    movers.hold(1, 2)
    assert movers.granted == {1: 2, 2: 2}


def test_a_mover_that_says_it_holds_more_than_was_granted_takes_no_others_memory() -> None:
    movers = ManyMovers(8)
    movers.want(1, 4)
    movers.granted[1] = 1 << 40
    movers.want(2, 4)
    assert movers.granted[2] == 4


def test_what_a_dead_mover_held_is_free() -> None:
    movers = ManyMovers(4)
    movers.want(1, 4)
    movers.hold(1, 4)
    movers.want(2, 4)
    movers.die(1)
    assert movers.granted == {2: 4}


def test_lost_chunks_count_until_their_mover_is_dead() -> None:
    movers = ManyMovers(4)
    movers.want(1, 4)
    movers.hold(1, 2)
    movers.want(1, 0, lost=2)
    assert movers.memory.has_lost(MoverId(1))
    movers.want(2, 4)
    assert movers.granted[2] == 2
    movers.die(1)
    assert movers.granted[2] == 4
    assert not movers.memory.has_lost(MoverId(1))


@pytest.mark.parametrize("size", [-1, 1 << 80])
def test_a_mover_that_names_odd_numbers_gets_no_more_than_one_may_have(size: int) -> None:
    movers = ManyMovers(1000)
    movers.memory.handle(MoverId(1), ChunkMemoryRequest(size, size, size))
    movers.memory.check_integrity()
    assert 0 <= movers.memory.num_bytes <= MAX_CHUNKS_PER_MOVER * CHUNK_BYTES


def test_a_record_has_the_bytes_of_each_way_whatever_the_mover_claims(world, source, sink):
    """A resident mover is a user's process: its claim must not make a counter run backwards."""
    for claimed, want in ((5, 5), (99, 7), (-3, 0)):
        mover_of(sink).hold = True
        sink.pull(source.publish(f"t{claimed}", IDS, TOKENS), SINK_IDS, TOKENS)
        start = mover_of(sink).started.popleft()
        outcome = PullOutcome(delivered=True, bytes=7, covered_bytes=claimed)
        mover_of(sink).say(PullDone(pull=start.pull, outcome=outcome))
        record = [r for r in sink.host.records if isinstance(r, PullRecord)][-1]
        assert record.ways == {"direct": 7 - want, "covering": want}


def test_a_resident_movers_memory_is_not_counted(world, source, sink):
    node = sink.host.node
    for mover in node.movers._movers.values():
        mover.resident = True
    mover_of(sink).say(ChunkMemoryRequest(num_wanted=2))
    assert node.chunk_memory.num_bytes == 0


def lose_a_chunk(worker: Worker) -> Mover:
    mover = mover_of(worker)
    mover.say(ChunkMemoryRequest(num_wanted=1))
    mover.say(ChunkMemoryRequest(num_wanted=1, num_held=1, num_lost=1))
    return mover


def wear_out(worker: Worker) -> Mover:
    mover = mover_of(worker)
    mover.say(MoverWorn())
    return mover


@pytest.mark.parametrize("spoil", [lose_a_chunk, wear_out])
def test_an_idle_mover_with_memory_that_its_death_frees_is_replaced(world, source, sink, spoil):
    old = spoil(sink)
    world.advance(1)
    assert not old.alive
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    assert isinstance(sink.ended(ticket), TicketDelivered)
    assert sink.host.node.chunk_memory.num_bytes == 0


@pytest.mark.parametrize("spoil", [lose_a_chunk, wear_out])
def test_a_mover_is_not_replaced_while_it_reads(world, source, sink, spoil):
    ticket = held_pull(source, sink, deadline_s=60)
    old = spoil(sink)
    world.advance(2 * LOST_CHUNKS_CHECK_S)
    assert old.alive
    old.work()
    assert isinstance(sink.ended(ticket), TicketDelivered)
    world.advance(LOST_CHUNKS_CHECK_S)
    assert not old.alive


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(0, 20), st.randoms(use_true_random=False))
def test_the_limit_holds_whatever_movers_do(limit: int, rng: random.Random) -> None:
    """Movers that hold no more than they were told to, or as much as before while they must give back."""
    movers = ManyMovers(limit)
    for _ in range(60):
        mover = rng.randrange(5)
        if mover not in movers.wanted or rng.random() < 0.3:
            movers.want(mover, rng.randrange(MAX_CHUNKS_PER_MOVER + 1))
        elif rng.random() < 0.2:
            movers.die(mover)
        else:
            # It makes chunks up to its grant, or gives back some of what is over it.
            granted, held = movers.granted.get(mover, 0), movers.held[mover]
            movers.held[mover] = rng.randint(min(granted, held), max(granted, held))
            movers.report(mover)
        if rng.random() < 0.5:
            movers.receive()
        assert sum(movers.held.values()) <= limit
        assert movers.memory.num_bytes <= limit * CHUNK_BYTES
    for _ in range(3):
        movers.receive()
        for mover in tuple(movers.wanted):
            movers.hold(mover, min(movers.held[mover], movers.granted.get(mover, 0)))
    shares = fair_shares({MoverId(m): movers.wanted[m] for m in movers.wanted}, limit)
    assert sum(movers.granted.get(m, 0) for m in movers.wanted) == sum(shares.values())
