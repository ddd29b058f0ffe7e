"""What a node says when it has enough: `busy`, and when to ask again. Everyone else goes on."""

from __future__ import annotations

import pytest

from kvxferd.config import LimitsConfig
from kvxferd.core import Settings
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.limits.table import ACKNOWLEDGED, RETRY_AFTER_S, RETRY_LATER_S, WAITING_BYTES
from kvxferd.core.ranks import registration_checks
from kvxferd.core.source.waiting import kept_bytes
from kvxferd.errors import Code
from kvxferd.ids import Rank
from kvxferd.wire import worker as wk
from kvxferd.wire.common import TransferRef
from kvxferd.wire.peer import Acknowledge, Consumer, ManifestReply, ManifestRequest, PeerRefused, RequestDone
from tests.support.low_limits import lower
from tests.support.simulation import (
    IDS,
    SINK_IDS,
    TOKENS,
    Worker,
    World,
    delivers,
    mover_of,
    spec_of,
    two_users,
)


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
    other.publish("t1", IDS, TOKENS)
    assert not other.received(wk.PublishRefused)
    source.say(wk.Unpublish(transfer_id="t1"))
    source.publish("t4", IDS, TOKENS)
    assert len(source.received(wk.PublishRefused)) == 1


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
    mover_of(sink).work()
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


# --- who has read


def acknowledge(world: World, worker: Worker, ref: TransferRef, number: int, key: str) -> None:
    consumer = Consumer(f"c{number // 8}", "g", Rank(0, number % 8), 4096)
    request = Acknowledge(request=number, grant=f"g{number}", ref=ref, consumer=consumer, bytes=0)
    effects = worker.host.node.feed(ev.PeerRequest(b"route", request, key), world.now)
    assert [e.message for e in effects if isinstance(e, fx.ReplyToPeer)] == [RequestDone(request=number)]


def test_acknowledgements_have_a_share_of_each_peer(monkeypatch) -> None:
    lower(monkeypatch, ACKNOWLEDGED, 320)
    world = World()
    (source,), (sink,) = world.engine(world.host("a"), "prefill"), world.engine(world.host("b"), "decode")
    node = source.host.node
    refs = [source.publish(f"t{n}", IDS, TOKENS) for n in range(4)]
    for ref in refs:
        for number in range(200):
            acknowledge(world, source, ref, number, "loud")
    assert 270 <= node.published.table._reader_share.held <= 280
    for ref in refs:
        for number in range(200):
            acknowledge(world, source, ref, number, "loud")  # again: counted once
    assert node.published.table._reader_share.held_by("loud") <= 280
    assert delivers(source, sink, "quiet")
    assert [m.transfer_id for m in source.received(wk.Released)] == ["quiet"]
    for ref in refs:
        source.say(wk.Unpublish(transfer_id=ref.transfer_id))
    assert node.published.table._reader_share.held == 0


# --- what has a mover started


def sleep_and_wake(world: World, worker: Worker, number: int) -> wk.Refused | None:
    num = len(worker.received(wk.Refused))
    worker.say(wk.Suspend())
    world.settle()
    exports = worker.host.node.sessions[worker.session].rank.exports
    worker.say(wk.Resume(request=100 + number, regions=exports, incarnation=f"i{number}"))
    refused = worker.received(wk.Refused)[num:]
    return refused[0] if refused else None


@pytest.fixture
def few(monkeypatch) -> int:
    monkeypatch.setattr(registration_checks, "REGISTER_BURST", 8)
    return 8


def test_who_sleeps_and_wakes_without_end_waits(few: int) -> None:
    world = World()
    first, second = two_users(world)
    refused = [sleep_and_wake(world, first, n) for n in range(few + 2)]
    assert refused[0] is None
    assert refused[-1] is not None
    assert refused[-1].code is Code.BUSY
    assert 0 < refused[-1].retry_after_s <= 0.25
    assert sleep_and_wake(world, second, 0) is None
    world.advance(1.0)
    assert sleep_and_wake(world, first, 99) is None


def test_a_rank_whose_movers_die_at_once_has_another_as_often_as_its_user_may(few: int) -> None:
    world = World()
    first, second = two_users(world)

    def num_movers(worker: Worker) -> int:
        return sum(mover.worker is worker for mover in worker.host.movers.values())

    for _ in range(200):
        for mover in [m for m in first.host.movers.values() if m.worker is first and m.alive]:
            mover.die()
        world.advance(0.1)
    assert num_movers(first) <= few + 20 * registration_checks.REGISTER_PER_S
    assert second.host.node.sessions[second.session].rank.is_readable
    mover_of(second).die()
    world.advance(1.0)
    assert second.host.node.sessions[second.session].rank.is_readable
    world.advance(5.0)
    assert first.host.node.sessions[first.session].rank.is_readable


def test_a_resident_mover_that_nobody_wants_is_not_taken() -> None:
    world = World()
    first, _ = two_users(world)
    rank = first.host.node.sessions[first.session].rank
    rank.resident = True
    mover_of(first).die()
    world.advance(1.0)
    assert len(first.received(wk.MoverRequest)) == 1
    wanted = [
        effect
        for _ in range(10)
        for effect in first.host.node.feed(
            ev.WorkerMessage(first.session, wk.NewMover(), None, b""), world.now
        )
    ]
    (accepted,) = wanted
    assert isinstance(accepted, fx.AcceptResidentMover)
    assert accepted.session == first.session
