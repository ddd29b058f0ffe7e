"""What a node says when it has enough: `busy`, and when to ask again. Everyone else goes on."""

from __future__ import annotations

import msgspec

from kvxferd.config import LimitsConfig
from kvxferd.core import Settings
from kvxferd.core import events as ev
from kvxferd.core.limits.table import INFLIGHT_BYTES, RETRY_AFTER_S, RETRY_LATER_S, WAITING_BYTES
from kvxferd.core.source.waiting import kept_bytes
from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from kvxferd.wire.peer import ManifestReply, ManifestRequest, PeerRefused
from tests.support.low_limits import lower
from tests.support.simulation import IDS, SINK_IDS, TOKENS, World, delivers, mover_of, spec_of


def world_of(**limits: int) -> World:
    return World(settings=Settings(limits=LimitsConfig(**limits)))


def test_a_rank_too_many_is_refused_and_may_come_when_another_has_gone():
    world = world_of(max_ranks=2)
    host = world.host("p")
    first, second = world.engine(host, "prefill", tp=2)
    third = world.register(host, spec_of("other"))
    (refused,) = third.received(wk.Refused)
    assert (refused.code, refused.retry_after_s) == (Code.BUSY, RETRY_LATER_S)
    assert "2 of 2 (limits.max_ranks)" in refused.message
    second.close()
    world.register_again(third)
    assert third.received(wk.Registered)
    assert not first.received(wk.Refused)


def test_a_transfer_too_many_of_one_engine_is_refused_until_one_is_released():
    world = world_of(max_transfers_per_engine=2)
    host = world.host("p")
    (source,), (other,) = world.engine(host, "prefill"), world.engine(host, "other")
    for name in ("t1", "t2", "t3"):
        source.publish(name, IDS, TOKENS)
    (refused,) = source.received(wk.PublishRefused)
    assert (refused.transfer_id, refused.code, refused.retry_after_s) == ("t3", Code.BUSY, RETRY_AFTER_S)
    assert "the oldest, t1, is held by no reader, and published 0 s ago" in refused.message
    other.publish("t1", IDS, TOKENS)
    assert not other.received(wk.PublishRefused)
    source.say(wk.Unpublish(transfer_id="t1"))
    source.publish("t4", IDS, TOKENS)
    assert len(source.received(wk.PublishRefused)) == 1


def test_a_source_that_is_full_says_who_holds_what():
    world = world_of(max_transfers_per_engine=1)
    source = world.engine(world.host("p"), "prefill")[0]
    sink = world.engine(world.host("d"), "decode")[0]
    sink.say(wk.Prepare(ref=source.publish("t1", IDS, TOKENS)))
    world.advance(50)
    source.publish("t2", IDS, TOKENS)
    (refused,) = source.received(wk.PublishRefused)
    assert "the oldest, t1, is held by engine decode at tcp://d:9441 for 50 s" in refused.message


def test_ready_for_transfers_that_nobody_publishes_is_bounded_engine_by_engine():
    world = world_of(max_transfers_per_engine=4)
    host = world.host("p")
    loud, quiet = world.engine(host, "loud", tp=2), world.engine(host, "quiet", tp=2)
    for number in range(100):
        loud[1].ready(f"never-{number}")
    assert len(list(host.node.published.announced)) == 4
    quiet[1].ready("t1")
    sink = world.engine(world.host("d"), "decode")[0]
    assert delivers(quiet[0], sink, "t1")


def test_a_pull_too_many_of_one_rank_fails_at_once_and_safely():
    world = world_of(max_pulls_per_rank=2)
    source = world.engine(world.host("p"), "prefill")[0]
    host = world.host("d")
    sink, other = world.engine(host, "decode")[0], world.engine(host, "other")[0]
    world.hold_network = True
    tickets = [sink.pull(source.publish(f"t{n}", IDS, TOKENS), SINK_IDS, TOKENS) for n in range(3)]
    failed = sink.ended(tickets[2])
    assert (failed.code, failed.safe_to_reuse, failed.retry_after_s) == (Code.BUSY, True, RETRY_AFTER_S)
    assert other.ended(other.pull(source.publish("u", IDS, TOKENS), SINK_IDS, TOKENS)) is None
    world.deliver()
    world.hold_network = False
    assert isinstance(sink.ended(tickets[0]), wk.TicketDelivered)
    assert delivers(source, sink, "later")


def test_bytes_in_flight_are_bounded_and_a_pull_larger_than_the_bound_goes_alone():
    world = world_of(max_inflight_bytes=1)
    source = world.engine(world.host("p"), "prefill")[0]
    sink = world.engine(world.host("d"), "decode")[0]
    world.hold_network = True
    alone = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    second = sink.pull(source.publish("t2", IDS, TOKENS), SINK_IDS, TOKENS)
    assert sink.ended(alone) is None
    assert sink.ended(second).code is Code.BUSY
    assert "limits.max_inflight_bytes" in sink.ended(second).message
    world.deliver()
    assert isinstance(sink.ended(alone), wk.TicketDelivered)
    world.hold_network = False
    assert delivers(source, sink, "t3")


def test_what_every_end_of_a_pull_takes_off_the_load():
    world = world_of()
    source = world.engine(world.host("p"), "prefill")[0]
    sink = world.engine(world.host("d"), "decode")[0]
    (mover,) = sink.host.movers.values()
    load = sink.host.node.context.ledger[INFLIGHT_BYTES]
    assert delivers(source, sink, "delivered")
    sink.pull(msgspec.structs.replace(source.publish("r", IDS, TOKENS), nonce="x"), SINK_IDS, TOKENS)
    mover.hold = True
    doubtful = sink.pull(source.publish("late", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=1.0)
    assert load.held > 0
    world.advance(2)
    assert sink.ended(doubtful).safe_to_reuse is False
    assert load.held > 0  # it may still be written
    mover.die()
    assert load.held == 0
    sink.pull(source.publish("t4", IDS, TOKENS), SINK_IDS, TOKENS)
    sink.close()
    assert load.held == 0
    assert not sink.host.node.pulls.most_of_rank


def test_peers_too_many_are_not_asked():
    world = world_of(max_peers=1)
    sources = [world.engine(world.host(name), f"engine-{name}")[0] for name in ("a", "b")]
    sink = world.engine(world.host("d"), "decode")[0]
    mover_of(sink).hold = True
    running = sink.pull(sources[0].publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    failed = sink.ended(sink.pull(sources[1].publish("t2", IDS, TOKENS), SINK_IDS, TOKENS))
    assert (failed.code, failed.retry_after_s) == (Code.BUSY, RETRY_LATER_S)
    world.feed(sink.host, ev.PeerDropRequested(sources[0].host.endpoint))
    mover_of(sink).hold = False
    mover_of(sink).copy()
    mover_of(sink).finish()
    assert isinstance(sink.ended(running), wk.TicketDelivered)
    assert delivers(sources[1], sink, "t3")


def test_a_peer_of_which_nothing_is_wanted_has_no_place_that_another_needs():
    world = world_of(max_peers=1)
    sources = [world.engine(world.host(name), f"engine-{name}")[0] for name in ("a", "b")]
    sink = world.engine(world.host("d"), "decode")[0]
    for number in range(4):
        assert delivers(sources[number % 2], sink, f"t{number}")
        assert sink.host.node.peers.endpoints() == {sources[number % 2].host.endpoint}


def test_questions_that_wait_are_bounded_by_peer_and_in_all(monkeypatch):
    lower(monkeypatch, WAITING_BYTES, 16 * kept_bytes("nobody", "g"))
    world = World()
    host = world.host("p")

    def send_request(route: bytes, number: int):
        request = ManifestRequest(request=number, engine_id="nobody", generation="g", wait_s=5.0)
        return [e.message for e in host.node.feed(ev.PeerRequest(route, request), world.now)]

    assert [send_request(b"loud", number) for number in range(14)] == [[]] * 14
    (refused,) = send_request(b"loud", 14)
    assert isinstance(refused, PeerRefused)
    assert (refused.request, refused.code, refused.retry_after_s) == (14, Code.BUSY, RETRY_AFTER_S)
    (still,) = send_request(b"loud", 0)  # asked again: the same question
    assert (still.request, still.why) == (
        0,
        f"no rank of it is registered at {host.endpoint}; check id and endpoint",
    )
    assert [bool(send_request(b"other", number)) for number in range(2)] == [False, True]
    world.advance(2)
    world.engine(host, "nobody", generation="g")
    assert isinstance(send_request(b"loud", 99)[0], ManifestReply)


def test_grants_that_wait_are_bounded_and_the_pull_is_told(monkeypatch):
    lower(monkeypatch, WAITING_BYTES, 26_000)  # a peer has room for two
    world = World()
    stages = world.engine(world.host("p"), "prefill", tp=2)
    sink = world.engine(world.host("d"), "decode")[0]
    refs = [stages[0].publish(f"t{n}", IDS, TOKENS) for n in range(3)]
    tickets = [sink.pull(ref, SINK_IDS, TOKENS) for ref in refs]  # rank 1 is not ready
    failed = sink.ended(tickets[2])
    assert (failed.code, failed.retry_after_s) == (Code.BUSY, RETRY_AFTER_S)
    for number in range(2):
        stages[1].ready(f"t{number}")
        assert isinstance(sink.ended(tickets[number]), wk.TicketDelivered)
    stages[1].ready("t2")
    assert sink.reads(refs[2])
