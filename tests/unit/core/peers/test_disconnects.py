"""A connection to a peer ends: who waits there hears soon of a daemon that is gone."""

from __future__ import annotations

from kvxferd.core import events as ev
from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Worker, World

REFUSED = "it accepts no connection there"


def waits_at(source: Worker, sink: Worker, transfer_id: str = "t1") -> int:
    """Return a pull that waits at the source, whose ranks are not ready."""
    ref = source.publish(transfer_id, IDS, TOKENS, ready_tokens=0)
    return sink.pull(ref, SINK_IDS, TOKENS, deadline_s=300.0)


def disconnected(world: World, source: Worker, sink: Worker) -> None:
    world.feed(sink.host, ev.PeerDisconnected(source.host.endpoint, REFUSED))


def cut_off(world: World) -> None:
    world.cut |= {("d", "p"), ("p", "d")}


def test_what_waits_at_a_peer_that_does_not_listen_fails_with_that_cause(world, source, sink) -> None:
    ticket = waits_at(source, sink)
    cut_off(world)
    disconnected(world, source, sink)
    world.advance(world.settings.restart_grace_s - 0.1)
    assert sink.ended(ticket) is None
    disconnected(world, source, sink)  # each attempt to connect is reported, and the grace is one
    world.advance(0.2)
    failed = sink.ended(ticket)
    assert (failed.code, failed.safe_to_reuse) == (Code.PEER_UNREACHABLE, True)
    assert REFUSED in failed.message
    later = waits_at(source, sink, "t2")
    disconnected(world, source, sink)
    world.advance(world.settings.restart_grace_s + 0.1)
    assert sink.ended(later).code is Code.PEER_UNREACHABLE


def test_what_waits_goes_on_where_the_same_daemon_is_back_in_time(world, source, sink) -> None:
    ticket = waits_at(source, sink)
    cut_off(world)
    disconnected(world, source, sink)
    source.ready("t1")  # its reply is lost with the connection
    world.advance(world.settings.restart_grace_s - 0.1)
    world.cut.clear()
    world.feed(sink.host, ev.PeerConnected(source.host.endpoint))
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)


def test_a_peer_that_is_connected_and_slow_is_not_taken_for_one_that_is_gone(world, source, sink) -> None:
    ticket = waits_at(source, sink)
    cut_off(world)
    disconnected(world, source, sink)
    world.feed(sink.host, ev.PeerConnected(source.host.endpoint))
    world.advance(world.settings.silent_after_s - 1.0)
    assert sink.ended(ticket) is None


def test_what_waits_at_a_former_daemon_fails_as_soon_as_another_answers(world, source, sink) -> None:
    ticket = waits_at(source, sink)
    cut_off(world)
    disconnected(world, source, sink)
    world.cut.clear()
    del world.hosts["p"]
    world.host("p").node.context.boot = "another"
    world.feed(sink.host, ev.PeerConnected(source.host.endpoint))
    failed = sink.ended(ticket)
    assert failed.code is Code.PEER_UNREACHABLE
    assert "started anew" in failed.message
    assert not sink.host.node.peers.snapshot({})[0].engines


def test_what_is_told_to_a_peer_that_is_gone_is_told_once_it_is_back(world, source, sink) -> None:
    ref = source.publish("t1", IDS, TOKENS)
    assert sink.reads(ref)
    ref = source.publish("t2", IDS, TOKENS)
    cut_off(world)
    sink.say(wk.Abandon(ref=ref))
    disconnected(world, source, sink)
    world.advance(2 * world.settings.silent_after_s)
    assert "t2" not in {m.transfer_id for m in source.received(wk.Released)}
    world.cut.clear()
    world.advance(world.settings.resend_s)
    assert [m.why for m in source.received(wk.Released) if m.transfer_id == "t2"] == [Code.ABANDONED]


def test_a_peer_that_nobody_asks_anything_is_not_greeted(world, source, sink) -> None:
    assert sink.reads(source.publish("t1", IDS, TOKENS))
    node = sink.host.node
    disconnected(world, source, sink)
    assert not node.peer_requests.num_open(source.host.endpoint)
    assert node.peers.snapshot({})[0].boot is None
    world.feed(sink.host, ev.PeerDisconnected("tcp://nobody:1", REFUSED))
    world.feed(sink.host, ev.PeerConnected("tcp://nobody:1"))
    assert sink.reads(source.publish("t2", IDS, TOKENS))


def test_a_connection_that_ends_all_the_time_has_no_request_sent_more_than_twice_a_second(
    world, source, sink
) -> None:
    waits_at(source, sink)
    sent: list[str] = []
    post = world.post
    world.post = lambda *args: [sent.append(type(args[-1]).__name__), post(*args)]
    for _ in range(100):
        disconnected(world, source, sink)
        world.feed(sink.host, ev.PeerConnected(source.host.endpoint))
        world.advance(0.1)
    assert sent.count("GrantRequest") <= 2 * 10 + 1
