"""One user cannot make all others `busy`."""

from __future__ import annotations

import pytest

from kvxferd.core.limits.ledger import (
    CHAR_BYTES,
    ENTRY_BYTES,
    GROUP_BYTES,
    RANK_BYTES,
    FairShare,
    RateLimiter,
)
from kvxferd.core.limits.table import BLOCK_ID_BYTES, OPEN_REQUESTS
from kvxferd.core.ranks.registration_checks import REGISTER_BURST, REGISTER_PER_S
from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from kvxferd.wire.common import TransferRef
from tests.support.low_limits import lower
from tests.support.simulation import (
    FIRST,
    IDS,
    SECOND,
    SINK_IDS,
    TOKENS,
    Worker,
    World,
    mover_of,
    spec_of,
    two_users,
)


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


def test_prepared_pulls_have_a_share_of_each_user(monkeypatch: pytest.MonkeyPatch) -> None:
    lower(monkeypatch, BLOCK_ID_BYTES, 16 * ENTRY_BYTES)
    world = World()
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
def test_what_has_ended_waits_for_no_engine(how: str) -> None:
    """Ten seconds of invented references, each given up at once, were 400 MB."""
    world = World()
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lower(monkeypatch, OPEN_REQUESTS, 16)
    world = World()
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


def test_who_registers_and_leaves_in_a_loop_is_busy_and_others_register() -> None:
    world = World()
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
    assert isinstance(failed, wk.TicketFailed)
    assert failed.code is Code.BUSY
    assert failed.safe_to_reuse
    mover_of(sink).hold = False
    mover_of(sink).work()
    assert kept(sink) == 0
    third = sink.pull(refs[1], SINK_IDS, TOKENS)
    assert isinstance(sink.ended(third), wk.TicketDelivered | None)
    sink.close()
    assert kept(sink) == 0
