"""What one user can cost the others, counted and not timed: a bound for each defect of a hostile reading."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from kvxferd.client.fence_slots import FenceSlots
from kvxferd.client.publishes import ClientPublish, ClientPublishes
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.context import MAX_TURN_BYTES
from kvxferd.core.source.grants import MAX_PAGE_BYTES
from kvxferd.errors import Code, ProtocolError
from kvxferd.ids import Incarnation, Rank
from kvxferd.layout import BlocksByGroup, PackedBlocks, pack_ids
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import CLIENT_MESSAGES, encode
from kvxferd.wire.common import BlockIds, Message, TransferRef
from kvxferd.wire.limits import (
    FENCE_SLOTS,
    IDS_PART_BYTES,
    MAX_DELIVERED_BY_MOVER,
    MAX_GROUPS_PER_REQUEST,
    MAX_METADATA_BYTES,
    MAX_PEER_MESSAGE_BYTES,
    MAX_RANKS,
    MAX_REGIONS,
    MAX_REQUEST_IDS_BYTES,
    MAX_SENTENCE_CHARS,
)
from kvxferd.wire.peer import Consumer, GrantRequest, ManifestRequest
from tests.support.simulation import (
    FIRST,
    IDS,
    SECOND,
    SINK_IDS,
    TOKENS,
    Host,
    Mover,
    Worker,
    World,
    mover_of,
    spec_of,
)

MIB = 1 << 20
IDS_PER_MIB = MIB // 4
MOST_IDS = MAX_REQUEST_IDS_BYTES // 4  # of one request
TOO_MANY_IDS = MOST_IDS + IDS_PER_MIB


def is_delivered(sink: Worker, *tickets: int) -> bool:
    return all(isinstance(sink.ended(ticket), wk.TicketDelivered) for ticket in tickets)


def rank(world: World, host: str, name: str, num_blocks: int = 8, uid: int = 0) -> Worker:
    """The only rank of an engine with blocks of one token, so that few tokens take many ids."""
    found = world.hosts.get(host) or world.host(host)
    return world.register(found, spec_of(name), uid=uid, num_blocks=num_blocks, head_dim=1, block_tokens=1)


def ids(start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.int32)


def add_blocks(source: Worker, start: int, stop: int) -> None:
    """Report that many more tokens of transfer "t", with their blocks."""
    blocks = {"full": PackedBlocks(pack_ids(ids(start, stop)))}
    source.say(wk.Ready(transfer_id="t", blocks=blocks, incarnation=source.incarnation, ready_tokens=stop))


def pull_last(sink: Worker, ref: TransferRef, num_tokens: int, first: int, progressive: bool = False) -> int:
    """Pull the tokens from `first` on, a few: the request is small however long the transfer's list."""
    ticket = next(sink.tickets)
    blocks = {"full": PackedBlocks(pack_ids(ids(0, num_tokens - first)), first)}
    facts = {"num_tokens": num_tokens, "deadline_s": 30.0, "progressive": progressive}
    sink.say(wk.PullRequest(ticket=ticket, ref=ref, blocks=blocks, **facts))
    return ticket


def bytes_per_turn(monkeypatch: pytest.MonkeyPatch, host: Host) -> list[int]:
    """Return a list that gets the bytes that each turn of the host's loop sends to peers and movers."""
    sent: list[int] = []

    def decide(event: ev.Event) -> list[fx.Effect]:
        effects = Host.decide(host, event)
        to_others = (fx.SendToPeer, fx.ReplyToPeer, fx.SendToMover)
        sent.append(sum(len(encode(e.message)) for e in effects if isinstance(e, to_others)))
        return effects

    monkeypatch.setattr(host, "decide", decide)
    return sent


def test_requests_that_wait_for_a_long_list_are_not_all_granted_in_one_turn(world, monkeypatch):
    """A user's rank pulls one block of its long transfer many times, and then the transfer is ready.

    With a copy of the list for each request, 60 of them for 15 MiB silenced the source for 6 s and took 1 GB.
    Each pull asks for its own block alone.
    """
    num_ids, num_requests = 15 * IDS_PER_MIB, 256
    source, sink = rank(world, "p", "prefill", num_ids), rank(world, "d", "decode")
    ref = source.publish("t", ids(0, num_ids), num_ids, ready_tokens=0, num_readers=2)  # one is not the last
    tickets = [pull_last(sink, ref, num_ids, num_ids - 1) for _ in range(num_requests)]
    sent = bytes_per_turn(monkeypatch, source.host)
    source.ready("t")
    world.advance(1.0)
    assert is_delivered(sink, *tickets), "a pull was lost"
    assert sum(sent) <= MIB


def test_replies_with_long_lists_are_made_in_several_turns(world, monkeypatch):
    """A peer asks for the whole list many times, which no honest reader does."""
    num_ids, num_requests = 15 * IDS_PER_MIB, 256
    source = rank(world, "p", "prefill", num_ids)
    ref = source.publish("t", ids(0, num_ids), num_ids, ready_tokens=0, num_readers=2)
    reads = ((Rank(0, 0), mover_of(source).agent),)
    for number in range(num_requests):
        consumer = Consumer("decode", "g1", Rank(0, number), num_requests)
        request = GrantRequest(
            request=number, grant=f"g{number}", ref=ref, consumer=consumer, reads=reads, wait_s=9.0,
            from_tokens={"full": 0},
        )  # fmt: skip
        source.host.feed(ev.PeerRequest(b"d", request, ""))
    sent = bytes_per_turn(monkeypatch, source.host)
    source.ready("t")
    world.advance(1.0)
    assert sum(sent) >= num_requests * MAX_PAGE_BYTES, "a request has no reply"
    assert max(sent) <= MAX_TURN_BYTES + MAX_PAGE_BYTES + MIB


class LargeMover(Mover):
    """A mover whose memory is registered in as many pieces as may be."""

    def say(self, message: Message) -> None:
        if isinstance(message, mv.Bound):
            message = msgspec.structs.replace(message, metadata=bytes(MAX_METADATA_BYTES))
        super().say(message)


def test_no_reply_is_larger_than_its_reader_takes(world):
    """A user registers an engine of ranks that are each within every limit, and has it pulled once.

    The manifest passes 16 MiB. At such a message the reader's socket would end the connection, and lose all
    that other users have on its way there.
    """
    world.mover_type = LargeMover
    num_ranks = MAX_PEER_MESSAGE_BYTES // MAX_METADATA_BYTES + 1
    source, *_ = world.engine(world.host("p"), "large", pp=num_ranks, layers=num_ranks)
    request = ManifestRequest(request=1, engine_id="large", generation="g1", wait_s=1.0, pp_aware=True)
    replies = world.send_request(source.host, request)
    assert all(len(encode(reply)) <= MAX_PEER_MESSAGE_BYTES for reply in replies)


# --- one bad reply, and the requests of all users to that peer


@pytest.fixture
def honest(world) -> tuple[Worker, Worker, list[int]]:
    """A user's source and sink, and three pulls that wait until the source is ready."""
    source, sink = rank(world, "p", "honest-p", uid=SECOND), rank(world, "d", "honest-d", uid=SECOND)
    refs = [source.publish(f"t{number}", ids(0, 8), 8, ready_tokens=0) for number in range(3)]
    return source, sink, [sink.pull(ref, ids(0, 8), 8) for ref in refs]


def num_lost(honest: tuple[Worker, Worker, list[int]]) -> int:
    """Finish what the honest pulls wait for, and return how many of them are not delivered."""
    source, sink, tickets = honest
    for number in range(len(tickets)):
        source.ready(f"t{number}")
    return sum(not is_delivered(sink, ticket) for ticket in tickets)


def grow(source: Worker, num_ids: int) -> TransferRef:
    """Publish no blocks, and add them."""
    ref = source.publish("t", [], num_ids, ready_tokens=0)
    for start in range(0, num_ids, IDS_PER_MIB):
        add_blocks(source, start, start + IDS_PER_MIB)
    return ref


def publish_behind_parts(source: Worker, num_ids: int) -> TransferRef:
    """Send as many ids ahead as may be, and the others in the request itself."""
    ahead = pack_ids(ids(0, MOST_IDS))
    for offset in range(0, len(ahead), IDS_PART_BYTES):
        part = ahead[offset : offset + IDS_PART_BYTES]
        source.say(BlockIds(stream=1, group="full", offset=offset, ids=part))
    return source.publish("t", ids(MOST_IDS, num_ids), num_ids, stream=1)


@pytest.mark.parametrize(
    ("publish", "num_ids"),
    [
        (grow, MOST_IDS),
        (publish_behind_parts, MOST_IDS),
        (grow, TOO_MANY_IDS),
        (publish_behind_parts, TOO_MANY_IDS),
    ],
    ids=["grown to the limit", "published to the limit", "grown too long", "published too long"],
)
def test_a_list_that_is_too_long_costs_no_other_user_a_pull(
    world, honest, publish: Callable[[Worker, int], TransferRef], num_ids: int
):
    """A user publishes more than 16 MiB of ids, and pulls one block of it from another node.

    The fault is one transfer's: no request of another user to that daemon may fail.
    """
    ref = publish(rank(world, "p", "evil-p", num_ids, FIRST), num_ids)
    pull_last(rank(world, "d", "evil-d", uid=FIRST), ref, num_ids, num_ids - 1)
    assert num_lost(honest) == 0


# --- the cost of one message


def extend_on_daemon(before: BlocksByGroup, num_tokens: int) -> Callable[[int], None]:
    source = rank(World(), "p", "prefill", num_tokens)
    source.publish("t", [], num_tokens, ready_tokens=0)
    source.say(wk.Ready(transfer_id="t", blocks=before))
    return lambda start: add_blocks(source, start, start + 1)


def extend_on_client(before: BlocksByGroup, num_tokens: int) -> Callable[[int], None]:
    publishes = ClientPublishes(FenceSlots(FENCE_SLOTS), lambda event: None)
    publish = ClientPublish("t", "nonce", 0, before, num_tokens, 1, 1e9, ())
    return lambda start: publishes.add_blocks(
        publish, {"full": PackedBlocks(pack_ids(ids(start, start + 1)))}, 0.0
    )


@pytest.mark.parametrize("extend_on", [extend_on_daemon, extend_on_client], ids=["daemon", "client"])
def test_blocks_that_are_added_cost_no_copy_of_the_list(extend_on):
    """A user adds blocks to a long list one at a time, in frames of 145 bytes.

    With a copy of a list of 55 MiB others waited 58 ms for each frame. Sixteen may together copy it twice:
    once into a form that can grow, and once where that has to move. The client is bound alike.
    """
    num_ids, num_added = 8 * IDS_PER_MIB, 16
    before = {"full": PackedBlocks(pack_ids(ids(0, num_ids)))}
    extend, copied = extend_on(before, num_ids + num_added + 1), 0
    tracemalloc.start()
    try:
        for start in range(num_ids, num_ids + num_added):
            tracemalloc.reset_peak()
            held, _ = tracemalloc.get_traced_memory()
            extend(start)
            copied += tracemalloc.get_traced_memory()[1] - held
    finally:
        tracemalloc.stop()
    assert copied <= 2 * 4 * num_ids


def test_the_pieces_of_a_pull_do_not_each_carry_the_whole_list(world, monkeypatch):
    """A user pulls the last blocks of a long transfer, which become ready one by one.

    With all ids of 15 MiB a piece took 40 ms of both loops. Each needs those of its own tokens.
    """
    monkeypatch.setattr("kvxferd.core.sink.pull.MIN_PIECE_BYTES", 1)
    num_ids, num_pieces = IDS_PER_MIB, 8
    source, sink = rank(world, "p", "prefill", num_ids), rank(world, "d", "decode")
    first = num_ids - num_pieces
    ref = source.publish("t", ids(0, first), num_ids, ready_tokens=first)
    sent = [bytes_per_turn(monkeypatch, worker.host) for worker in (source, sink)]
    ticket = pull_last(sink, ref, num_ids, first, progressive=True)
    for start in range(first, num_ids):
        add_blocks(source, start, start + 1)
    assert is_delivered(sink, ticket), "the pull was lost"
    assert sink.pieces_read == list(range(first + 1, num_ids + 1)), "the pull had other pieces"
    assert sum(map(sum, sent)) <= 4 * num_ids


def test_a_manifest_is_encoded_once_however_often_it_is_requested(world, monkeypatch):
    """A peer asks for an engine of thousands of tensors again and again: 128 times took 5 s of the loop."""
    source, *_ = world.engine(world.host("p"), "large", pp=2, layers=2)
    request = ManifestRequest(request=1, engine_id="large", generation="g1", wait_s=1.0, pp_aware=True)
    monkeypatch.setattr("kvxferd.core.ranks.rank.encode", lambda part: pytest.fail("encoded again"))
    for number in range(3):
        (effect,) = source.host.decide(ev.PeerRequest(b"d", msgspec.structs.replace(request, request=number)))
        assert all(isinstance(rank, msgspec.Raw) for rank in effect.message.ranks)


class Counted(int):
    """A ticket that counts how often it is compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.num_compared += 1
        return int(self) == other

    __hash__ = int.__hash__


@pytest.mark.parametrize("num_pulls", [1, 64])
def test_noticed_costs_its_tickets_and_not_pulls_times_tickets(source, sink, num_pulls: int) -> None:
    mover_of(sink).hold = True
    tickets = [sink.pull(source.publish(f"t{n}", IDS, TOKENS), SINK_IDS, TOKENS) for n in range(num_pulls)]
    Counted.num_compared = 0
    strange = tuple(Counted(n) for n in range(10_000, 10_000 + MAX_DELIVERED_BY_MOVER - num_pulls))
    sink.say(wk.DeliveredByMover(tickets=(*strange, *map(Counted, tickets))))  # type: ignore[arg-type]
    assert Counted.num_compared <= 4 * MAX_DELIVERED_BY_MOVER
    mover_of(sink).die()
    assert all(isinstance(sink.ended(ticket), wk.TicketDelivered | None) for ticket in tickets)


def test_more_tickets_than_there_can_be_pulls_end_the_session(sink: Worker) -> None:
    sink.say(wk.DeliveredByMover(tickets=tuple(range(MAX_DELIVERED_BY_MOVER + 1))))  # type: ignore[arg-type]
    assert [m.code for m in sink.received(wk.Farewell)] == [Code.BAD_FRAME]


@pytest.mark.parametrize("kind", ["groups", "incarnations"])
def test_a_list_longer_than_it_may_be_is_not_decoded(kind: str) -> None:
    """A frame has room for 209,000 incarnations, which take 230 ms."""
    named = ((Rank(0, 0), Incarnation("i")),) * (MAX_RANKS + 1 if kind == "incarnations" else 1)
    names = range(MAX_GROUPS_PER_REQUEST + 1 if kind == "groups" else 1)
    publish = wk.Publish(
        transfer_id="t",
        nonce="n",
        blocks={f"g{n}": PackedBlocks(b"") for n in names},
        num_tokens=1,
        fence_slot=0,
        incarnations=named,
    )
    with pytest.raises(ProtocolError, match="length <="):
        CLIENT_MESSAGES.decode(encode(publish))


def test_what_was_wrongly_exported_is_said_in_short(world: World, sink: Worker) -> None:
    worker = world.connect(sink.host)
    regions = tuple(wk.RegionExport(f"{number:0200}", 1) for number in range(MAX_REGIONS))
    worker.say(wk.Register(1, sink.spec, sink.layout, regions, Incarnation("i")))
    (refused,) = worker.received(wk.Refused)
    assert refused.code is Code.REGION_INVALID
    assert len(refused.message) <= MAX_SENTENCE_CHARS
