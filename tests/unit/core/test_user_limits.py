"""What one session or peer can send without end is bounded for its user, and others go on."""

from __future__ import annotations

import pytest

from kvxferd.config import LimitsConfig
from kvxferd.core import Settings
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.peers import peers
from kvxferd.core.ranks import registration_checks
from kvxferd.core.source import transfer_table
from kvxferd.errors import Code
from kvxferd.ids import Endpoint, Rank
from kvxferd.wire import worker as wk
from kvxferd.wire.common import BlockIds, TransferRef
from kvxferd.wire.peer import (
    Acknowledge,
    Consumer,
    ManifestRequest,
    PeerRefused,
    RequestDone,
)
from tests.support.simulation import (
    FIRST,
    IDS,
    SECOND,
    SINK_IDS,
    TOKENS,
    Worker,
    World,
    delivers,
    mover_of,
    two_users,
    welcome_of,
)

# --- what a source may send


def fake_peer(world: World, worker: Worker, name: str) -> Endpoint:
    """A daemon that greets, and holds a question."""
    endpoint = Endpoint(f"tcp://{name}:9441")
    host = worker.host
    worker.pull(TransferRef(endpoint, "e", "g", "t", "n"), SINK_IDS, TOKENS)
    (hello,) = host.node.peer_requests._open_by_address[endpoint]
    world.feed(host, ev.PeerReply(endpoint, welcome_of(hello)))
    return endpoint


def test_ids_that_peers_send_are_bounded_by_who_asks_them(monkeypatch) -> None:
    monkeypatch.setattr(peers, "MAX_REASSEMBLY_BYTES", 1024)
    world = World()
    first, second = two_users(world)
    node = first.host.node
    endpoints = [fake_peer(world, first, f"fake-{n}") for n in range(8)]
    for endpoint in endpoints:
        part = BlockIds(stream=1, group="full", offset=0, ids=bytes(256))
        world.feed(first.host, ev.PeerReply(endpoint, part))
    assert node.peers._reassembly_share.held == node.peers._reassembly_share.held_by(FIRST) == 768
    other = fake_peer(world, second, "other")
    world.feed(first.host, ev.PeerReply(other, BlockIds(stream=1, group="full", offset=0, ids=bytes(64))))
    assert node.peers._reassembly_share.held_by(SECOND) == 64
    # A grant whose ids had no room fails with `busy`; the others' room comes back with their questions.
    world.advance(60.0)
    assert node.peers._reassembly_share.held == 0


def test_ids_of_one_users_grant_need_no_room_of_whoever_named_the_peer_first() -> None:
    world = World()
    (source,) = world.engine(world.host("a"), "prefill")
    first, second = two_users(world)
    assert delivers(source, first, "t0")
    shares = first.host.node.peers._reassembly_share
    shares.add(FIRST, shares.limit - shares.limit // 8)
    world.hold_network = True
    ticket = second.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    part = BlockIds(stream=7, group="full", offset=0, ids=bytes(1024))
    world.feed(second.host, ev.PeerReply(source.host.endpoint, part))
    assert shares.held_by(SECOND) == 1024
    world.deliver()
    assert isinstance(second.ended(ticket), wk.TicketDelivered)
    world.feed(second.host, ev.PeerDropRequested(source.host.endpoint))
    assert shares.held_by(SECOND) == 0
    assert shares.held_by(FIRST) == shares.held


def test_ids_that_nobody_waits_for_are_not_kept() -> None:
    world = World()
    (source,), (sink,) = world.engine(world.host("a"), "prefill"), world.engine(world.host("b"), "decode")
    assert delivers(source, sink, "t0")
    part = BlockIds(stream=7, group="full", offset=0, ids=bytes(1024))
    world.feed(sink.host, ev.PeerReply(source.host.endpoint, part))
    assert sink.host.node.peers._reassembly_share.held == 0


# --- what is ready before its publish


def test_early_readiness_has_a_share_of_each_user(monkeypatch) -> None:
    monkeypatch.setattr(transfer_table, "MAX_EARLY_READY", 16)
    world = World()
    first, second = two_users(world)
    early = first.host.node.published.table
    for number in range(40):
        first.ready(f"never-{number}")
    second.ready("soon")
    assert early._early_share.held_by(FIRST) == 14
    assert early._early_share.held_by(SECOND) == 1
    (sink,) = world.engine(world.host("s"), "decode")
    assert delivers(second, sink, "soon")
    world.advance(60.0)
    assert early._early_share.held == 0


# --- who has read


def acknowledge(world: World, worker: Worker, ref: TransferRef, number: int, key: str) -> None:
    consumer = Consumer(f"c{number // 8}", "g", Rank(0, number % 8), 4096)
    request = Acknowledge(request=number, grant=f"g{number}", ref=ref, consumer=consumer, bytes=0)
    effects = worker.host.node.feed(ev.PeerRequest(b"route", request, key), world.now)
    assert [e.message for e in effects if isinstance(e, fx.ReplyToPeer)] == [RequestDone(request=number)]


def test_acknowledgements_have_a_share_of_each_peer(monkeypatch) -> None:
    monkeypatch.setattr(transfer_table, "MAX_ACKNOWLEDGED", 320)
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
    assert wanted == [fx.RequestMover(first.session, True)]


# --- what peers have wait here


def test_the_last_questions_that_may_wait_are_of_who_has_few() -> None:
    world = World(settings=Settings(limits=LimitsConfig(max_waiting=32, max_waiting_per_peer=16)))
    host = world.host("a")

    def is_refused(key: str, number: int) -> bool:
        request = ManifestRequest(request=number, engine_id="later", generation="g", wait_s=5.0)
        effects = host.node.feed(ev.PeerRequest(key.encode(), request, key), world.now)
        return any(isinstance(e, fx.ReplyToPeer) and isinstance(e.message, PeerRefused) for e in effects)

    for key in ("one", "two", "three"):
        for number in range(16):
            is_refused(key, number)
    assert host.node.handshake_server._num_pending_of_peer == {"one": 16, "two": 12, "three": 2}
    assert not is_refused("quiet", 0)
