"""Workers and daemons that speak version 1 get nothing that 0.1 does not know."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.route_versions import MAX_ROUTES, RouteVersions
from kvxferd.errors import Code
from kvxferd.wire import peer
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Versions
from tests.support import schema_0_1
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Envelope, Host, Worker, World, mover_of, spec_of


class World1(World):
    """Workers, and daemons named in `old`, speak version 1: what they get is held to 0.1's schema."""

    def __init__(self) -> None:
        super().__init__()
        self.versions = Versions(1, 1)
        self.old: set[str] = set()
        self.num_frames = 0

    def _do(self, host: Host, effect: fx.Effect) -> None:
        worker = host.workers.get(effect.session) if isinstance(effect, fx.SendToWorker) else None
        if worker is not None and worker.versions.newest == 1:
            schema_0_1.DAEMON.decode(encode(effect.message))
            self.num_frames += 1
        super()._do(host, effect)

    def arrive(self, envelope: Envelope) -> None:
        if {envelope.source, envelope.target} & self.old:
            message = PEER_MESSAGES.decode(envelope.payload)
            if isinstance(message, peer.PeerHello):
                envelope.payload = encode(msgspec.structs.replace(message, versions=Versions(1, 1)))
            else:
                schema_0_1.PEER.decode(envelope.payload)
            self.num_frames += 1
        super().arrive(envelope)


@pytest.fixture
def world() -> World1:
    return World1()


def move(world: World, source: Worker, sink: Worker, name: str) -> None:
    source.fill(IDS, TOKENS, 7)
    ticket = sink.pull(source.publish(name, IDS, TOKENS), SINK_IDS, TOKENS)
    world.settle()
    ended = sink.ended(ticket)
    assert isinstance(ended, wk.Delivered), ended
    assert sink.num_wrong(SINK_IDS, TOKENS, 7) == 0


def test_a_life_between_workers_and_daemons_of_version_1(world: World1) -> None:
    world.old = {"b"}
    a, b = world.host("a"), world.host("b")
    (source,), (sink,) = world.engine(a, "prefill"), world.engine(b, "decode")
    move(world, source, sink, "t1")
    assert {session.version for host in (a, b) for session in host.node.sessions.values()} == {1}
    assert a.node.route_versions.version_of(b"b") == 1
    assert b.node.peers.version_of(a.endpoint) == 1
    mover_of(sink).die()
    world.advance(1.0)
    move(world, source, sink, "t2")
    sink.say(wk.Suspend())
    assert sink.heard(wk.Suspended)
    source.close()
    assert world.num_frames > 10


@pytest.mark.parametrize("newest", [1, 2])
def test_an_engine_that_spans_daemons_of_version_1(world: World1, newest: int) -> None:
    """A member of version 1 cannot say which memory its rank has written: then the publisher must."""
    world.old = {"member"}
    home, member = world.host("home"), world.host("member")
    spec = spec_of("prefill", pp=2, home=home.endpoint)
    world.versions = Versions(1, newest)
    first = world.register(home, spec)
    world.versions = Versions(1, 1)
    second = world.register(member, msgspec.structs.replace(spec, pp_rank=1))
    world.advance(5.0)
    (sink,) = world.engine(world.host("c"), "decode")
    for stage in (first, second):
        stage.fill(IDS, TOKENS, 7)
    ref = first.publish("t", IDS, TOKENS)
    second.say(wk.Ready(transfer_id="t"))
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    world.advance(3.0)
    ended = sink.ended(ticket)
    if newest == 2:
        assert isinstance(ended, wk.Delivered), ended
    else:
        assert ended is None or ended.code is Code.TRANSFER_NOT_READY
    assert home.node.route_versions.version_of(b"member") == 1
    assert home.node.route_versions.version_of(b"c") == peer.PEER_VERSIONS.newest


def test_what_was_agreed_on_is_kept_for_each_connection() -> None:
    world = World()
    world.versions = Versions(1, 9)
    a, b = world.host("a"), world.host("b")
    (source,), (sink,) = world.engine(a, "prefill"), world.engine(b, "decode")
    move(world, source, sink, "t1")
    assert {session.version for host in (a, b) for session in host.node.sessions.values()} == {
        wk.WORKER_VERSIONS.newest
    }
    assert (a.node.route_versions.version_of(b"b"), b.node.peers.version_of(a.endpoint)) == (
        peer.PEER_VERSIONS.newest,
        peer.PEER_VERSIONS.newest,
    )


def test_a_peer_that_chooses_a_version_not_offered_is_refused() -> None:
    world = World()
    a = world.host("a")
    (source,) = world.engine(a, "prefill")
    world.hold_network = True
    (sink,) = world.engine(world.host("b"), "decode")
    ticket = sink.pull(source.publish("t", IDS, TOKENS), SINK_IDS, TOKENS)
    greet = PEER_MESSAGES.decode(world.network.popleft().payload)
    assert isinstance(greet, peer.PeerHello)
    answer = encode(peer.PeerWelcome(request=greet.request, version=7, boot="b"))
    world._post("a", "b", lambda m: world_event(a, m), PEER_MESSAGES.decode(answer))
    world.deliver()
    failed = sink.ended(ticket)
    assert isinstance(failed, wk.Failed)
    assert failed.code is Code.BAD_VERSION


def world_event(host: Host, message: object) -> ev.PeerReply:
    return ev.PeerReply(host.endpoint, message)


def test_routes_are_bounded_and_those_in_use_stay() -> None:
    routes = RouteVersions()
    routes.set_version(b"used", 2)
    for number in range(MAX_ROUTES + 10):
        routes.set_version(number.to_bytes(4, "little"), 2)
        assert routes.version_of(b"used") == 2
    assert len(routes._greetings) == MAX_ROUTES
    assert routes.version_of(b"never greeted") == 1
