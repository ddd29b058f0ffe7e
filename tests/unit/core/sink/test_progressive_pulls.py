"""Pulls that read a transfer while its ranks write it: nothing that is not ready is ever delivered."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvxferd.core import events as ev
from kvxferd.core.effects import SendToPeer
from kvxferd.core.source import grants
from kvxferd.core.source.transfer_table import Transfer
from kvxferd.errors import Code
from kvxferd.layout import Group, PackedBlocks, pack_ids
from kvxferd.layout.presets import attention_layout
from kvxferd.records import PullRecord, ReleaseRecord
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES
from kvxferd.wire.common import TransferRef
from kvxferd.wire.peer import Consumer, GrantReply, GrantRequest, ReleaseGrant
from tests.support.simulation import Worker, World, mover_of, spec_of

DELIVERED_BOTH_WAYS = True
BLOCK_TOKENS = 4
SOURCE_IDS, SINK_IDS, TOKENS = [3, 1, 2, 8, 5], [7, 9, 4, 11, 12], 19
SEED = 1


@pytest.fixture(autouse=True)
def read_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every block for worth a read of its own."""
    monkeypatch.setattr("kvxferd.core.sink.pull.MIN_PIECE_BYTES", 1)


@pytest.fixture
def source(world: World) -> Worker:
    """A source whose memory holds nothing yet."""
    return world.engine(world.host("p"), "prefill")[0]


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def write(worker: Worker, tokens: int) -> None:
    worker.fill(SOURCE_IDS, tokens, SEED)


def publish(source: Worker, ready: int = 0, transfer_id: str = "t1", **more: object) -> TransferRef:
    """Publish the blocks of the tokens that are ready."""
    write(source, ready)
    return source.publish(transfer_id, SOURCE_IDS[: blocks_of(ready)], TOKENS, ready_tokens=ready, **more)


def extend(source: Worker, before: int, ready: int, transfer_id: str = "t1") -> None:
    """Write up to `ready` tokens, and report them with the blocks that they add."""
    write(source, ready)
    added = SOURCE_IDS[blocks_of(before) : blocks_of(ready)]
    report = -1 if ready == TOKENS else ready
    if added:
        say_extend(source, added, report, transfer_id)
    else:
        source.ready(transfer_id, report)


def say_extend(source: Worker, ids: list[int], ready: int, transfer_id: str = "t1") -> None:
    """Send blocks with a report of so many tokens, as a rank does that publishes."""
    blocks = {"full": PackedBlocks(pack_ids(ids))}
    extended = wk.Ready(
        transfer_id=transfer_id, blocks=blocks, incarnation=source.incarnation, ready_tokens=ready
    )
    source.say(extended)


def pull(sink: Worker, ref: TransferRef, deadline_s: float = 30.0, first: int = 0, **more: object) -> int:
    ticket = next(sink.tickets)
    blocks = {"full": PackedBlocks(pack_ids(SINK_IDS[first // BLOCK_TOKENS :]), first)}
    request = wk.PullRequest(
        ticket=ticket, ref=ref, blocks=blocks, num_tokens=TOKENS, deadline_s=deadline_s, progressive=True
    )
    sink.say(msgspec.structs.replace(request, **more))
    return ticket


def end_grant(source: Worker) -> Transfer:
    """Have the source end its only grant, and return the transfer that it is on."""
    published = source.host.node.published
    (transfer,) = published.table.live.values()
    (grant,) = transfer.grants
    published.end_grant(grant)
    return transfer


def progress_of(sink: Worker) -> list[int]:
    """Return up to which tokens each piece was read, but the last."""
    return [tokens for tokens in sink.pieces_read if tokens != TOKENS]


def check_delivered(sink: Worker, ticket: int) -> None:
    assert isinstance(sink.ended(ticket), wk.TicketDelivered), sink.ended(ticket)
    assert sink.num_wrong(SINK_IDS, TOKENS, SEED) == 0


def test_what_is_ready_is_read_and_then_the_rest(world, source, sink):
    ref = publish(source, ready=5)
    ticket = pull(sink, ref)
    assert progress_of(sink) == [4]  # whole blocks
    assert sink.ended(ticket) is None
    assert sink.num_wrong(SINK_IDS, 4, SEED) == 0
    extend(source, 5, 13)
    assert progress_of(sink) == [4, 12]
    extend(source, 13, TOKENS)
    check_delivered(sink, ticket)
    world.advance(1)
    assert source.received(wk.Released)[0].why is Code.COMPLETED
    assert world.hosts["p"].node.is_idle
    assert sink.host.node.is_idle


def test_the_reader_may_come_before_the_transfer(world, source, sink):
    ticket = pull(sink, unpublished(source))
    world.advance(20)  # longer than anything but a deadline
    assert sink.ended(ticket) is None
    publish(source, ready=0, nonce="n" * 32)
    extend(source, 0, 8)
    assert progress_of(sink) == [8]
    extend(source, 8, TOKENS)
    check_delivered(sink, ticket)


def test_a_transfer_that_never_comes_is_waited_for_as_long_as_a_grant_may_be_held(world, source, sink):
    """It may be in its prefill engine's queue: that is not the pull's time."""
    ticket = pull(sink, unpublished(source), deadline_s=5.0)
    world.advance(world.settings.transfer.max_hold_s - 1)
    assert sink.ended(ticket) is None
    world.advance(1.1)
    failed = sink.ended(ticket)
    assert (failed.code, failed.safe_to_reuse) == (Code.DEADLINE, True)
    assert "it was not ready within 600.0 s (transfer.max_hold_s)" in failed.message
    world.advance(10)
    assert world.hosts["p"].node.is_idle
    assert sink.host.node.is_idle


def test_a_prefill_may_take_longer_than_the_deadline(world, source, sink):
    """The pull's time runs from when all is ready."""
    mover = mover_of(sink)
    ticket = pull(sink, publish(source, ready=0, lease_s=8.0), deadline_s=5.0)
    for ready in (4, 8, 12, 16):
        world.advance(7)
        extend(source, ready - 4, ready)
        assert progress_of(sink)[-1] == ready
    mover.hold = True
    extend(source, 16, TOKENS)
    world.advance(4.9)
    assert sink.ended(ticket) is None
    world.advance(0.2)
    assert "its deadline of 5.0 s passed while it was read" in sink.ended(ticket).message


def test_a_prefill_that_stops_ends_the_pull_with_the_lease(world, source, sink):
    """Reports that are repeated are no progress, and a reader's grant keeps nothing that is not written."""
    ticket = pull(sink, publish(source, ready=8, lease_s=8.0), deadline_s=5.0)
    world.advance(4.0)
    source.ready("t1", 8)
    world.advance(3.9)
    assert sink.ended(ticket) is None
    world.advance(0.2)
    failed = sink.ended(ticket)
    assert (failed.code, failed.safe_to_reuse) == (Code.LEASE_EXPIRED, True)
    assert "its engine reported no more tokens" in failed.message
    assert source.received(wk.Released)[0].why is Code.LEASE_EXPIRED
    world.advance(10)
    assert world.hosts["p"].node.is_idle
    assert sink.host.node.is_idle


def test_no_reader_gets_what_one_rank_has_not_written(world, sink):
    ranks = world.engine(world.host("p"), "prefill", tp=2)
    for rank in ranks:
        write(rank, 8)
    ref = ranks[0].publish("t1", SOURCE_IDS, TOKENS, ready_tokens=8)
    ticket = pull(sink, ref)
    assert progress_of(sink) == []
    ranks[1].ready("t1", 4)
    assert progress_of(sink) == [4]
    for rank in ranks:
        write(rank, TOKENS)
        rank.ready("t1")
    check_delivered(sink, ticket)


def test_more_tokens_than_blocks_are_not_read(world, source, sink):
    ticket = pull(sink, publish(source, ready=8))
    write(source, 16)
    source.ready("t1", 16)
    assert progress_of(sink) == [8]
    source.say(wk.Ready(transfer_id="t1", blocks={"full": PackedBlocks(pack_ids(SOURCE_IDS[2:4]))}))
    assert progress_of(sink) == [8, 16]
    assert sink.ended(ticket) is None


def test_a_window_may_be_left_out_until_the_end(world):
    """Until then the source has no list of that group: its pieces read nothing of it."""
    source, sink = (with_window(world, host, name) for host, name in (("p", "prefill"), ("d", "decode")))
    ticket = pull(sink, publish(source, ready=8), blocks=both(SINK_IDS))
    assert progress_of(sink) == [8]
    write(source, TOKENS)
    rest = both(SOURCE_IDS) | {"full": PackedBlocks(pack_ids(SOURCE_IDS[2:]))}
    source.say(wk.Ready(transfer_id="t1", blocks=rest, incarnation=source.incarnation))
    check_delivered(sink, ticket)


def with_window(world: World, host: str, name: str) -> Worker:
    """An engine whose last layer has a group of its own, with a sliding window."""
    facts = {"num_kv_heads": 2, "head_dim": 2, "block_tokens": BLOCK_TOKENS, "num_blocks": 32}
    plain = attention_layout(spec=spec_of(name), layout="HND", **facts)
    groups = (*plain.groups, Group("window", 32, BLOCK_TOKENS, sliding_window=TOKENS))
    tensors = tuple(msgspec.structs.replace(t, group=groups[t.layer].name) for t in plain.tensors)
    layout = msgspec.structs.replace(plain, groups=groups, tensors=tensors)
    return world.register_with(world.host(host), spec_of(name), layout)


def both(ids: list[int]) -> dict[str, PackedBlocks]:
    return dict.fromkeys(("full", "window"), PackedBlocks(pack_ids(ids)))


@pytest.mark.parametrize(
    ("blocks", "incarnation", "why"),
    [
        (PackedBlocks(pack_ids(SOURCE_IDS)), "first", Code.BLOCKS_INVALID),
        (PackedBlocks(pack_ids([20, 20])), "first", Code.BLOCKS_INVALID),
        (PackedBlocks(pack_ids([1 << 20])), "first", Code.BLOCKS_INVALID),
        (PackedBlocks(pack_ids([-1])), "first", Code.BLOCKS_INVALID),
        # Appended as they come these would be delivered as the tokens of others.
        (PackedBlocks(pack_ids(SOURCE_IDS[2:]), 4), "first", Code.BLOCKS_INVALID),
        (PackedBlocks(pack_ids(SOURCE_IDS[2:]), 12), "first", Code.BLOCKS_INVALID),
        (PackedBlocks(pack_ids(SOURCE_IDS[2:]), -4), "first", Code.BLOCKS_INVALID),
        (PackedBlocks(pack_ids(SOURCE_IDS[2:])), "before", Code.RANK_LOST),
    ],
    ids=["too many", "twice", "beyond", "negative", "again", "a gap", "negative first", "another mapping"],
)
def test_a_wrong_extension_ends_the_transfer_alone(world, source, sink, blocks, incarnation, why):
    ticket = pull(sink, publish(source, ready=8))
    other = publish(source, ready=8, transfer_id="t2")
    source.say(wk.Ready(transfer_id="t1", blocks={"full": blocks}, incarnation=incarnation))
    assert [(m.transfer_id, m.why) for m in source.received(wk.Released)] == [("t1", why)]
    assert sink.ended(ticket).code is Code.RELEASED
    second = pull(sink, other)
    extend(source, 8, TOKENS, "t2")
    check_delivered(sink, second)


def test_blocks_may_say_at_which_token_they_continue_the_list(world, source, sink):
    ticket = pull(sink, publish(source, ready=8))
    write(source, TOKENS)
    more = PackedBlocks(pack_ids(SOURCE_IDS[2:]), 8)
    source.say(wk.Ready(transfer_id="t1", blocks={"full": more}, incarnation=source.incarnation))
    check_delivered(sink, ticket)


def test_a_block_that_is_in_two_parts_is_found_at_the_end(world, source, sink):
    """Each part is checked by itself, so that a part costs the same at the end of a long list."""
    ticket = pull(sink, publish(source, ready=8))
    first, *_ = SOURCE_IDS
    say_extend(source, [first], ready=12)
    assert progress_of(sink) == [8, 12]
    say_extend(source, SOURCE_IDS[blocks_of(12) :], ready=-1)
    assert [(m.transfer_id, m.why) for m in source.received(wk.Released)] == [("t1", Code.BLOCKS_INVALID)]
    assert sink.ended(ticket).code is Code.RELEASED


@pytest.mark.parametrize("ready", [-2, TOKENS + 1])
def test_a_publish_with_an_impossible_number_is_refused(world, source, ready):
    source.publish("t1", SOURCE_IDS, TOKENS, ready_tokens=ready)
    (refused,) = source.received(wk.PublishRefused)
    assert refused.code is Code.BLOCKS_INVALID


def test_a_source_that_answers_without_progress_fails_that_pull(world, source, sink, monkeypatch):
    """Else two daemons would ask and answer without an end."""
    ref = publish(source, ready=8)
    monkeypatch.setattr("kvxferd.core.source.grants.GrantServer._is_readable", lambda *_: True)
    ticket = pull(sink, ref)
    assert progress_of(sink) == [8]
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (Code.BAD_FRAME, True)


def test_an_extension_replaces_no_block_that_may_have_been_read(world, source, sink):
    ticket = pull(sink, publish(source, ready=8))
    other = PackedBlocks(pack_ids([20, 21]), state_at=TOKENS)  # as a state's list would
    source.say(wk.Ready(transfer_id="t1", blocks={"full": other}))
    (transfer,) = world.hosts["p"].node.published.table.live.values()
    assert transfer.blocks["full"].ids == pack_ids([*SOURCE_IDS[:2], 20, 21])
    assert sink.ended(ticket) is None


def test_extensions_of_nothing_change_nothing(world, source, sink):
    source.say(wk.Ready(transfer_id="t9", blocks={"full": PackedBlocks(pack_ids([1]))}))
    other = world.engine(world.host("q"), "other")[0]
    ticket = pull(sink, publish(source, ready=8))
    other.say(wk.Ready(transfer_id="t1", blocks={"full": PackedBlocks(pack_ids([1]))}))
    extend(source, 8, TOKENS)
    check_delivered(sink, ticket)


def test_what_is_published_with_all_tokens_ready_is_whole_once_its_rank_says_so(world, source, sink):
    """States, which no token counts, may come behind the tokens."""
    ticket = sink.pull(publish(source, ready=TOKENS), SINK_IDS, TOKENS)
    assert sink.ended(ticket) is None
    source.ready("t1")
    check_delivered(sink, ticket)


def test_a_piece_that_is_there_at_the_deadline_is_the_last_that_is_read(world, source, sink):
    mover = mover_of(sink)
    mover.hold = True
    ticket = pull(sink, publish(source, ready=8), deadline_s=2.0)
    extend(source, 8, TOKENS)
    world.advance(2.0)
    mover.work()
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (Code.DEADLINE, True)
    assert not mover.started  # no other piece


def test_what_became_ready_while_a_piece_was_read_is_read_at_once(world, source, sink):
    """The reader asks ahead: no message goes between two pieces that are ready."""
    mover = mover_of(sink)
    mover.hold = True
    ticket = pull(sink, publish(source, ready=8))
    extend(source, 8, 16)
    world.hold_network = True
    mover.work()
    assert progress_of(sink) == [8]
    assert mover.started[-1].num_tokens == 16
    mover.work()
    assert progress_of(sink) == [8, 16]
    mover.hold, world.hold_network = False, False
    extend(source, 16, TOKENS)
    check_delivered(sink, ticket)


def test_a_mover_that_dies_with_a_piece_leaves_those_before(world, source, sink):
    ticket = pull(sink, publish(source, ready=8))
    mover = mover_of(sink)
    mover.hold = True
    extend(source, 8, 16)
    mover.die()
    world.advance(1)
    assert progress_of(sink) == [8, 16]  # the next mover has read on
    extend(source, 16, TOKENS)
    check_delivered(sink, ticket)


def test_a_piece_that_is_there_while_its_rank_is_suspended_is_the_last(world, source, sink):
    mover = mover_of(sink)
    mover.hold = True
    ticket = pull(sink, publish(source, ready=8))
    read = mv.PullOutcome(delivered=True, bytes=1, runs=1)
    mover.last_report = mv.PullDone(pull=mover.started[-1].pull, outcome=read)
    sink.say(wk.Suspend())
    assert sink.received(wk.Suspended)
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (Code.SUSPENDED, True)
    assert not sink.host.node.pulls.running()


def test_a_source_whose_mover_is_replaced_is_read_on_through_the_new_one(world, source, sink):
    ticket = pull(sink, publish(source, ready=8))
    mover_of(source).die()
    extend(source, 8, TOKENS)
    world.advance(3)
    check_delivered(sink, ticket)
    assert record_of(sink).retried


def test_pieces_of_an_earlier_publish_are_read_anew(world, source, sink):
    """The source's daemon and memory are new, and its engine publishes the same request again."""
    ref = publish(source, ready=8)
    ticket = pull(sink, ref)
    assert progress_of(sink) == [8]
    del world.hosts["p"]
    again = world.engine(world.host("p"), "prefill")[0]
    again.fill(SOURCE_IDS, 12, seed=2)
    again.publish("t1", SOURCE_IDS, TOKENS, ready_tokens=12, nonce=ref.nonce)
    world.advance(3)
    again.fill(SOURCE_IDS, TOKENS, seed=2)
    again.ready("t1")
    world.advance(1)
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert sink.num_wrong(SINK_IDS, TOKENS, 2) == 0


def test_what_the_reader_has_already_is_not_read(world, source, sink):
    sink.fill(SINK_IDS, 8, SEED)
    mover = mover_of(sink)
    mover.hold = True
    ticket = pull(sink, publish(source, ready=6), first=8)
    assert not mover.started
    extend(source, 6, 14)
    (piece,) = mover.started
    assert (piece.local["full"].first_token, piece.num_tokens, piece.ticket) == (8, 12, None)
    mover.hold = False
    mover.work()
    extend(source, 14, TOKENS)
    check_delivered(sink, ticket)


def test_a_full_prefix_hit_reads_nothing(world, source, sink):
    ticket = pull(sink, publish(source, ready=1), blocks={"full": PackedBlocks(b"")})
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)


@pytest.mark.parametrize("is_read", [True, False], ids=["between pieces", "before the publish"])
def test_a_source_that_dies_ends_the_pull_long_before_its_deadline(world, source, sink, is_read):
    ref = publish(source, ready=8, lease_s=60.0) if is_read else unpublished(source)
    ticket = pull(sink, ref)
    world.advance(40)  # far longer than a peer may be silent
    assert sink.ended(ticket) is None
    del world.hosts["p"]
    world.advance(world.settings.peer.silent_after_s + world.settings.peer.request_timeout_s)
    failed = sink.ended(ticket)
    assert (failed.code, failed.safe_to_reuse) == (Code.PEER_UNREACHABLE, True)
    assert "tcp://p:9441" in failed.message
    world.advance(30)
    assert sink.host.node.is_idle


def test_a_peer_that_keeps_a_request_too_long_is_not_taken_for_silent(world, source, sink):
    """Its other requests go on, and what was learnt of it stays."""
    node, replies = sink.host.node, []
    settle = node.peers.request_settled
    node.peers.request_settled = lambda asked, reply: [settle(asked, reply), replies.append(reply)]
    held = GrantRequest(
        request=node.peer_requests.next_id(),
        grant="waits",
        ref=unpublished(source),
        consumer=Consumer(sink.spec.engine_id, sink.spec.generation, sink.spec.rank, 1),
        reads=(),
        wait_s=60.0,
        after_tokens=0,
    )
    node.peers.request(source.host.endpoint, held, 7.0, 0, waits=True)
    world.advance(0.0)  # it greets the peer
    world.advance(7.1)
    assert [(reply.code, "cannot wait longer" in reply.message) for reply in replies[1:]] == [
        (Code.DEADLINE, True)
    ]
    assert [peer.state for peer in sink.host.node.snapshot().peers] == ["up"]


def unpublished(source: Worker, transfer_id: str = "t1") -> TransferRef:
    """Return a reference that its router made before the publish."""
    return TransferRef(source.host.endpoint, "prefill", source.spec.generation, transfer_id, "n" * 32)


@pytest.mark.parametrize("seed", range(40))
def test_any_chunks_in_any_order_are_delivered_once_and_whole(world, source, sink, seed):
    """Extensions of any size, pulls at any time, messages doubled: what is delivered is right."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, TOKENS), rng.randint(0, 6)))
    ready = cuts[0] if cuts and rng.random() < 0.7 else 0
    ref = publish(source, ready=ready)
    when = rng.randint(0, len(cuts))
    ticket = None
    for index, tokens in enumerate([*(cut for cut in cuts if cut > ready), TOKENS]):
        if index == when or (ticket is None and tokens == TOKENS):
            ticket = pull(sink, ref)
        extend(source, ready, tokens)
        if rng.random() < 0.3:
            source.ready("t1", rng.randint(0, ready))
        ready = tokens
        read = progress_of(sink)
        assert sink.num_wrong(SINK_IDS, read[-1] if read else 0, SEED) == 0
        assert not read or read[-1] <= ready
    check_delivered(sink, ticket)


def test_a_request_that_waits_here_holds_what_is_written_meanwhile(world, source, sink):
    """Its grant is requested before anything is ready, and keeps the transfer once all is."""
    sink.say(wk.Prepare(ref=unpublished(source), progressive=True))
    world.advance(20)
    publish(source, ready=8, nonce="n" * 32, lease_s=8.0)
    extend(source, 8, TOKENS)
    world.advance(100)
    assert not source.received(wk.Released)
    world.hold_network = True  # the pull has the grant that was prepared
    mover_of(sink).hold = True
    ticket = pull(sink, unpublished(source))
    (piece,) = mover_of(sink).started
    assert piece.num_tokens == 8  # which was ready then
    world.hold_network = False
    mover_of(sink).hold = False
    mover_of(sink).work()
    world.advance(world.settings.peer.request_timeout_s)
    check_delivered(sink, ticket)


def test_what_is_prepared_is_held_no_longer_than_the_prefill_makes_progress(world, source, sink):
    sink.say(wk.Prepare(ref=publish(source, ready=8, lease_s=8.0), progressive=True))
    world.advance(8.1)
    assert source.received(wk.Released)[0].why is Code.LEASE_EXPIRED


@pytest.mark.parametrize("prepared_so", [True, False])
def test_what_is_prepared_for_another_kind_of_pull_is_given_back(world, source, sink, prepared_so):
    ref = publish(source, ready=8)
    sink.say(wk.Prepare(ref=ref, progressive=prepared_so))
    ticket = pull(sink, ref, progressive=not prepared_so)
    assert progress_of(sink) == ([] if prepared_so else [8])
    extend(source, 8, TOKENS)
    check_delivered(sink, ticket)
    world.advance(world.settings.peer.request_timeout_s)
    assert world.hosts["p"].node.is_idle


def record_of(sink: Worker) -> PullRecord:
    """The last pull's."""
    return [record for record in sink.host.records if isinstance(record, PullRecord)][-1]


def read_slowly(world: World, sink: Worker, seconds: float) -> None:
    """Have the sink's mover read the piece that it holds."""
    world.advance(seconds)
    mover_of(sink).work()


def test_a_delivery_counts_every_piece(world, source, sink):
    """The simulated mover reports a byte and a run for each piece."""
    ticket = pull(sink, publish(source, ready=8))
    extend(source, 8, 16)
    mover_of(sink).hold = True
    extend(source, 16, TOKENS)
    assert mover_of(sink).started[-1].before == mv.PiecesRead(bytes=2, runs=2, wire_s=0.0)
    read_slowly(world, sink, 0.5)
    delivered = sink.ended(ticket)
    assert (delivered.bytes, delivered.runs) == (3, 3)
    record = record_of(sink)
    assert (record.bytes, record.runs, record.ways["direct"]) == (3, 3, 3)
    assert (record.progressive, record.hidden_bytes) == (True, 2)
    assert record.handover_s == pytest.approx(0.5)
    (reader,) = [one for one in source.host.records if isinstance(one, ReleaseRecord)][-1].readers
    assert reader.bytes == 3


def test_a_pull_that_failed_hid_nothing_and_was_not_handed_over(world, source, sink):
    mover = mover_of(sink)
    mover.hold = True
    ticket = pull(sink, publish(source, ready=8))
    mover.work()
    extend(source, 8, TOKENS)
    last = mover.started.popleft()
    mover.say(mv.PullDone(pull=last.pull, outcome=mv.PullOutcome(delivered=False, code=Code.REGION_INVALID)))
    assert sink.ended(ticket).code is Code.REGION_INVALID
    record = record_of(sink)
    assert (record.progressive, record.hidden_bytes, record.handover_s) == (True, 0, None)


def test_both_daemons_show_how_far_a_transfer_is(world, source, sink):
    pull(sink, publish(source, ready=9))
    (transfer,) = source.host.node.snapshot().transfers
    assert (transfer.state, transfer.ready_tokens, transfer.num_tokens) == ("granted", 9, TOKENS)
    (running,) = sink.host.node.snapshot().pulls
    shown = (running.progressive, running.tokens_read, running.num_tokens, running.bytes_read)
    assert shown == (True, 8, TOKENS, 1)
    mover_of(sink).hold = True
    extend(source, 9, TOKENS)
    (transfer,) = source.host.node.snapshot().transfers
    assert transfer.ready_tokens == TOKENS


def test_a_pull_that_waits_for_more_says_that_the_peer_is_silent(world, source, sink):
    pull(sink, publish(source, ready=8, lease_s=60.0), deadline_s=30.0)
    world.advance(3)
    (running,) = sink.host.node.snapshot().pulls
    assert (
        running.waits
        == "while engine prefill computed the rest (8 of 19 tokens are read); look at that engine"
    )
    world.hold_network = True
    world.advance(6)
    (running,) = sink.host.node.snapshot().pulls
    assert "had the rest to compute" in running.waits
    assert f"{source.host.endpoint} has sent nothing for" in running.waits


def test_a_pull_that_waits_for_more_says_so_although_its_grant_has_lapsed(world, source, sink):
    """One that was prepared is held at its source for `max_hold_s` before the pull has waited for so long."""
    pull(sink, publish(source, ready=8))
    end_grant(source)
    world.advance(world.settings.transfer.lease_s / 6)  # the next renewal's reply says so
    (running,) = sink.host.node.snapshot().pulls
    assert running.waits.startswith("while engine prefill computed the rest")


def test_a_pull_that_waits_says_for_what(world, source, sink):
    pull(sink, unpublished(source))
    world.advance(10.0)
    (running,) = sink.host.node.snapshot().pulls
    assert "has published none of that id" in running.waits


def test_what_is_given_up_is_not_asked_again(world, source, sink):
    """A deadline and the time to ask again fall into one turn: the question would wait there anew."""
    pull(sink, unpublished(source), deadline_s=world.settings.peer.request_timeout_s - 0.1, progressive=False)
    late = world.now + 2 * world.settings.peer.request_timeout_s
    effects = sink.host.node.feed(ev.Tick(), late)
    sent = [type(effect.message) for effect in effects if isinstance(effect, SendToPeer)]
    assert ReleaseGrant in sent
    assert GrantRequest not in sent


def test_what_was_asked_before_a_retry_does_not_end_the_grant_that_is_asked_for_anew(world, source, sink):
    """They have one name, and the reply to the former request may be on its way."""
    mover_of(sink).hold = True
    ticket = pull(sink, publish(source, ready=8))
    world.hold_network = True
    extend(source, 8, TOKENS)  # the reply to the request for more
    start = mover_of(sink).started.popleft()
    lost = mv.PullOutcome(delivered=False, code=Code.TRANSPORT, message="lost", agent=start.sources[0].agent)
    mover_of(sink).say(mv.PullDone(pull=start.pull, outcome=lost))
    sent = [type(PEER_MESSAGES.decode(envelope.payload)) for envelope in world.network]
    world.arrive(world.network.popleft())
    sent += [type(PEER_MESSAGES.decode(envelope.payload)) for envelope in world.network]
    assert GrantReply in sent
    assert ReleaseGrant not in sent
    world.hold_network = mover_of(sink).hold = False
    world.deliver()
    mover_of(sink).copy()
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert sink.num_wrong(SINK_IDS, TOKENS, SEED) == 0


def test_a_list_of_which_a_page_is_refused_is_not_read(world, source, sink, monkeypatch):
    """All its tokens are ready: what lacks would look like an engine that published too few blocks."""
    ticket = pull(sink, publish(source, ready=4))
    monkeypatch.setattr(grants, "MAX_PAGE_BYTES", 8)
    world.hold_network = True
    extend(source, 4, TOKENS)
    world.arrive(world.network.popleft())  # the first page
    source.say(wk.Unpublish(transfer_id="t1"))
    world.hold_network = False
    world.deliver()
    assert (sink.ended(ticket).code, sink.pieces_read) == (Code.RELEASED, [4])


def test_what_is_granted_anew_for_a_pull_that_has_ended_is_given_back(world, source, sink):
    """Its grant has lapsed while it waited for more, and the source still has the request for that."""
    ticket = pull(sink, publish(source, ready=8))
    transfer = end_grant(source)
    world.advance(world.settings.transfer.lease_s / 6)  # the next renewal's reply says so
    sink.say(wk.Cancel(ticket=ticket))
    assert sink.ended(ticket).code is Code.CANCELLED
    extend(source, 8, 12)
    world.advance(0.5)
    assert not transfer.grants


def test_a_rank_that_sleeps_between_pieces_reads_no_more(world, source, sink):
    ticket = pull(sink, publish(source, ready=8))
    sink.say(wk.Suspend())
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (Code.SUSPENDED, True)
    extend(source, 8, TOKENS)
    assert progress_of(sink) == [8]
