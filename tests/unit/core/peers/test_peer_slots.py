"""Who is known among the peers where there is room for few: one user's must not be all of them."""

from __future__ import annotations

import pytest

from kvxferd.config import LimitsConfig
from kvxferd.core import Settings
from kvxferd.core.limits.table import OPEN_REQUESTS, REMOTE_ENGINE_BYTES
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
    delivers,
    mover_of,
    spec_of,
    two_users,
)


def world_of(max_peers: int = 8) -> World:
    return World(settings=Settings(limits=LimitsConfig(max_peers=max_peers)))


def ref_to(endpoint: str, transfer: str = "t") -> TransferRef:
    return TransferRef(f"tcp://{endpoint}:9441", "prefill", "g1", transfer, "n")


def sources_of(world: World, num: int, prefix: str = "s") -> list[Worker]:
    return [world.engine(world.host(f"{prefix}{n}"), f"{prefix}-{n}")[0] for n in range(num)]


def test_peers_that_never_answer_give_their_places_to_another_user() -> None:
    world = world_of()
    first, second = two_users(world)
    sources = sources_of(world, 4)
    tickets = [first.pull(ref_to(f"nobody-{n}"), SINK_IDS, TOKENS) for n in range(64)]
    assert first.host.node.peers._peer_share.held_by(FIRST) == 7
    assert [delivers(source, second, f"t{n}") for n, source in enumerate(sources)] == [True] * 4
    assert first.host.node.peers._peer_share.held_by(FIRST) == 4
    ended = [first.ended(ticket) for ticket in tickets]
    assert {e.code for e in ended if isinstance(e, wk.TicketFailed)} == {Code.BUSY}
    world.advance(30.0)
    assert first.host.node.peers.endpoints() <= {source.host.endpoint for source in sources}
    assert first.host.node.peers._open_request_share.held == 0


def test_a_peer_that_is_read_from_keeps_its_place() -> None:
    """To lose it would end the grant, or the questions, of pulls that run."""
    world = world_of()
    first, second = two_users(world)
    mover_of(first).hold = True
    sources = sources_of(world, 7)
    tickets = [first.pull(s.publish("t", IDS, TOKENS), SINK_IDS, TOKENS) for s in sources]
    for number in range(64):
        second.pull(ref_to(f"b-{number}"), SINK_IDS, TOKENS)
    known = first.host.node.peers.endpoints()
    assert {source.host.endpoint for source in sources} <= known
    world.advance(4.0)
    for _ in sources:
        mover_of(first).work()
    assert all(isinstance(first.ended(ticket), wk.TicketDelivered) for ticket in tickets)


def test_an_idle_peer_makes_room_for_the_next() -> None:
    world = world_of(max_peers=2)
    sink = world.register(world.host("d"), spec_of("decode"))
    sources = sources_of(world, 4)
    assert [delivers(source, sink, "t") for source in sources] == [True] * 4
    node = sink.host.node
    assert sources[-1].host.endpoint in node.peers.endpoints()
    assert node.peers._peer_share.held == len(node.peers.endpoints()) <= 2


@pytest.mark.parametrize(("max_peers", "num_own"), [(8, 2), (7, 4)], ids=["fewer", "as many"])
def test_whoever_reads_from_more_peers_takes_no_idle_one_of_another_user(
    max_peers: int, num_own: int
) -> None:
    world = world_of(max_peers)
    first, second = two_users(world)
    mover_of(first).hold = True
    own = sources_of(world, num_own, "own")
    assert [delivers(source, second, f"t{n}") for n, source in enumerate(own)] == [True] * num_own
    tickets = [first.pull(s.publish("t", IDS, TOKENS), SINK_IDS, TOKENS) for s in sources_of(world, 8)]
    assert first.ended(tickets[-1]).code is Code.BUSY
    assert {source.host.endpoint for source in own} <= first.host.node.peers.endpoints()


def test_a_peer_that_two_users_wait_for_is_not_given_up_for_a_third() -> None:
    world = world_of()
    first, second = two_users(world)
    for number in range(7):
        first.pull(ref_to(f"nobody-{number}"), SINK_IDS, TOKENS)
        second.pull(ref_to(f"nobody-{number}"), SINK_IDS, TOKENS)
    third = world.register(first.host, spec_of("decode-3"), uid=3000)
    known = first.host.node.peers.endpoints()
    tickets = [third.pull(ref_to(f"c-{number}"), SINK_IDS, TOKENS) for number in range(2)]
    assert known <= first.host.node.peers.endpoints()
    assert third.ended(tickets[-1]).code is Code.BUSY


def test_the_home_of_a_rank_keeps_its_place() -> None:
    """It speaks to the rank's daemon on the connection that this one made."""
    world = world_of(max_peers=1)
    home, member = world.host("h"), world.host("m")
    for rank, host in enumerate((home, member)):
        world.register(host, spec_of("span", tp=2, home=home.endpoint, tp_rank=rank))
    other = world.register(member, spec_of("decode"), uid=SECOND)
    ticket = other.pull(ref_to("elsewhere"), SINK_IDS, TOKENS)
    assert other.ended(ticket).code is Code.BUSY
    assert member.node.peers.endpoints() == {home.endpoint}


def test_a_silent_peer_keeps_its_place_while_it_is_asked_again() -> None:
    """Each question that is sent again connects anew: such peers must be counted too."""
    world = world_of()
    (source,), sink = world.engine(world.host("s"), "prefill"), world.engine(world.host("d"), "decode")[0]
    ref = source.publish("t", IDS, TOKENS)
    assert delivers(source, sink, "t0")
    world.cut = {("d", "s"), ("s", "d")}
    sink.say(wk.Abandon(ref=ref))
    ticket = sink.pull(ref, SINK_IDS, TOKENS, deadline_s=60.0)
    world.advance(30.0)
    assert sink.ended(ticket).code is Code.PEER_UNREACHABLE
    node = sink.host.node
    assert node.peers._peer_share.held == 1
    assert node.peers.snapshot({})[0].boot is None
    world.cut = set()
    world.advance(4.0)
    assert node.peers.snapshot({})[0].state == "up"
    assert node.peers._open_request_share.held == 0
    assert not node.peer_requests.num_open(source.host.endpoint)
    assert delivers(source, sink, "t1")


def test_grants_are_renewed_though_another_user_of_the_peer_may_ask_nothing_more(monkeypatch) -> None:
    """The pull that began last would end with the first one's user, whose questions nobody answers."""
    lower(monkeypatch, OPEN_REQUESTS, 64)
    world = world_of()
    first, second = two_users(world)
    source, mute = sources_of(world, 2)
    assert delivers(mute, first, "t0")
    for sink in (first, second):
        mover_of(sink).hold = True
    first.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=300.0)
    ticket = second.pull(source.publish("t2", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=300.0)
    world.cut = {(mute.host.name, "d")}
    for number in range(60):
        first.say(wk.Abandon(ref=ref_to(mute.host.name, f"t{number}")))
    assert not first.host.node.peers._open_request_share.has_room(FIRST)
    world.advance(world.settings.transfer.lease_s + 1.0)
    mover_of(second).work()
    assert isinstance(second.ended(ticket), wk.TicketDelivered)


def test_an_engine_is_learnt_for_whoever_waits_and_has_room_for_it() -> None:
    """The first to ask has no room: the others would be refused for it, again and again."""
    world = world_of()
    first, second = two_users(world)
    host = world.host("s")
    *others, source = (world.engine(host, f"prefill-{number}")[0] for number in range(15))
    shares = first.host.node.context.ledger[REMOTE_ENGINE_BYTES]
    for other in others:
        first.say(wk.Prepare(ref=other.publish("t", IDS, TOKENS)))
    shares.limit = 16 * shares.held // 14  # so that the last eighth has room, for who holds little
    world.hold_network = True
    tickets = [
        sink.pull(source.publish(f"t{n}", IDS, TOKENS), SINK_IDS, TOKENS)
        for n, sink in enumerate((first, second))
    ]
    world.deliver()
    assert isinstance(second.ended(tickets[1]), wk.TicketDelivered)
    assert isinstance(first.ended(tickets[0]), wk.TicketDelivered)
    assert shares.held_by(SECOND) > 0


def test_who_waits_longer_for_an_engine_is_not_refused_with_who_waits_shorter() -> None:
    world = world_of()
    first, second = two_users(world)
    host = world.host("s0")
    one, other = (spec_of("prefill", tp=2, tp_rank=rank) for rank in (0, 1))
    world.register(host, one)
    ref = ref_to(host.name)
    short = first.pull(ref, SINK_IDS, TOKENS, deadline_s=0.5)
    long = second.pull(ref, SINK_IDS, TOKENS, deadline_s=8.0)
    world.advance(1.0)
    assert isinstance(first.ended(short), wk.TicketFailed)
    assert second.ended(long) is None
    world.register(host, other)
    world.advance(2.0)
    assert second.ended(long).code is Code.TRANSFER_UNKNOWN  # the engine was learnt
    assert first.host.node.peers._open_request_share.held == 0
