"""A probe of the way between two daemons: both directions, every refusal, deadline and lie."""

from __future__ import annotations

import math

import msgspec
import pytest

from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.core.probe_client import MAX_PROBE_S
from kvxferd.core.probe_record import ProbeRecord
from kvxferd.core.probe_server import ANY_PEER_INTERVAL_S, SAME_PEER_INTERVAL_S
from kvxferd.core.settings import Settings
from kvxferd.errors import Code
from kvxferd.ids import Endpoint, ProbeId
from kvxferd.wire import mover as mv
from kvxferd.wire import peer
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Message, Refusal
from kvxferd.wire.probe import ProbeRead, ProbeRegion
from tests.support.simulation import Envelope, Host, World

SIZE = 6 << 20
LONG_S = 2 * MAX_PROBE_S


@pytest.fixture
def world() -> World:
    return World()


def request(world: World, host: Host, endpoint: Endpoint, name: str = "p", size: int = SIZE) -> None:
    world.feed(host, ev.ProbeRequested(ProbeId(name), endpoint, size))


def only_record(host: Host) -> ProbeRecord:
    (record,) = host.probes
    return record


def assert_nothing_is_left(*hosts: Host) -> None:
    for host in hosts:
        assert host.node.probes.slot.is_free
        assert not any(mover.alive for mover in host.probe_movers.values())


def ask(
    world: World, host: Host, message: Message, route: bytes = b"stranger", key: str = ""
) -> list[Message]:
    """Send a request as a peer that is only in this test, and return the replies to it."""
    before = len(world.network)
    world.hold_network = True
    world.feed(host, ev.PeerRequest(route, message, key))
    sent = [world.network.pop() for _ in range(len(world.network) - before)]
    world.hold_network = False
    return [PEER_MESSAGES.decode(envelope.payload) for envelope in reversed(sent)]


def start(name: str = "x", number: int = 1, size: int = SIZE) -> peer.StartProbe:
    return peer.StartProbe(request=number, probe=ProbeId(name), size_bytes=size)


def refused_with(replies: list[Message]) -> Code:
    (reply,) = replies
    assert isinstance(reply, peer.PeerRefused), reply
    return reply.code


def region(size: int = SIZE, digests: int = 2) -> ProbeRegion:
    return ProbeRegion("elsewhere/1", 4096, size, b"meta", bytes(32 * digests))


def test_both_directions_and_nothing_is_left(world: World) -> None:
    a, b = world.host("a"), world.host("b")
    request(world, a, b.endpoint)
    found = only_record(a)
    assert (found.code, found.role, found.peer, found.is_ok) == (None, "requested", b.endpoint, True)
    for direction in (found.read, found.read_back):
        assert direction is not None
        assert (direction.code, direction.verified_bytes, direction.wrong_bytes) == (None, SIZE, 0)
        assert (direction.transports, direction.reach) == ("tcp", "network")
        assert direction.gigabytes_per_s == pytest.approx(SIZE / 0.5 / 1e9)
    assert (only_record(b).role, only_record(b).is_ok) == ("served", True)
    assert (len(a.probe_movers), len(b.probe_movers)) == (1, 1)
    assert_nothing_is_left(a, b)


def test_the_operator_s_own_mistakes_are_refused(world: World) -> None:
    a, b = world.host("a"), world.host("b")
    request(world, a, a.endpoint, "itself")
    request(world, a, b.endpoint, "small", 1)
    world.feed(a, ev.DrainRequested())
    request(world, a, b.endpoint, "late")
    assert [record.code for record in a.probes] == [Code.BAD_REQUEST, Code.BAD_REQUEST, Code.DRAINING]
    assert not b.probes
    assert_nothing_is_left(a, b)


def test_one_at_a_time(world: World) -> None:
    a, b = world.host("a"), world.host("b")
    world.hold_network = True
    request(world, a, b.endpoint, "first")
    request(world, a, b.endpoint, "second")
    assert (only_record(a).probe, only_record(a).code) == ("second", Code.BUSY)
    assert only_record(a).retry_after_s > 0
    assert refused_with(ask(world, a, start())) is Code.BUSY
    world.deliver()
    assert a.probes[-1].is_ok
    assert_nothing_is_left(a, b)


def test_two_that_probe_each_other_at_once_are_both_told_busy(world: World) -> None:
    a, b = world.host("a"), world.host("b")
    world.hold_network = True
    request(world, a, b.endpoint, "a")
    request(world, b, a.endpoint, "b")
    world.deliver()
    assert (only_record(a).code, only_record(b).code) == (Code.BUSY, Code.BUSY)
    assert_nothing_is_left(a, b)


def test_a_peer_may_not_ask_more_often_than_the_interval(world: World) -> None:
    a, b = world.host("a"), world.host("b")
    request(world, a, b.endpoint, "1")
    for number in range(1000):
        assert refused_with(ask(world, b, start(f"again{number}"))) is Code.BUSY
    assert len(b.probe_movers) == 1
    request(world, a, b.endpoint, "2")
    assert a.probes[-1].code is Code.BUSY
    assert 0 < a.probes[-1].retry_after_s <= SAME_PEER_INTERVAL_S
    world.advance(SAME_PEER_INTERVAL_S)
    request(world, a, b.endpoint, "3")
    assert a.probes[-1].is_ok
    assert (len(b.probe_movers), len(b.node.probes.server._ended_at)) == (2, 1)


def test_another_peer_waits_a_shorter_time(world: World) -> None:
    b = world.host("b")
    for key in ("k1", "k2"):
        ask(world, b, start(key), key.encode(), key)
        assert refused_with(ask(world, b, start("other"), b"r", "other")) is Code.BUSY  # while it runs
        (done,) = ask(world, b, peer.EndProbe(request=2, probe=ProbeId(key)), key.encode(), key)
        assert isinstance(done, peer.Done)
        assert refused_with(ask(world, b, start("other"), b"r", "other")) is Code.BUSY
        assert refused_with(ask(world, b, start(key + "2"), key.encode(), key)) is Code.BUSY
        world.advance(ANY_PEER_INTERVAL_S)
    assert len(b.probe_movers) == 2


def test_a_peer_that_starts_and_says_no_more_costs_seconds(world: World) -> None:
    b = world.host("b")
    ask(world, b, start(), b"r", "k")
    world.advance(20.0)
    assert only_record(b).code is Code.DEADLINE
    assert_nothing_is_left(b)


def test_repeated_requests_change_nothing(world: World) -> None:
    b = world.host("b")
    (first,) = ask(world, b, start(number=7), b"r", "k")
    (again,) = ask(world, b, start(number=7), b"r2", "k")
    assert isinstance(first, peer.ProbeStarted)
    assert again == first
    back = peer.ReadProbeBack(request=8, probe=ProbeId("x"), region=region())
    (report,) = ask(world, b, back, b"r2", "k")
    assert isinstance(report, peer.ProbeReport)
    assert ask(world, b, back, b"r2", "k") == [report]
    assert len(next(iter(b.probe_movers.values())).heard) == 2
    for number in (9, 10):
        assert ask(world, b, peer.EndProbe(request=number, probe=ProbeId("x")), b"r2", "k") == [
            peer.Done(request=number)
        ]
    assert only_record(b).is_ok
    assert_nothing_is_left(b)


def test_another_peer_has_no_part_in_a_probe(world: World) -> None:
    b = world.host("b")
    ask(world, b, start(), b"r", "k")
    back = peer.ReadProbeBack(request=8, probe=ProbeId("x"), region=region())
    assert refused_with(ask(world, b, back, b"q", "other")) is Code.NOT_FOUND
    ask(world, b, peer.EndProbe(request=9, probe=ProbeId("x")), b"q", "other")
    assert not b.probes
    assert isinstance(ask(world, b, back, b"r", "k")[0], peer.ProbeReport)


@pytest.mark.parametrize("lie", [region(digests=1), region(size=8 << 20)])
def test_a_region_that_contradicts_itself_is_not_read(world: World, lie: ProbeRegion) -> None:
    b = world.host("b")
    ask(world, b, start(), b"r", "k")
    back = peer.ReadProbeBack(request=8, probe=ProbeId("x"), region=lie)
    assert refused_with(ask(world, b, back, b"r", "k")) is Code.BAD_FRAME


@pytest.mark.parametrize("kind", ["fails", "mute"])
@pytest.mark.parametrize("side", ["a", "b"])
def test_a_mover_that_fails_or_stands_still(world: World, kind: str, side: str) -> None:
    a, b = world.host("a"), world.host("b")
    world.hosts[side].next_probe_mover = {kind: True}
    request(world, a, b.endpoint)
    world.advance(LONG_S)
    found = only_record(a)
    if side == "a":  # the peer's region cannot be read, and none can be made here either
        assert found.code is None
        for direction in (found.read, found.read_back):
            assert direction is not None
            assert direction.code is (Code.TRANSPORT if kind == "fails" else Code.DEADLINE)
    else:
        assert found.code in (Code.TRANSPORT, Code.DEADLINE, Code.PEER_UNREACHABLE)
    assert_nothing_is_left(a, b)


def test_the_other_direction_goes_on_where_the_first_fails(world: World) -> None:
    a, b = world.host("a"), world.host("b")
    a.next_probe_mover = {"fails": True}
    world.hold_network = True
    request(world, a, b.endpoint)
    original = world._do

    def do(host: Host, effect: fx.Effect) -> None:
        if isinstance(effect, fx.KillMover):
            a.next_probe_mover = {}
        original(host, effect)

    world._do = do
    world.deliver()
    found = only_record(a)
    assert found.read is not None
    assert found.read_back is not None
    assert (found.read.code, found.read_back.code) == (Code.TRANSPORT, None)
    assert not found.is_ok
    assert_nothing_is_left(a, b)


def test_bytes_that_differ_are_reported(world: World) -> None:
    a, b = world.host("a"), world.host("b")
    b.next_probe_mover = {"spoils": True}
    request(world, a, b.endpoint)
    found = only_record(a)
    assert found.read is not None
    assert found.read_back is not None
    assert (found.read.wrong_bytes, found.read_back.wrong_bytes) == (0, SIZE)
    assert not found.is_ok


@pytest.mark.parametrize("who", ["a", "b"])
@pytest.mark.parametrize("messages", range(8))
def test_a_side_that_dies_at_any_step(world: World, who: str, messages: int) -> None:
    a, b = world.host("a"), world.host("b")
    world.hold_network = True
    request(world, a, b.endpoint)
    for _ in range(messages):
        if world.network:
            world.arrive(world.network.popleft())
    dead = world.hosts.pop(who)
    left = b if who == "a" else a
    world.deliver()
    world.hold_network = False
    world.advance(LONG_S)
    assert len(left.probes) <= 1
    if who == "b":
        assert len(left.probes) == 1
    assert_nothing_is_left(left)
    assert dead.node is not left.node


@pytest.mark.parametrize("messages", range(8))
def test_a_peer_that_restarts_at_any_step(world: World, messages: int) -> None:
    a, b = world.host("a"), world.host("b")
    world.hold_network = True
    request(world, a, b.endpoint)
    for _ in range(messages):
        if world.network:
            world.arrive(world.network.popleft())
    b = world.host("b")
    world.deliver()
    world.hold_network = False
    world.advance(LONG_S)
    assert len(a.probes) == 1
    assert_nothing_is_left(a, b)


@pytest.mark.parametrize("who", ["a", "b"])
@pytest.mark.parametrize("messages", range(8))
@pytest.mark.parametrize("end", ["drain", "mover", "drop"])
def test_a_side_that_ends_it_at_any_step(world: World, who: str, messages: int, end: str) -> None:
    a, b = world.host("a"), world.host("b")
    world.hold_network = True
    request(world, a, b.endpoint)
    for _ in range(messages):
        if world.network:
            world.arrive(world.network.popleft())
    host = world.hosts[who]
    if end == "drain":
        world.feed(host, ev.DrainRequested())
    elif end == "drop":
        world.feed(host, ev.PeerDropRequested((b if who == "a" else a).endpoint))
    else:
        for mover in list(host.probe_movers.values()):
            mover.die()
    world.deliver()
    world.hold_network = False
    world.advance(LONG_S)
    assert len(a.probes) == 1
    assert_nothing_is_left(a, b)


def test_no_mover_can_be_had(world: World) -> None:
    a, b = world.host("a"), world.host("b")
    b.give_movers = False
    request(world, a, b.endpoint, "1")
    refusal = Refusal(Code.NIXL_UNAVAILABLE, "cannot import a transfer library")
    world.feed(b, ev.ProbeMoverUnavailable(ProbeId("1"), refusal))
    assert only_record(a).code is Code.NIXL_UNAVAILABLE
    assert_nothing_is_left(a, b)


def test_a_mover_that_comes_too_late_is_killed(world: World) -> None:
    b = world.host("b")
    b.give_movers = False
    ask(world, b, start(), b"r", "k")
    world.advance(SAME_PEER_INTERVAL_S + 10)
    assert only_record(b).code is Code.DEADLINE
    assert refused_with(ask(world, b, start("y"), b"r", "k")) is Code.BUSY  # its mover may still come
    found = b.node.feed(ev.ProbeMoverAssigned(ProbeId("x"), 99), world.now)
    assert found == [fx.KillMover(99)]
    world.feed(b, ev.MoverDied(99))
    assert_nothing_is_left(b)


class LyingPeer(World):
    """The host "b" sends something else in place of each message of one type."""

    lie: tuple[type[Message], Message] | None = None

    def arrive(self, envelope: Envelope) -> None:
        message = PEER_MESSAGES.decode(envelope.payload)
        if self.lie is not None and envelope.source == "b" and isinstance(message, self.lie[0]):
            number = message.request  # type: ignore[attr-defined]
            envelope.payload = encode(msgspec.structs.replace(self.lie[1], request=number))
        super().arrive(envelope)


def report(wire_s: float, verified: int = 1, wire_bytes: int = 1) -> peer.ProbeReport:
    return peer.ProbeReport(request=0, read=ProbeRead(verified, 0, wire_s, wire_bytes, 0.0))


@pytest.mark.parametrize(
    "lie", [peer.ProbeStarted(request=0, region=region(digests=9)), peer.Done(request=0), report(1.0),
            peer.ProbeStarted(request=0, region=region(size=8 << 20))]
)  # fmt: skip
def test_a_peer_that_lies_about_its_region(lie: Message) -> None:
    world = LyingPeer()
    a, b = world.host("a"), world.host("b")
    world.lie = (peer.ProbeStarted, lie)
    request(world, a, b.endpoint)
    assert only_record(a).code is Code.BAD_FRAME
    world.advance(LONG_S)
    assert_nothing_is_left(a, b)


@pytest.mark.parametrize(
    "lie",
    [
        report(math.nan),
        report(math.inf),
        report(-1.0),
        report(1.0, 1 << 60),
        report(1.0, 10 * SIZE),  # more passes than a reader makes over a region of that size
        report(5e-324),  # an infinite speed
        report(1e-300),
        report(1.0, 0, 0),  # a reader verifies one slice at least
        report(1.0, 1, SIZE),  # a reader verifies what it reads
        peer.Done(request=0),
    ],
)
def test_a_peer_that_lies_about_what_it_read(lie: Message) -> None:
    world = LyingPeer()
    a, b = world.host("a"), world.host("b")
    world.lie = (peer.ProbeReport, lie)
    request(world, a, b.endpoint)
    found = only_record(a)
    assert found.read is not None
    assert found.read_back is not None
    assert (found.read.code, found.read_back.code) == (None, Code.BAD_FRAME)
    assert_nothing_is_left(a, b)


def test_the_operator_is_answered_in_time_also_where_a_greeting_may_take_long() -> None:
    world = World(settings=Settings(silent_after_s=1000.0))
    a, b = world.host("a"), world.host("b")
    world.hold_network = True
    request(world, a, b.endpoint)
    world.advance(MAX_PROBE_S - 2)  # the greeting is answered then
    world.hold_network = False
    a.next_probe_mover = {"mute": True}
    world.deliver()
    world.advance(2)
    assert only_record(a).code is Code.DEADLINE
    world.advance(LONG_S)
    assert_nothing_is_left(a, b)


def test_a_reply_out_of_place_is_refused(world: World) -> None:
    b = world.host("b")
    assert refused_with(ask(world, b, report(1.0))) is Code.OUT_OF_PLACE


def test_a_mover_of_a_rank_has_no_part_in_probes(world: World) -> None:
    a = world.host("a")
    world.engine(a, "prefill")
    (mover,) = a.movers.values()
    mover.say(mv.ProbeFailed(code=Code.TRANSPORT, message="no probe"))
    assert mover.alive


def test_a_peer_that_is_not_admitted_any_more_ends_its_probe(world: World) -> None:
    b = world.host("b")
    b.node.context.allowlist = PeerAllowlist(own_key="o", allowed_keys=frozenset({"k"}))
    ask(world, b, start(), b"r", "k")
    world.feed(b, ev.AllowlistChanged(PeerAllowlist(own_key="o", allowed_keys=frozenset({"other"}))))
    assert only_record(b).code is Code.NOT_ALLOWED
    assert_nothing_is_left(b)


def test_a_peer_without_a_key_is_not_admitted_once_keys_are_listed(world: World) -> None:
    b = world.host("b")
    ask(world, b, start(), b"r", "")
    world.feed(b, ev.AllowlistChanged(PeerAllowlist(own_key="o", allowed_keys=frozenset({"k"}))))
    assert only_record(b).code is Code.NOT_ALLOWED
    assert_nothing_is_left(b)


def test_a_wait_below_a_second_is_not_told_as_none(world: World) -> None:
    b = world.host("b")
    ask(world, b, start(), b"r", "k")
    ask(world, b, peer.EndProbe(request=2, probe=ProbeId("x")), b"r", "k")
    world.advance(SAME_PEER_INTERVAL_S - 0.3)
    (reply,) = ask(world, b, start("y"), b"r", "k")
    assert isinstance(reply, peer.PeerRefused)
    assert "in 1 s" in reply.message
