"""What one session or peer can send without end is bounded for its user, and others go on."""

from __future__ import annotations

import pytest

from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.limits.table import ACKNOWLEDGED, EARLY_READY, WAITING_BYTES
from kvxferd.core.ranks import registration_checks
from kvxferd.core.source.waiting import kept_bytes
from kvxferd.errors import Code
from kvxferd.ids import Rank
from kvxferd.wire import worker as wk
from kvxferd.wire.common import TransferRef
from kvxferd.wire.peer import (
    Acknowledge,
    Consumer,
    ManifestRequest,
    PeerRefused,
    RequestDone,
)
from tests.support.low_limits import lower
from tests.support.simulation import (
    FIRST,
    IDS,
    SECOND,
    TOKENS,
    Worker,
    World,
    delivers,
    mover_of,
    two_users,
)

# --- what a source may send


# --- what is ready before its publish


def test_early_readiness_has_a_share_of_each_user(monkeypatch) -> None:
    lower(monkeypatch, EARLY_READY, 16)
    world = World()
    first, second = two_users(world)
    share = first.host.node.context.ledger[EARLY_READY]
    for number in range(40):
        first.ready(f"never-{number}")
    second.ready("soon")
    assert share.held_by(FIRST) == 14
    assert share.held_by(SECOND) == 1
    (sink,) = world.engine(world.host("s"), "decode")
    assert delivers(second, sink, "soon")
    world.advance(60.0)
    assert share.held == 0


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


# --- what peers have wait here


def test_the_last_questions_that_may_wait_are_of_who_has_few(monkeypatch: pytest.MonkeyPatch) -> None:
    size = kept_bytes("later", "g")
    lower(monkeypatch, WAITING_BYTES, 32 * size)
    world = World()
    host = world.host("a")

    def is_refused(key: str, number: int) -> bool:
        request = ManifestRequest(request=number, engine_id="later", generation="g", wait_s=5.0)
        effects = host.node.feed(ev.PeerRequest(key.encode(), request, key), world.now)
        return any(isinstance(e, fx.ReplyToPeer) and isinstance(e.message, PeerRefused) for e in effects)

    for key in ("one", "two", "three"):
        for number in range(16):
            is_refused(key, number)
    assert host.node.context.ledger[WAITING_BYTES].by_owner == {
        "one": 16 * size,
        "two": 12 * size,
        "three": 2 * size,
    }
    assert not is_refused("quiet", 0)
