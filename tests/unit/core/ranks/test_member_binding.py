"""A rank of an engine that spans nodes is spoken for by the daemon that joined it, and by no other."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.client.session import RETRIED_ON_REREGISTER
from kvxferd.core import events as ev
from kvxferd.core.ranks.rank import MemberRank
from kvxferd.errors import Code
from kvxferd.ids import Incarnation
from kvxferd.wire import worker as wk
from kvxferd.wire.common import Message
from kvxferd.wire.peer import JoinRank, LeaveRank, RankPollingRequest, RankReady, RequestDone
from tests.support.member_engines import KEY, MEMBER_KEY, SECOND, STRANGER_KEY, is_not_allowed, second
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Host, Worker, World, spec_of

SECRETS = ("guessed", "0" * 32)  # an empty or a long one is refused before: unit/wire/test_field_limits


@pytest.fixture(params=["keys", "secrets"])
def world(request: pytest.FixtureRequest) -> World:
    """With CURVE a member is known by its key, without by its secret."""
    world = World()
    if request.param == "keys":
        world.keys = {"p1": MEMBER_KEY, "evil": STRANGER_KEY}
    return world


@pytest.fixture
def stages(world: World) -> list[Worker]:
    home = world.host("p0")
    spec = spec_of("prefill", pp=2, layers=4, home=home.endpoint)
    stages = [world.register(home, spec), world.register(world.host("p1"), second(spec))]
    for stage in stages:
        stage.fill(IDS, TOKENS, seed=1)
    return stages


@pytest.fixture
def sink(world: World) -> Worker:
    return world.engine(world.host("d"), "decode", layers=4)[0]


def record_of(home: Host) -> MemberRank:
    engine = home.node.registry.get(KEY)
    assert engine is not None
    record = engine.ranks[SECOND]
    assert isinstance(record, MemberRank)
    return record


def as_stranger(world: World, home: Host, message: Message) -> Message:
    """Send as a daemon that the allow-lists admit, and return its answer."""
    (reply,) = world.send_request(home, message, b"evil", world.keys.get("evil", ""))
    return reply


@pytest.mark.parametrize("secret", SECRETS)
def test_a_strangers_rank_ready_does_not_make_a_transfer_readable(world, stages, sink, secret):
    ref = stages[0].publish("t1", IDS, TOKENS)
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    ready = RankReady(
        request=7,
        engine_id=KEY.engine_id,
        generation="g1",
        rank=SECOND,
        transfer_id="t1",
        incarnation=stages[1].incarnation,
        secret=secret,
    )
    assert is_not_allowed(as_stranger(world, stages[0].host, ready))
    world.settle()
    assert sink.ended(ticket) is None
    stages[1].ready("t1")
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert sink.num_wrong(SINK_IDS, TOKENS, seed=1) == 0


@pytest.mark.parametrize("secret", SECRETS)
def test_a_strangers_leave_rank_ends_nothing(world, stages, sink, secret):
    record = record_of(stages[0].host)
    ref = stages[0].publish("t1", IDS, TOKENS)
    leave = LeaveRank(
        request=7, boot=record.boot, engine_id=KEY.engine_id, generation="g1", rank=SECOND, secret=secret
    )
    assert is_not_allowed(as_stranger(world, stages[0].host, leave))
    assert record_of(stages[0].host) is record
    assert not stages[0].received(wk.Released)
    stages[1].ready("t1")
    assert sink.reads(ref)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("incarnation", ["first", "another"])
def test_a_replayed_join_redirects_nothing(world, stages, incarnation, secret):
    """Boot, agent and incarnation stand in every manifest: whoever fetched one knows them."""
    record = record_of(stages[0].host)
    stages[0].publish("t1", IDS, TOKENS)
    binding = msgspec.structs.replace(record.joined.binding, incarnation=Incarnation(incarnation))
    manifest = msgspec.structs.replace(record.joined, binding=binding)
    join = JoinRank(request=7, boot=record.boot, manifest=manifest, secret=secret)
    assert is_not_allowed(as_stranger(world, stages[0].host, join))
    assert record_of(stages[0].host) is record
    assert (record.route, record.incarnation) == (b"p1", "first")
    assert not stages[0].received(wk.Released)


def test_an_answer_counts_from_the_member_that_was_asked_alone(world, stages, sink):
    """Not from another route, and not from another key on the same route."""
    home = stages[0].host
    stages[1].ready("t1")
    ref = stages[0].publish("t1", IDS, TOKENS)
    world.cut.add(("p0", "p1"))
    sink.say(wk.Prepare(ref=ref))
    (requested,) = [
        a for a in home.node.peer_requests._open.values() if isinstance(a.message, RankPollingRequest)
    ]
    done = RequestDone(request=requested.message.request)
    world.feed(home, ev.PeerRequest(b"evil", done, world.keys.get("evil", "")))
    if world.keys:
        world.feed(home, ev.PeerRequest(b"p1", done, STRANGER_KEY))
    assert requested.message.request in home.node.peer_requests._open
    world.feed(home, ev.PeerRequest(b"p1", done, world.keys.get("p1", "")))
    assert requested.message.request not in home.node.peer_requests._open


def test_a_rank_whose_daemon_fell_silent_is_not_another_keys(world, stages):
    """Without keys it is the newcomer's: its silence is all that shows that a daemon is dead."""
    record, home = record_of(stages[0].host), stages[0].host
    del world.hosts["p1"]
    world.advance(2 * world.settings.silent_after_s)
    join = JoinRank(request=7, boot="boot-evil", manifest=record.joined, secret="another")
    reply = as_stranger(world, home, join)
    assert is_not_allowed(reply) if world.keys else isinstance(reply, RequestDone)


def test_two_daemons_with_one_rank_by_mistake_do_not_take_it_from_each_other(world, stages):
    world.keys.pop("evil", None)
    if world.keys:
        world.keys["p2"] = MEMBER_KEY  # one key file for all nodes
    late = world.register(world.host("p2"), stages[1].spec)
    world.advance(60)
    assert record_of(stages[0].host).route in (b"p1", b"p2")
    assert stages[1].received(wk.Registered)
    if not world.keys:
        assert [refused.code for refused in late.received(wk.Refused)] == [Code.NOT_ALLOWED]
        assert record_of(stages[0].host).route == b"p1"


@pytest.mark.parametrize("world", ["keys"], indirect=True)  # a secret is no proof: a restart makes another
def test_a_rank_whose_mover_is_replaced_is_kept_for_its_key(world, stages):
    record, home = record_of(stages[0].host), stages[0].host
    (mover,) = stages[1].host.movers.values()
    mover.die()  # its rank leaves, and joins again with another mover
    binding = msgspec.structs.replace(record.joined.binding, agent="evil/1")
    manifest = msgspec.structs.replace(record.joined, binding=binding)
    assert is_not_allowed(
        as_stranger(world, home, JoinRank(request=7, boot="evil", manifest=manifest, secret="guessed"))
    )
    world.advance(2)
    assert record_of(home).route == b"p1"


@pytest.mark.parametrize("is_of_other_shape", [True, False])
def test_who_joined_first_has_no_rank_refused_for_good(world, stages, is_of_other_shape):
    """After a restart of the home another daemon may be first, and what it says of its rank be nonsense."""
    joined = record_of(stages[0].host).joined
    if is_of_other_shape:
        joined = msgspec.structs.replace(joined, spec=msgspec.structs.replace(joined.spec, tp_size=2))
    else:
        joined = msgspec.structs.replace(joined, layout=stages[0].layout)
    restarted = World()
    home = restarted.host("p0")
    assert home.endpoint == stages[0].host.endpoint
    restarted.feed(
        home,
        ev.PeerRequest(
            b"evil", JoinRank(request=7, boot="b", manifest=joined, secret="guessed"), STRANGER_KEY
        ),
    )
    assert home.node.registry.get(KEY) is not None
    (refused,) = restarted.register(home, stages[0].spec).received(wk.Refused)
    assert refused.code in RETRIED_ON_REREGISTER
