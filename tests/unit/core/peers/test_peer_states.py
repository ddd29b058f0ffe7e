"""What a peer and a pull are shown as: each state that is documented is reached, and left again."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kvxferd.core import events as ev
from kvxferd.core.peers.peers import HELLO_RESENDS
from kvxferd.core.peers.routes import MAX_ROUTES, PeerRoutes
from kvxferd.core.sink.held_grant import GrantState
from kvxferd.core.sink.pull import PullPhase
from kvxferd.errors import Code
from kvxferd.ids import Endpoint
from kvxferd.records import PULL_STATES, RELEASE_REASONS
from kvxferd.wire import peer
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import TransferRef, Versions
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Envelope, Worker, World, spec_of


def states_of(world: World, name: str = "d") -> dict[str, str]:
    return {peer.endpoint: peer.state for peer in world.hosts[name].node.snapshot().peers}


def sent_by(world: World) -> list[str]:
    """The names of all messages that are sent from now on, whether they arrive or not."""
    sent: list[str] = []
    post = world.post
    world.post = lambda *args: [sent.append(type(args[-1]).__name__), post(*args)]  # type: ignore[method-assign]
    return sent


def test_a_peer_that_was_up_is_silent_once_its_reply_is_overdue_and_up_when_it_comes(world) -> None:
    source_host = world.host("p")
    [source], [sink] = world.engine(source_host, "prefill"), world.engine(world.host("d"), "decode")
    ref = source.publish("t1", IDS, TOKENS)
    assert sink.reads(ref)
    assert states_of(world) == {source_host.endpoint: "up"}
    world.cut.add(("d", "p"))
    sink.pull(source.publish("t2", IDS, TOKENS), SINK_IDS, TOKENS)
    hello_s = HELLO_RESENDS * world.settings.peer.request_timeout_s
    world.advance(hello_s + 0.1)
    assert states_of(world) == {source_host.endpoint: "up"}
    patience_s = max(world.settings.peer.silent_after_s, world.settings.peer.handshake_wait_s)
    world.advance(patience_s - hello_s + 0.9)
    assert states_of(world) == {source_host.endpoint: "silent"}
    world.cut.clear()
    world.advance(world.settings.peer.request_timeout_s + 0.1)
    assert states_of(world) == {source_host.endpoint: "up"}


def test_a_peer_that_does_not_answer_its_first_hello_is_silent_soon(world, sink) -> None:
    ref = TransferRef(world.host("p").endpoint, "prefill", "g1", "t", "n")
    world.cut.add(("d", "p"))
    sink.pull(ref, SINK_IDS, TOKENS)
    hello_s = HELLO_RESENDS * world.settings.peer.request_timeout_s
    world.advance(hello_s - 0.1)
    assert states_of(world) == {ref.endpoint: "connecting"}
    world.advance(0.2)
    assert states_of(world) == {ref.endpoint: "silent"}


def test_states_and_reasons_are_those_of_the_core() -> None:
    waiting = {*GrantState} - {GrantState.REFUSED, GrantState.ENDED}  # with either the pull has ended
    assert {*waiting, PullPhase.POSTED, PullPhase.STOPPING, PullPhase.IN_DOUBT} == set(PULL_STATES)
    assert set(RELEASE_REASONS) < set(Code)


def test_a_first_pull_has_two_round_trips(world, source, sink) -> None:
    """The hello goes with the question for the manifest, the grant's request comes behind: nothing else."""
    ref = source.publish("t1", IDS, TOKENS)
    world.hold_network = True
    ticket, trips = sink.pull(ref, SINK_IDS, TOKENS), []
    while world.network and sink.ended(ticket) is None:
        trips.append([type(PEER_MESSAGES.decode(sent.payload)).__name__ for sent in world.network])
        for _ in trips[-1]:
            world.arrive(world.network.popleft())
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert trips == [
        ["PeerHello", "ManifestRequest"],
        ["PeerWelcome", "ManifestReply"],
        ["GrantRequest"],
        ["GrantReply"],
    ]


def test_to_a_silent_peer_only_a_hello_is_sent_and_all_that_waits_as_soon_as_it_is_back(
    world, source, sink
) -> None:
    assert sink.reads(source.publish("t0", IDS, TOKENS))
    world.cut.add(("d", "p"))
    sink.say(wk.Abandon(ref=source.publish("t1", IDS, TOKENS)))
    ticket = sink.pull(source.publish("t2", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=300.0)
    world.advance(world.settings.gone_after_s + 0.1)
    assert sink.ended(ticket).code is Code.PEER_UNREACHABLE
    sent = sent_by(world)
    ticket = sink.pull(source.publish("t3", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=300.0)
    world.advance(3 * world.settings.peer.request_timeout_s)
    assert set(sent) == {"PeerHello"}
    world.cut.clear()
    world.advance(world.settings.peer.request_timeout_s + 0.1)
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert "AbandonTransfer" in sent


# --- two daemons that share no version of the protocol refuse each other, and say what to do


OTHER = peer.PEER_VERSIONS.newest + 1


class OtherVersions(World):
    """The host "d" offers another version, or the host "p" chooses one."""

    def __init__(self, is_chosen: bool) -> None:
        super().__init__()
        self.is_chosen = is_chosen
        self.num_answered = 0  # requests that were sent behind the hello

    def arrive(self, envelope: Envelope) -> None:
        message = PEER_MESSAGES.decode(envelope.payload)
        match message:
            case peer.PeerHello() if not self.is_chosen:
                message = msgspec.structs.replace(message, versions=Versions(OTHER, OTHER))
            case peer.PeerWelcome() if self.is_chosen:
                message = msgspec.structs.replace(message, version=OTHER)
            case peer.ManifestReply() | peer.GrantReply():
                self.num_answered += 1
        envelope.payload = encode(message)
        super().arrive(envelope)


@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_pull_from_a_peer_that_shares_no_version_fails_with_the_reason(is_chosen: bool) -> None:
    world = OtherVersions(is_chosen)
    (source,), (sink,) = world.engine(world.host("p"), "prefill"), world.engine(world.host("d"), "decode")
    failed = sink.ended(sink.pull(source.publish("t", IDS, TOKENS), SINK_IDS, TOKENS))
    assert (failed.code, failed.safe_to_reuse) == (Code.BAD_VERSION, True)
    assert f"version {OTHER}" in failed.message
    assert f"this one speaks {peer.PEER_VERSIONS}; upgrade the older" in failed.message
    assert bool(world.num_answered) is is_chosen  # who refuses a hello handles nothing that comes behind it


def test_routes_are_bounded_and_those_that_greet_again_stay() -> None:
    routes = PeerRoutes()
    for number in range(MAX_ROUTES + 10):
        routes.set_endpoint(b"used", Endpoint("tcp://used:1"))
        routes.set_endpoint(number.to_bytes(4, "little"), Endpoint("tcp://other:1"))
    assert len(routes._endpoints) == MAX_ROUTES
    assert routes.endpoint_of(b"used") == "tcp://used:1"
    assert routes.endpoint_of(b"never greeted") == ""


# --- a node that many read from is lost


NUM_PULLS = 4  # that each reader has open when the node is lost
AWAY_S = 60.0


class CountingWorld(World):
    """Counts what each host sends, whether it arrives or not."""

    def __init__(self) -> None:
        super().__init__()
        self.num_sent: Counter[str] = Counter()

    def post(self, source: str, target: str, *message) -> None:
        self.num_sent[source] += 1
        super().post(source, target, *message)


def sent_after_a_loss(num_readers: int) -> tuple[int, int]:
    """Return the most that a reader sends in the minute after the loss, and what the node would send."""
    world = CountingWorld()
    (source,) = world.engine(world.host("hub"), "prefill")
    names = [f"n{number}" for number in range(num_readers)]
    sinks = [world.register(world.host(name), spec_of(f"decode-{name}")) for name in names]
    for number, sink in enumerate(sinks):
        for pull in range(NUM_PULLS):
            ref = source.publish(f"t{number}-{pull}", IDS, TOKENS, ready_tokens=0)
            sink.pull(ref, IDS, TOKENS, deadline_s=2 * AWAY_S)
    world.cut |= {pair for name in names for pair in ((name, "hub"), ("hub", name))}
    world.num_sent.clear()
    world.advance(AWAY_S)
    of_hub = world.num_sent.pop("hub")
    return max(world.num_sent.values()), of_hub


def test_readers_of_a_lost_node_send_it_a_bounded_number_of_messages_whatever_others_do():
    of_reader, of_hub = sent_after_a_loss(4)
    of_one_of_many, of_hub_of_many = sent_after_a_loss(12)
    assert of_one_of_many <= of_reader <= 50
    assert of_hub_of_many <= 3 * of_hub <= 3 * 50


def test_a_request_that_was_lost_and_then_taken_back_makes_no_peer_silent(world, source, sink):
    assert sink.reads(source.publish("t1", IDS, TOKENS))
    world.cut.add(("d", "p"))
    ticket = sink.pull(source.publish("t2", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=300.0)
    world.cut.clear()
    sink.say(wk.Cancel(ticket=ticket))
    world.advance(world.settings.gone_after_s + 1.0)
    assert states_of(world) == {source.host.endpoint: "up"}


def test_behind_a_hello_without_reply_no_request_is_sent_twice(world):
    sink = world.register(world.host("n"), spec_of("decode"))
    world.host("hub")
    world.cut |= {("n", "hub"), ("hub", "n")}
    sent = sent_by(world)
    for number in range(3):
        ref = TransferRef("tcp://hub:9441", f"prefill{number}", "g1", "t", "n")
        sink.pull(ref, IDS, TOKENS, deadline_s=AWAY_S)
    world.advance(world.settings.peer.silent_after_s / 2)
    assert (sent.count("ManifestRequest"), sent.count("PeerHello")) == (1, 3)
    world.cut.clear()
    world.advance(world.settings.peer.request_timeout_s)
    assert sent.count("ManifestRequest") == 1 + 3


# --- a connection to a peer ends: who waits there hears soon of a daemon that is gone


REFUSED = "it accepts no connection there"


def waits_at(source: Worker, sink: Worker, transfer_id: str = "t1") -> int:
    """Return a pull that waits at the source, whose ranks are not ready."""
    ref = source.publish(transfer_id, IDS, TOKENS, ready_tokens=0)
    return sink.pull(ref, SINK_IDS, TOKENS, deadline_s=300.0)


def disconnected(world: World, source: Worker, sink: Worker) -> None:
    sink.host.feed(ev.PeerDisconnected(source.host.endpoint, REFUSED))


def cut_off(world: World) -> None:
    world.cut |= {("d", "p"), ("p", "d")}


def test_what_waits_at_a_peer_that_does_not_listen_fails_with_that_cause(world, source, sink) -> None:
    ticket = waits_at(source, sink)
    cut_off(world)
    disconnected(world, source, sink)
    world.advance(world.settings.peer.restart_grace_s - 0.1)
    assert sink.ended(ticket) is None
    disconnected(world, source, sink)  # each attempt to connect is reported, and the grace is one
    world.advance(0.2)
    failed = sink.ended(ticket)
    assert (failed.code, failed.safe_to_reuse) == (Code.PEER_UNREACHABLE, True)
    assert REFUSED in failed.message
    later = waits_at(source, sink, "t2")
    disconnected(world, source, sink)
    world.advance(world.settings.peer.restart_grace_s + 0.1)
    assert sink.ended(later).code is Code.PEER_UNREACHABLE


def test_what_waits_goes_on_where_the_same_daemon_is_back_in_time(world, source, sink) -> None:
    ticket = waits_at(source, sink)
    cut_off(world)
    disconnected(world, source, sink)
    source.ready("t1")  # its reply is lost with the connection
    world.advance(world.settings.peer.restart_grace_s - 0.1)
    world.cut.clear()
    sink.host.feed(ev.PeerConnected(source.host.endpoint))
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)


def test_a_peer_that_is_dropped_takes_its_grace_along(world, source, sink) -> None:
    ticket = waits_at(source, sink)
    cut_off(world)
    disconnected(world, source, sink)
    sink.host.node.peers.drop(source.host.endpoint)
    world.advance(0.0)
    assert sink.ended(ticket).code is Code.CANCELLED
    world.cut.clear()
    later = waits_at(source, sink, "t2")
    world.advance(world.settings.peer.restart_grace_s + 0.1)
    assert sink.ended(later) is None


def test_a_peer_that_is_connected_and_slow_is_not_taken_for_one_that_is_gone(world, source, sink) -> None:
    ticket = waits_at(source, sink)
    cut_off(world)
    disconnected(world, source, sink)
    sink.host.feed(ev.PeerConnected(source.host.endpoint))
    world.advance(world.settings.peer.silent_after_s - 1.0)
    assert sink.ended(ticket) is None


def test_what_waits_at_a_former_daemon_fails_as_soon_as_another_answers(world, source, sink) -> None:
    ticket = waits_at(source, sink)
    cut_off(world)
    disconnected(world, source, sink)
    world.cut.clear()
    del world.hosts["p"]
    world.host("p").node.context.boot = "another"
    sink.host.feed(ev.PeerConnected(source.host.endpoint))
    failed = sink.ended(ticket)
    assert failed.code is Code.PEER_UNREACHABLE
    assert "started anew" in failed.message
    assert not sink.host.node.peers.snapshot({})[0].engines


def test_a_peer_that_nobody_asks_anything_is_not_greeted(world, source, sink) -> None:
    assert sink.reads(source.publish("t1", IDS, TOKENS))
    node = sink.host.node
    disconnected(world, source, sink)
    assert not node.peer_requests.num_open(source.host.endpoint)
    assert node.peers.snapshot({})[0].boot is None
    sink.host.feed(ev.PeerDisconnected("tcp://nobody:1", REFUSED))
    sink.host.feed(ev.PeerConnected("tcp://nobody:1"))
    assert sink.reads(source.publish("t2", IDS, TOKENS))


def test_a_connection_that_ends_all_the_time_has_no_request_sent_more_than_twice_a_second(
    world, source, sink
) -> None:
    waits_at(source, sink)
    sent = sent_by(world)
    for _ in range(100):
        disconnected(world, source, sink)
        sink.host.feed(ev.PeerConnected(source.host.endpoint))
        world.advance(0.1)
    assert sent.count("GrantRequest") <= 2 * 10 + 1
