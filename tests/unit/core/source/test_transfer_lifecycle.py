"""One transfer from publish to release, and each way in which it can end otherwise."""

from __future__ import annotations

import pytest

from kvxferd.core import Settings
from kvxferd.core.limits.table import ENDED_TRANSFERS, RETRY_LATER_S
from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from kvxferd.wire.common import TransferRef
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Worker, delivers, mover_of


@pytest.fixture
def ref(source: Worker) -> TransferRef:
    """A transfer that the source has published."""
    return source.publish("t1", IDS, TOKENS)


def test_a_pull_delivers_the_published_bytes_and_releases_the_source(source, sink, ref):
    """Its fence word is overwritten before anybody is told."""
    word = bytes(source.fence[:16])
    assert sink.reads(ref)
    assert sink.num_wrong(SINK_IDS, TOKENS, seed=1) == 0
    assert source.received(wk.Released) == [wk.Released(transfer_id="t1", why=Code.COMPLETED)]
    assert bytes(source.fence[:16]) != word


def test_a_released_transfer_is_not_taken_again(source, ref):
    """Its session had replayed it on a new connection before the end of the old one was noticed."""
    source.say(wk.Unpublish(transfer_id="t1"))
    source.publish("t1", IDS, TOKENS, nonce=ref.nonce)
    assert [refused.code for refused in source.received(wk.PublishRefused)] == [Code.RELEASED]
    source.publish("t1", IDS, TOKENS)  # another transfer of that id
    assert source.received(wk.PublishRefused)[-1].code is Code.TRANSFER_EXISTS


def test_a_publish_that_overtakes_the_end_of_its_clients_former_connection_is_released(world, source):
    """The client sends it again on the new one. Were it refused as published already, it would live on."""
    again = world.attach(source.host, source.spec)
    source.publish("t1", IDS, TOKENS, nonce="1" * 32)
    word = source.fence[:16]
    again.publish("t1", IDS, TOKENS, nonce="1" * 32)
    assert again.received(wk.PublishRefused)[-1].code is Code.RELEASED
    assert [released.why for released in source.received(wk.Released)] == [Code.PUBLISHER_GONE]
    assert source.fence[:16] != word
    again.publish("t1", IDS, TOKENS, nonce="2" * 32)
    assert again.received(wk.PublishRefused)[-1].code is Code.TRANSFER_EXISTS


def test_a_release_during_the_read_fails_the_pull_though_its_bytes_arrived(source, sink, ref):
    mover = mover_of(sink)
    mover.hold = True
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    mover.copy()
    source.say(wk.Unpublish(transfer_id="t1"))
    source.fill(IDS, TOKENS, seed=2)  # the engine reuses its blocks at once
    mover.finish()
    failed = sink.ended(ticket)
    assert failed.code is Code.RELEASED
    assert failed.safe_to_reuse


def test_every_rank_of_a_sink_must_acknowledge_before_the_release(world, source):
    sinks = world.engine(world.host("d"), "decode", tp=2)
    source.fill(IDS, TOKENS, seed=1)
    ref = source.publish("t1", IDS, TOKENS)
    for sink in sinks:
        assert not source.received(wk.Released)
        assert sink.reads(ref)
        assert sink.num_wrong(SINK_IDS, TOKENS, seed=1) == 0
    assert [m.why for m in source.received(wk.Released)] == [Code.COMPLETED]


def test_the_same_rank_pulling_twice_is_one_acknowledgement(source, sink):
    ref = source.publish("t1", IDS, TOKENS, num_readers=2)
    for _ in range(2):
        assert sink.reads(ref)
    assert not source.received(wk.Released)


def test_a_scheduler_without_memory_publishes_for_ranks_that_are_ready_by_themselves(world, sink):
    host = world.host("p")
    rank = world.engine(host, "prefill", publish_implies_ready=True)[0]
    scheduler = world.attach(host, rank.spec)
    rank.fill(IDS, TOKENS, seed=1)
    ref = scheduler.publish("t1", IDS, TOKENS)
    assert sink.reads(ref)
    assert [m.why for m in scheduler.received(wk.Released)] == [Code.COMPLETED]
    assert [m.why for m in rank.received(wk.Released)] == [Code.COMPLETED]


def test_a_lease_that_nobody_reads_expires_and_not_before(world, source, ref):
    world.advance(29.9)
    assert not source.received(wk.Released)
    world.advance(0.2)
    assert [m.why for m in source.received(wk.Released)] == [Code.LEASE_EXPIRED]


def test_a_delivery_to_one_of_two_readers_renews_no_lease(world, source, sink):
    ref = source.publish("t1", IDS, TOKENS, num_readers=2)
    world.advance(20.0)
    assert sink.reads(ref)
    world.advance(9.9)
    assert not source.received(wk.Released)
    world.advance(0.2)
    assert [m.why for m in source.received(wk.Released)] == [Code.LEASE_EXPIRED]


def test_a_grant_of_a_reader_that_is_gone_ends_while_another_reads(world, source, sink):
    """Until then the source's movers poll for it, and its share of the peer's grants is taken."""
    ref = source.publish("t1", IDS, TOKENS, num_readers=2)
    other = world.engine(world.host("e"), "decode-2")[0]
    sink.say(wk.Prepare(ref=ref))
    other.say(wk.Prepare(ref=ref))
    (transfer,) = source.host.node.published.table.live.values()
    of_sink, _ = transfer.grants
    world.cut |= {("e", "p"), ("p", "e")}
    world.advance(Settings().transfer.lease_s + 0.1)
    assert list(transfer.grants) == [of_sink]
    assert not source.received(wk.Released)


def test_a_transfer_that_has_ended_is_not_ended_again(source, ref):
    """Its slot may hold the word of the next transfer."""
    node = source.host.node
    (transfer,) = node.published.table.live.values()
    source.say(wk.Unpublish(transfer_id=transfer.transfer_id))
    with pytest.raises(KeyError):
        node.published.release(transfer, Code.CANCELLED)
    assert not node.context.pop_effects()


def test_a_prepared_pull_asks_nobody_anything_before_it_reads(world, sink, ref):
    sink.say(wk.Prepare(ref=ref))
    world.hold_network = True
    assert sink.reads(ref)


def test_what_is_prepared_outlives_its_lease_for_as_long_as_a_grant_may_be_renewed(world, source, sink, ref):
    sink.say(wk.Prepare(ref=ref))
    world.advance(Settings().transfer.max_hold_s - Settings().transfer.lease_s)
    assert not source.received(wk.Released)
    assert isinstance(sink.ended(sink.pull(ref, SINK_IDS, TOKENS)), wk.TicketDelivered)


def test_abandoning_releases_the_source_before_its_lease_ends(source, sink, ref):
    sink.say(wk.Prepare(ref=ref))
    sink.say(wk.Abandon(ref=ref))
    assert [m.why for m in source.received(wk.Released)] == [Code.ABANDONED]


@pytest.mark.parametrize("dies", [True, False], ids=["its worker is gone", "its pull fails"])
def test_a_reader_that_fails_after_the_lease_leaves_time_for_another(world, source, sink, ref, dies):
    """The request waited there for longer than the lease; its router sends it to another engine."""
    sink.say(wk.Prepare(ref=ref))
    world.advance(3 * Settings().transfer.lease_s)
    if dies:
        sink.close()
    else:
        mover = mover_of(sink)
        mover.hold = True
        ticket = sink.pull(ref, SINK_IDS, TOKENS)
        sink.say(wk.Cancel(ticket=ticket))
        mover.die()
        assert isinstance(sink.ended(ticket), wk.TicketFailed)
    world.advance(Settings().transfer.lease_s - 0.1)
    assert not source.received(wk.Released)
    assert world.engine(world.host("e"), "decode-2")[0].reads(ref)
    assert [m.why for m in source.received(wk.Released)] == [Code.COMPLETED]


def test_the_operator_sees_who_holds_a_transfer_and_for_how_long(world, source, sink, ref):
    sink.say(wk.Prepare(ref=ref))
    world.advance(40)
    (shown,) = source.host.node.snapshot().transfers
    (holder,) = shown.holders
    assert (holder.engine_id, holder.peer, holder.num_grants) == ("decode", "tcp://d:9441", 1)
    assert holder.held_s == pytest.approx(40.0)
    sink.say(wk.Abandon(ref=ref))
    assert not source.host.node.snapshot().transfers


@pytest.mark.parametrize("lease_s", [float("nan"), float("inf"), -1.0, 1e6])
def test_a_lease_that_is_none_is_refused(source, lease_s):
    source.publish("t1", IDS, TOKENS, lease_s=lease_s)
    assert [m.code for m in source.received(wk.PublishRefused)] == [Code.BAD_REQUEST]


def test_the_publishers_death_voids_what_it_published(world, source, sink, ref):
    word = bytes(source.fence[:16])
    source.close()
    assert bytes(source.fence[:16]) != word
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    world.advance(2)
    assert sink.ended(ticket).code in (Code.RELEASED, Code.ENGINE_UNKNOWN)


def test_an_id_may_be_published_again_once_it_is_forgotten_and_the_old_reference_is_void(
    world, source, sink, ref
):
    source.say(wk.Unpublish(transfer_id="t1"))
    world.advance(source.host.node.context.settings.tombstone_s + 1)
    new = source.publish("t1", IDS, TOKENS)
    assert sink.ended(sink.pull(ref, SINK_IDS, TOKENS)).code is Code.NONCE_WRONG
    assert sink.reads(new)


def test_a_new_generation_ends_new_grants_of_the_old_and_no_live_one(world, sink, ref):
    sink.say(wk.Prepare(ref=ref))
    world.engine(world.hosts["p"], "prefill", generation="g2")
    other = world.engine(world.hosts["d"], "decode-2")[0]
    assert other.ended(other.pull(ref, SINK_IDS, TOKENS)).code is Code.GENERATION_STALE
    assert sink.reads(ref)


def test_a_source_mover_that_dies_is_replaced_and_the_transfer_still_readable(world, source, sink, ref):
    assert delivers(source, sink, "t0")
    mover_of(source).die()
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    world.advance(1)
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert len(source.received(wk.MoverChanged)) == 1
    assert sink.num_wrong(SINK_IDS, TOKENS, seed=1) == 0


# --- what is remembered of transfers that have ended


def test_an_ended_transfer_is_remembered_for_as_long_as_messages_about_it_are_repeated(world, source) -> None:
    node = source.host.node
    node.context.ledger[ENDED_TRANSFERS].limit = 16

    def publish(numbers: range) -> None:
        for number in numbers:
            source.publish(f"t{number}", IDS, TOKENS)
            source.say(wk.Unpublish(transfer_id=f"t{number}"))

    publish(range(15))
    (refused,) = source.received(wk.PublishRefused)
    assert (refused.transfer_id, refused.code, refused.retry_after_s) == ("t14", Code.BUSY, RETRY_LATER_S)
    world.advance(2 * node.context.settings.acknowledge_for_s)
    publish(range(15, 18))
    assert len(source.received(wk.PublishRefused)) == 1
    assert [name for _, name in node.published.ended] == [f"t{n}" for n in (*range(3, 14), 15, 16, 17)]
    world.advance(node.context.settings.tombstone_s)
    assert not len(node.published.ended)
    assert node.context.ledger[ENDED_TRANSFERS].held == 0
