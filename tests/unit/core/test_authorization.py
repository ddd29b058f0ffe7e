"""One rank, one user, one session: nobody ends, completes or replaces what is another's."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from tests.support.simulation import IDS, SINK_IDS, TOKENS, spec_of


def test_a_rank_of_another_engine_can_neither_complete_nor_end_a_transfer(world):
    host = world.host("p")
    first, second = world.engine(host, "prefill", tp=2)
    stranger = world.engine(host, "stranger", tp=2)[1]
    sink = world.engine(world.host("d"), "decode")[0]
    ref = first.publish("t1", IDS, TOKENS)
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    stranger.ready("t1")
    stranger.say(wk.Unpublish(transfer_id="t1"))
    assert sink.ended(ticket) is None
    assert not first.received(wk.Released)
    second.ready("t1")
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)


def test_a_rank_says_ready_for_itself_alone(world):
    first, second, third = world.engine(world.host("p"), "prefill", tp=3)
    sink = world.engine(world.host("d"), "decode")[0]
    ticket = sink.pull(first.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    for _ in range(3):
        second.ready("t1")
    assert sink.ended(ticket) is None
    third.ready("t1")
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)


def test_only_the_publishing_session_takes_a_transfer_back(world):
    first, second = world.engine(world.host("p"), "prefill", tp=2)
    first.publish("t1", IDS, TOKENS)
    second.say(wk.Unpublish(transfer_id="t1"))
    assert not first.received(wk.Released)
    assert not second.received(wk.Released)
    first.say(wk.Unpublish(transfer_id="t1"))
    assert [m.why for m in second.received(wk.Released)] == [Code.UNPUBLISHED]


def test_only_the_rank_whose_ticket_it_is_cancels_a_pull(world):
    source = world.engine(world.host("p"), "prefill")[0]
    first, second = world.engine(world.host("d"), "decode", tp=2)
    ref = source.publish("t1", IDS, TOKENS)
    world.hold_network = True
    ticket = first.pull(ref, SINK_IDS, TOKENS)
    second.say(wk.Cancel(ticket=ticket))
    assert first.ended(ticket) is None
    assert second.inbox[-1] is not first.inbox[-1]
    first.say(wk.Cancel(ticket=ticket))
    assert first.ended(ticket).code is Code.CANCELLED
    assert second.ended(ticket) is None


def test_a_reference_without_its_nonce_reads_and_ends_nothing(world):
    source = world.engine(world.host("p"), "prefill")[0]
    sink = world.engine(world.host("d"), "decode")[0]
    ref = source.publish("t1", IDS, TOKENS)
    guessed = msgspec.structs.replace(ref, nonce="0" * 32)
    sink.say(wk.Abandon(ref=guessed))
    assert sink.ended(sink.pull(guessed, SINK_IDS, TOKENS)).code is Code.NONCE_WRONG
    assert not source.received(wk.Released)
    assert sink.reads(ref)


# --- users


@pytest.mark.parametrize("generation", ["g1", "g2"])
@pytest.mark.parametrize(("uid", "allowed"), [(1000, True), (0, True), (1001, False)])
def test_an_engine_is_its_users(world, uid, allowed, generation):
    host = world.host("p")
    owner = world.register(host, spec_of("prefill", tp=2), uid=1000)
    assert owner.received(wk.Registered)
    other = msgspec.structs.replace(spec_of("prefill", tp=2, generation=generation), tp_rank=1)
    second = world.register(host, other, uid=uid)
    assert bool(second.received(wk.Registered)) is allowed
    publisher = world.connect(host, uid)
    publisher.say(wk.Attach(request=5, engine_id="prefill", generation=generation))
    assert bool(publisher.received(wk.Registered)) is allowed
    if not allowed:
        assert {m.code for m in second.received(wk.Refused) + publisher.received(wk.Refused)} == {
            Code.NOT_ALLOWED
        }
        assert not host.node.registry.is_superseded(owner.spec.key)
        owner.close()
        world.advance(world.settings.ownership_s + 1)
        world.register_again(second)
        assert second.received(wk.Registered)


def test_who_attached_before_the_ranks_came_still_cannot_publish_for_another_user(world):
    host = world.host("p")
    early = world.connect(host, 1001)
    early.spec = spec_of("prefill")
    early.say(wk.Attach(request=5, engine_id="prefill", generation="g1"))
    owner = world.register(host, spec_of("prefill"), uid=1000)
    early.publish("t1", IDS, TOKENS)
    assert "another user" in early.received(wk.PublishRefused)[0].message
    owner.publish("t1", IDS, TOKENS)
    assert not owner.received(wk.PublishRefused)
