"""What a node says when it has enough: `busy`, and when to ask again. Everyone else goes on."""

from __future__ import annotations

import pytest

from kvxferd.config import LimitsConfig
from kvxferd.core import Settings
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.limits.ledger import (
    CHAR_BYTES,
    ENTRY_BYTES,
    GROUP_BYTES,
    RANK_BYTES,
    FairShare,
    RateLimiter,
)
from kvxferd.core.limits.table import (
    ACKNOWLEDGED,
    BLOCK_ID_BYTES,
    OPEN_REQUESTS,
    RETRY_AFTER_S,
    RETRY_LATER_S,
    WAITING_BYTES,
)
from kvxferd.core.ranks import registration_checks
from kvxferd.core.ranks.registration_checks import REGISTER_BURST, REGISTER_PER_S
from kvxferd.core.source.waiting import kept_bytes
from kvxferd.errors import Code
from kvxferd.ids import Rank
from kvxferd.wire import worker as wk
from kvxferd.wire.common import TransferRef
from kvxferd.wire.peer import Acknowledge, Consumer, ManifestReply, ManifestRequest, PeerRefused, RequestDone
from tests.support.low_limits import lower
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


def test_a_peer_of_which_nothing_is_wanted_has_no_place_that_another_needs():
    world = world_of(max_peers=1)
    sources = [world.engine(world.host(name), f"engine-{name}")[0] for name in ("a", "b")]
    sink = world.engine(world.host("d"), "decode")[0]
    for number in range(4):
        assert delivers(sources[number % 2], sink, f"t{number}")
        assert sink.host.node.peers.endpoints() == {sources[number % 2].host.endpoint}


def test_questions_that_wait_are_bounded_by_peer_and_in_all(world, monkeypatch):
    lower(monkeypatch, WAITING_BYTES, 16 * kept_bytes("nobody", "g"))
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


def test_acknowledgements_have_a_share_of_each_peer(world, monkeypatch) -> None:
    lower(monkeypatch, ACKNOWLEDGED, 320)
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


def test_who_sleeps_and_wakes_without_end_waits(world, few: int) -> None:
    first, second = two_users(world)
    refused = [sleep_and_wake(world, first, n) for n in range(few + 2)]
    assert refused[0] is None
    assert refused[-1] is not None
    assert refused[-1].code is Code.BUSY
    assert 0 < refused[-1].retry_after_s <= 0.25
    assert sleep_and_wake(world, second, 0) is None
    world.advance(1.0)
    assert sleep_and_wake(world, first, 99) is None


def test_a_rank_whose_movers_die_at_once_has_another_as_often_as_its_user_may(world, few: int) -> None:
    first, second = two_users(world)

    def num_movers(worker: Worker) -> int:
        return sum(mover.worker is worker for mover in worker.host.movers.values())

    for _ in range(200):
        for mover in [m for m in first.host.movers.values() if m.worker is first and m.alive]:
            mover.die()
        world.advance(0.1)
    assert num_movers(first) <= few + 20 * REGISTER_PER_S
    assert second.host.node.sessions[second.session].rank.is_readable
    mover_of(second).die()
    world.advance(1.0)
    assert second.host.node.sessions[second.session].rank.is_readable
    world.advance(5.0)
    assert first.host.node.sessions[first.session].rank.is_readable


def test_a_resident_mover_that_nobody_wants_is_not_taken(world) -> None:
    first, _ = two_users(world)
    rank = first.host.node.sessions[first.session].rank
    rank.resident = True
    mover_of(first).die()
    world.advance(1.0)
    assert len(first.received(wk.MoverRequest)) == 1
    offered = ev.WorkerMessage(first.session, wk.NewMover(), None, b"")
    (accepted,) = [effect for _ in range(10) for effect in first.host.node.feed(offered, world.now)]
    assert isinstance(accepted, fx.AcceptResidentMover)
    assert accepted.session == first.session


# --- one user cannot make all others `busy`


def test_the_last_eighth_is_for_those_who_hold_a_sixteenth_at_most() -> None:
    shares = FairShare(128)
    assert sum(shares.acquire(FIRST) for _ in range(200)) == 112
    assert sum(shares.acquire(SECOND) for _ in range(200)) == 8
    shares.release(FIRST, 50)
    assert sum(shares.acquire(SECOND) for _ in range(200)) == 42
    assert shares.held == 112


def test_a_small_limit_has_a_place_for_a_second_user_too_and_two_have_no_reserve() -> None:
    shares = FairShare(8)
    assert [shares.acquire(FIRST) for _ in range(8)] == [True] * 7 + [False]
    assert [shares.acquire(uid) for uid in (SECOND, 3000)] == [True, False]
    shares = FairShare(2)
    assert [shares.acquire(FIRST) for _ in range(3)] == [True, True, False]


def ref_to(endpoint: str, transfer: str = "t", engine: str = "prefill") -> TransferRef:
    return TransferRef(f"tcp://{endpoint}:9441", engine, "g1", transfer, "n")


def test_prepared_pulls_have_a_share_of_each_user(world, monkeypatch) -> None:
    lower(monkeypatch, BLOCK_ID_BYTES, 16 * ENTRY_BYTES)
    first, second = two_users(world)
    node = first.host.node
    for n in range(20):
        first.say(wk.Prepare(ref=ref_to("p", f"t{n}")))
    kept = node.context.ledger[BLOCK_ID_BYTES]
    assert (len(list(node.worker_requests.prepared())), kept.held_by(FIRST)) == (14, 14 * ENTRY_BYTES)
    second.say(wk.Prepare(ref=ref_to("p")))
    assert len(list(node.worker_requests.prepared())) == 15
    first.close()
    assert kept.held_by(FIRST) == 0


@pytest.mark.parametrize("how", ["prepared and left", "pulled and cancelled"])
def test_what_has_ended_waits_for_no_engine(world, how: str) -> None:
    """Ten seconds of invented references, each given up at once, were 400 MB."""
    sink, _ = two_users(world)
    for n in range(50):
        ref = ref_to("p", f"t{n}")
        if how == "prepared and left":
            sink.say(wk.Prepare(ref=ref))
            sink.say(wk.Abandon(ref=ref))
        else:
            sink.say(wk.Cancel(ticket=sink.pull(ref, SINK_IDS, TOKENS)))
    node = sink.host.node
    (fetch,) = node.handshake_client._fetches.values()
    assert not fetch.waiting
    assert node.context.ledger[BLOCK_ID_BYTES].held == 0
    world.advance(30.0)
    assert not node.handshake_client._fetches


def test_abandoning_is_told_once_at_a_time_and_has_a_share_of_each_user(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, OPEN_REQUESTS, 16)
    first, second = two_users(world)
    node = first.host.node
    for _ in range(3):
        first.say(wk.Abandon(ref=ref_to("p")))
    assert node.context.ledger[OPEN_REQUESTS].held == 1
    for n in range(20):
        first.say(wk.Abandon(ref=ref_to("p", f"t{n}")))
    assert node.context.ledger[OPEN_REQUESTS].held_by(FIRST) == 14
    second.say(wk.Abandon(ref=ref_to("p")))
    assert node.context.ledger[OPEN_REQUESTS].held_by(SECOND) == 1
    world.advance(130.0)
    assert node.context.ledger[OPEN_REQUESTS].held == 0
    assert not node.sessions[first.session].abandoning


# --- registering and leaving in a loop has a mover made each time: a user's rate is limited


def test_a_burst_then_so_many_a_second_of_each_user() -> None:
    rate = RateLimiter(burst=3, per_s=2.0)
    assert [rate.acquire(FIRST, 10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert rate.acquire(SECOND, 10.0) == 0.0
    assert rate.acquire(FIRST, 10.5) == 0.0
    assert rate.acquire(FIRST, 10.5) == 0.5
    for uid in range(100):
        rate.acquire(uid, 11.0)
    rate.acquire(FIRST, 100.0)
    assert len(rate._full_at) == 1


def test_who_registers_and_leaves_in_a_loop_is_busy_and_others_register(world) -> None:
    host = world.host("p")
    for _ in range(REGISTER_BURST):
        worker = world.register(host, spec_of("a"), uid=FIRST)
        assert worker.received(wk.Registered)
        worker.close()
    num_movers = len(host.movers)
    (refused,) = world.register(host, spec_of("a"), uid=FIRST).received(wk.Refused)
    assert refused.code is Code.BUSY
    assert 0 < refused.retry_after_s <= 1 / REGISTER_PER_S
    assert len(host.movers) == num_movers
    assert world.register(host, spec_of("b"), uid=SECOND).received(wk.Registered)
    world.advance(refused.retry_after_s)
    assert world.register(host, spec_of("a"), uid=FIRST).received(wk.Registered)


# --- the block ids that requests keep have a limit of bytes, and in it a share of each user


ONE = ENTRY_BYTES + GROUP_BYTES + 4 * len(IDS)
PUBLISHED = ONE + RANK_BYTES + CHAR_BYTES * len("first")  # it names the incarnation of its one rank


def limit_to(worker: Worker, num_requests: int, size: int = ONE) -> None:
    """Have the worker's daemon keep so many requests of this size, an eighth of them for other users."""
    worker.host.node.context.ledger[BLOCK_ID_BYTES].limit = num_requests * size * 8 // 7 + 8


def kept(worker: Worker) -> int:
    return worker.host.node.context.ledger[BLOCK_ID_BYTES].held


def test_a_publish_past_the_limit_is_busy_until_another_is_released(source: Worker) -> None:
    limit_to(source, 3, PUBLISHED)
    for number in range(4):
        source.publish(f"t{number}", IDS, TOKENS)
    (refused,) = source.received(wk.PublishRefused)
    assert (refused.transfer_id, refused.code) == ("t3", Code.BUSY)
    assert refused.retry_after_s > 0
    source.say(wk.Unpublish(transfer_id="t0"))
    source.publish("t4", IDS, TOKENS)
    assert len(source.received(wk.PublishRefused)) == 1
    source.close()
    assert kept(source) == 0


def test_a_pull_past_the_limit_is_busy_until_another_ends(source: Worker, sink: Worker) -> None:
    limit_to(sink, 3)  # a pull keeps its own ids, and the source's
    refs = [source.publish(f"t{number}", IDS, TOKENS) for number in range(3)]
    mover_of(sink).hold = True
    first = sink.pull(refs[0], SINK_IDS, TOKENS)
    second = sink.pull(refs[1], SINK_IDS, TOKENS)  # there is room for its ids, and none for the source's
    assert sink.ended(first) is None
    failed = sink.ended(second)
    assert (failed.code, failed.safe_to_reuse) == (Code.BUSY, True)
    mover_of(sink).hold = False
    mover_of(sink).work()
    assert kept(sink) == 0
    third = sink.pull(refs[1], SINK_IDS, TOKENS)
    assert isinstance(sink.ended(third), wk.TicketDelivered | None)
    sink.close()
    assert kept(sink) == 0
