"""Engine ids, ranks and generations are their owners', through a restart of the daemon and within limits."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kvxferd.client.session import RETRIED_ON_REREGISTER
from kvxferd.core import events as ev
from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SaveOwnerships
from kvxferd.core.limits.table import EARLY_READY, OWNED_RANKS, RETRY_LATER_S
from kvxferd.core.peers.remote_engine import manifest_bytes
from kvxferd.core.ranks import owners as core_owners
from kvxferd.core.ranks.owners import Owners, daemon_owner, user_owner
from kvxferd.core.ranks.rank import MemberRank
from kvxferd.core.settings import Settings
from kvxferd.errors import Code
from kvxferd.ids import AgentName, BootId, Endpoint, EngineId, EngineKey, Generation, Incarnation, Rank
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import encode
from kvxferd.wire.common import Binding, Message, RankManifest, RegionAddress
from kvxferd.wire.outlines import PEER_OUTLINES
from kvxferd.wire.peer import JoinRank, LeaveRank, PeerRefused, RankPollingRequest, RankReady, RequestDone
from tests.support.low_limits import lower
from tests.support.simulation import (
    BLOCK_TOKENS,
    IDS,
    SINK_IDS,
    TOKENS,
    Host,
    Worker,
    World,
    manifest_of,
    spec_of,
)

MEMBER_KEY, STRANGER_KEY = "0a" * 32, "0b" * 32
KEY, SECOND = EngineKey(EngineId("prefill"), Generation("g1")), Rank(1, 0)


@pytest.fixture(params=["keys", "secrets"])
def world(request: pytest.FixtureRequest) -> World:
    world = World()
    if request.param == "keys":
        world.keys = {"p1": MEMBER_KEY, "evil": STRANGER_KEY}
    return world


def record_of(home: Host) -> MemberRank:
    """The second stage, as its home has it."""
    engine = home.node.registry.get(KEY)
    assert engine is not None
    record = engine.ranks[SECOND]
    assert isinstance(record, MemberRank)
    return record


def join(spec: EngineSpec, agent: str = "evil/1") -> JoinRank:
    """A stranger's, with what anybody who fetched the engine knows."""
    layout = attention_layout(
        spec=spec, layout="HND", num_kv_heads=2, head_dim=2, block_tokens=BLOCK_TOKENS, num_blocks=32
    )
    regions = tuple(RegionAddress(region.region, 4096, region.size_bytes) for region in layout.regions)
    manifest = RankManifest(spec, layout, Binding(AgentName(agent), b"", regions, Incarnation("first")))
    return JoinRank(request=7, boot=BootId("evil"), manifest=manifest, secret="another")


def as_stranger(world: World, home: Host, message: Message) -> Message:
    """Send as a daemon that the allow-lists admit, and return its answer."""
    return as_holder_of(world, home, world.keys.get("evil", ""), message)


def as_holder_of(world: World, home: Host, key: str, message: Message) -> Message:
    said = world.send_request(home, message, b"from " + key.encode(), key)
    (reply,) = [message for message in said if isinstance(message, RequestDone | PeerRefused)]
    return reply


def second(spec: EngineSpec) -> EngineSpec:
    return msgspec.structs.replace(spec, pp_rank=1)


def is_not_allowed(reply: Message) -> bool:
    return isinstance(reply, PeerRefused) and reply.code is Code.NOT_ALLOWED


def leave_of(spec: EngineSpec, request: int) -> LeaveRank:
    """A stranger's."""
    names = {"engine_id": spec.engine_id, "generation": spec.generation, "rank": spec.rank}
    return LeaveRank(request=request, boot=BootId("evil"), secret="another", **names)


def changed(spec: EngineSpec, **changes: object) -> EngineSpec:
    return msgspec.structs.replace(spec, **changes)


def restarted(world: World, name: str) -> Host:
    """The next daemon of that node, with what the last one had kept."""
    kept = world.hosts[name].node.owners.saved_ranks()
    host = world.host(name)
    host.feed(ev.OwnershipsLoaded(kept))
    return host


def comes_back(world: World, worker: Worker, host: Host) -> Worker:
    """The worker's client connects to the next daemon."""
    again = world.connect(host)
    again.spec, again.layout, again.memory = worker.spec, worker.layout, worker.memory
    world.register_again(again)
    return again


# --- users and engine ids


def refusals(worker) -> list[Code]:
    return [m.code for m in worker.received(wk.Refused)]


def test_a_second_of_squatting_after_a_restart_takes_nobodys_engine(world):
    world.register(world.host("p"), spec_of("prefill"), uid=1000)
    host = restarted(world, "p")
    squatter = world.register(host, spec_of("prefill", generation="squatted"), uid=1001)
    publisher = world.connect(host, 1001)
    publisher.say(wk.Attach(request=5, engine_id="prefill", generation="g1"))
    assert refusals(squatter) == refusals(publisher) == [Code.NOT_ALLOWED]
    assert "uid 1000" in squatter.received(wk.Refused)[0].message
    assert world.register(host, spec_of("prefill"), uid=1000).received(wk.Registered)


def test_an_id_is_kept_for_minutes_after_the_last_rank_and_no_longer(world):
    host = world.host("p")
    first, second = (
        world.register(host, msgspec.structs.replace(spec_of("prefill", tp=2), tp_rank=rank), uid=1000)
        for rank in (0, 1)
    )
    first.close()
    world.advance(2 * world.settings.worker.ownership_s)
    second.close()
    world.advance(world.settings.worker.ownership_s - 1)
    assert refusals(world.register(host, spec_of("prefill"), uid=1001)) == [Code.NOT_ALLOWED]
    world.advance(2)
    assert world.register(host, spec_of("prefill"), uid=1001).received(wk.Registered)
    assert host.node.owners.user_of("prefill") == 1001


def test_a_rank_that_comes_back_and_is_not_readable_keeps_its_id_no_longer(world):
    host = world.host("p")
    world.register(host, spec_of("prefill"), uid=1000).close()
    world.advance(world.settings.worker.ownership_s - 1)
    host.give_movers = False
    world.register(host, spec_of("prefill"), uid=1000).close()
    world.advance(2)
    assert host.node.owners.user_of("prefill") is None


def test_who_never_had_a_readable_rank_owns_nothing(world):
    host = world.host("p")
    host.give_movers = False
    world.register(host, spec_of("prefill"), uid=1001).close()
    assert not host.node.owners.saved_ranks()


def test_an_operator_gives_an_id_back(world):
    world.register(world.host("p"), spec_of("prefill"), uid=1001).close()
    host = restarted(world, "p")
    host.feed(ev.DisownRequested("prefill"))
    assert world.register(host, spec_of("prefill"), uid=1000).received(wk.Registered)


def test_root_takes_over_and_has_it_then(world):
    host = world.host("p")
    world.register(host, spec_of("prefill"), uid=1000).close()
    world.register(host, spec_of("prefill", generation="g2"), uid=0)
    assert host.node.owners.user_of("prefill") == 0
    assert refusals(world.register(host, spec_of("prefill", generation="g3"), uid=1000)) == [Code.NOT_ALLOWED]


def test_nobody_replaces_an_engine_whose_ranks_are_all_on_other_nodes(world):
    """It has no user at its home, so whoever was on that node could end it by a start of another name."""
    home = world.host("p0")
    spec = spec_of("big", tp=2, home=home.endpoint)
    assert world.register(world.host("p1"), spec).received(wk.Registered)
    key, other = spec.key, msgspec.structs.replace(spec, generation="g2")
    assert refusals(world.register(home, other, uid=4242)) == [Code.NOT_ALLOWED]
    assert home.node.registry.successor(key) is None
    scheduler = world.connect(home, 4242)
    scheduler.say(wk.Attach(request=5, engine_id="big", generation="g1"))
    assert scheduler.received(wk.Registered)
    beside = world.register(home, msgspec.structs.replace(spec, tp_rank=1), uid=1000)
    assert beside.received(wk.Registered)
    beside.close()
    assert world.register(home, other, uid=1000).received(wk.Registered)


def test_an_operator_disowns_an_engine_whose_nodes_are_gone(world):
    """Its user at its home is not known: the home has lost its record, or no rank of it was there."""
    home = world.host("p0")
    spec = spec_of("big", tp=2, home=home.endpoint)
    assert world.register(world.host("p1"), spec).received(wk.Registered)
    del world.hosts["p1"]
    other = msgspec.structs.replace(spec, generation="g2")
    world.advance(world.settings.member_silent_after_s + 1)
    (refused,) = world.register(home, other, uid=1000).received(wk.Refused)
    assert refused.code is Code.NOT_ALLOWED
    assert "`kvxferd disown big`" in refused.message
    home.feed(ev.DisownRequested("big"))
    assert world.register(home, other, uid=1000).received(wk.Registered)


def test_the_daemons_own_user_may_replace_an_engine_of_other_nodes():
    world = World(settings=Settings(own_uid=1000))
    home = world.host("p0")
    world.register(world.host("p1"), spec_of("big", home=home.endpoint))
    replaced = spec_of("big", home=home.endpoint, generation="g2")
    assert world.register(home, replaced, uid=1000).received(wk.Registered)


def test_recorded_ids_are_shown_with_their_users_and_how_long_they_are_kept(world):
    host = world.host("p")
    rank = world.register(host, spec_of("prefill"), uid=1000)
    (shown,) = host.node.snapshot().ownerships
    assert (shown.engine_id, shown.uid, shown.expires_in_s) == ("prefill", 1000, None)
    rank.close()
    world.advance(100)
    (shown,) = host.node.snapshot().ownerships
    assert shown.expires_in_s == world.settings.worker.ownership_s - 100
    assert shown.num_kept_ranks == 1
    (shown,) = restarted(world, "p").node.snapshot().ownerships
    assert shown.expires_in_s == world.settings.worker.ownership_s


# --- who starts a generation


def test_who_joins_a_missing_rank_starts_no_generation(world):
    """The reviewer's: a home with rank 0 of 2, and a stranger with the other."""
    home = world.host("p0")
    spec = spec_of("prefill", pp=2, layers=4, home=home.endpoint)
    first = world.register(home, spec)
    assert isinstance(as_stranger(world, home, join(second(spec))), RequestDone)
    for rank in (spec, second(spec)):
        reply = as_stranger(world, home, join(changed(rank, generation=Generation("g2")), "evil/2"))
        assert is_not_allowed(reply)
        assert isinstance(reply, PeerRefused)
        assert reply.retry_after_s > 0
        assert "worker of this node" in reply.message
    assert home.node.registry.successor(KEY) is None
    first.publish("t1", IDS, TOKENS)
    assert not first.received(wk.PublishRefused)
    assert not first.received(wk.Released)


def test_a_member_starts_no_generation_while_another_has_a_rank(world):
    home = world.host("p0")
    spec = spec_of("prefill", pp=2, layers=4, home=home.endpoint)
    member = world.register(world.host("p1"), second(spec))
    assert isinstance(as_stranger(world, home, join(spec)), RequestDone)
    anew = changed(spec, generation=Generation("g2"))
    assert is_not_allowed(as_stranger(world, home, join(anew, "evil/2")))
    member.close()
    world.advance(world.settings.member_silent_after_s + 1)
    assert isinstance(as_stranger(world, home, join(anew, "evil/2")), RequestDone)


def test_no_daemon_starts_a_generation_while_a_worker_that_has_just_gone_may_be_back(world):
    home = world.host("p0")
    spec = spec_of("prefill", home=home.endpoint)
    world.register(home, spec).close()
    anew = join(changed(spec, generation=Generation("g2")), "evil/2")
    reply = as_stranger(world, home, anew)
    assert is_not_allowed(reply)
    assert "may be back" in reply.message
    world.advance(world.settings.member_silent_after_s + 1)
    assert isinstance(as_stranger(world, home, anew), RequestDone)


def test_the_only_member_of_an_engine_starts_its_next_generation(world):
    home = world.host("p0")
    spec = spec_of("prefill", home=home.endpoint)
    world.register(world.host("p1"), spec)
    again = world.register(world.hosts["p1"], changed(spec, generation=Generation("g2")))
    assert again.received(wk.Registered)
    assert home.node.registry.successor(spec.key) is not None


# --- through a restart of the home


def test_after_a_restart_of_the_home_its_ranks_are_who_had_them(world, stages):
    """Nor does a stranger take the rank of a worker here, whose client would be refused while it stays."""
    home = restarted(world, "p0")
    spec = stages[0].spec
    for tried in (
        changed(spec, pp_size=4, pp_rank=3),
        changed(spec, fingerprint="other", pp_rank=1),
        spec,
        changed(spec, generation=Generation("g2")),
    ):
        assert is_not_allowed(as_stranger(world, home, join(tried)))
    assert comes_back(world, stages[0], home).received(wk.Registered)
    reply = as_stranger(world, home, join(stages[1].spec))
    assert is_not_allowed(reply)
    assert "disown" in reply.message
    assert reply.retry_after_s > 0
    world.advance(2 * world.settings.member_heartbeat_s)
    assert not home.node.registry.get(KEY).missing()
    assert not stages[1].received(wk.Refused)
    assert (record_of(home).key, record_of(home).route) == (world.keys.get("p1", ""), b"p1")


def test_the_members_of_an_engine_without_a_rank_at_home_come_back_in_any_order(world):
    home = world.host("p0")
    spec = spec_of("prefill", pp=2, layers=4, home=home.endpoint)
    world.keys |= {"p2": "0c" * 32} if world.keys else {}
    world.register(world.host("p2"), second(spec))
    world.register(world.host("p1"), spec)
    home = restarted(world, "p0")
    assert is_not_allowed(as_stranger(world, home, join(changed(spec, generation=Generation("g2")))))
    world.advance(2 * world.settings.member_heartbeat_s)
    assert not home.node.registry.get(KEY).missing()


def test_a_rank_is_kept_for_its_key_for_minutes_and_for_a_secret_for_seconds(world, stages):
    """A member's daemon that restarts as well has the same key, and another secret."""
    home = restarted(world, "p0")
    comes_back(world, stages[0], home)
    again = comes_back(world, stages[1], world.host("p1"))
    if not world.keys:
        assert not again.received(wk.Registered)
        world.advance(world.settings.member_silent_after_s + world.settings.member_heartbeat_s)
    assert again.received(wk.Registered)
    del world.hosts["p1"]
    home = restarted(world, "p0")
    comes_back(world, stages[0], home)
    kept_s = world.settings.worker.ownership_s if world.keys else world.settings.member_silent_after_s
    world.advance(kept_s - 1)
    assert is_not_allowed(as_stranger(world, home, join(again.spec)))
    world.advance(2)
    assert isinstance(as_stranger(world, home, join(again.spec)), RequestDone)


def test_a_silent_nodes_rank_is_its_keys_until_an_operator_gives_it_back(world, stages, home):
    """Without keys it is the newcomer's: its silence is all that shows that a daemon is dead."""
    assert not home.node.disownable(KEY.engine_id)
    home.feed(ev.DisownRequested(KEY.engine_id))
    assert not home.node.registry.get(KEY).missing()  # its node is heard of
    del world.hosts["p1"]
    world.advance(world.settings.member_silent_after_s + 1)
    assert home.node.disownable(KEY.engine_id).num_ranks == 1
    if world.keys:
        assert is_not_allowed(as_stranger(world, home, join(stages[1].spec)))
        home.feed(ev.DisownRequested(KEY.engine_id))
    assert isinstance(as_stranger(world, home, join(stages[1].spec)), RequestDone)


def test_a_rank_that_has_left_is_its_daemons_for_seconds_and_an_earlier_join_of_it_is_late(world, stages):
    home, member = stages[0].host, stages[1].host
    record = record_of(home)
    late = JoinRank(
        request=record.request, boot=record.boot, manifest=record.joined, secret=member.node.member._secret
    )
    stages[1].close()
    assert as_holder_of(world, home, record.key, late).code is Code.CANCELLED
    assert is_not_allowed(as_stranger(world, home, join(stages[1].spec)))
    assert not [owner for *_, owner in home.node.owners.saved_ranks() if owner == record.owner]
    world.advance(world.settings.member_silent_after_s + 1)
    assert isinstance(as_stranger(world, home, join(stages[1].spec)), RequestDone)


def test_who_has_left_is_saved_at_once(world, stages):
    home, record, secret = stages[0].host, record_of(stages[0].host), stages[1].host.node.member._secret
    of = {"engine_id": KEY.engine_id, "generation": "g1", "rank": SECOND, "secret": secret}
    left = LeaveRank(request=record.request + 1, boot=record.boot, **of)
    effects = home.node.feed(ev.PeerRequest(record.route, left, record.key), world.now)
    assert any(isinstance(effect, SaveOwnerships) for effect in effects)


def test_nobody_here_takes_an_engine_of_other_nodes_that_is_to_come_back(world, stages):
    home = world.host("p3")
    spec = changed(stages[1].spec, engine_id="far", home=home.endpoint)
    far = world.register(world.hosts["p1"], spec)
    assert far.received(wk.Registered)
    home = restarted(world, "p3")
    refused = []
    for tried in (changed(spec, generation=Generation("g2")), spec):
        worker = world.register(home, changed(tried, home=""), uid=1001)
        refused += [m.code for m in worker.received(wk.Refused)]
    assert refused == [Code.NOT_ALLOWED, Code.NOT_ALLOWED]
    root = world.register(home, changed(spec, home=""), uid=0)
    assert [m.code for m in root.received(wk.Refused)] == [Code.RANK_TAKEN]
    world.advance(2 * world.settings.member_heartbeat_s)
    assert list(home.node.registry.get(spec.key).ranks) == [SECOND]


def test_a_rank_of_this_node_is_kept_as_long_as_its_engine_is_its_users(world, stages, home):
    """A worker that is slow to come back finds no stranger in its place, whatever that one said before."""
    assert isinstance(as_stranger(world, home, leave_of(stages[0].spec, request=7)), RequestDone)
    assert home.node.owners.num_absent(KEY.engine_id) == 0
    assert home.node.owners.user_of(KEY.engine_id) == 0
    world.advance(world.settings.worker.ownership_s + 1)
    stages[0].close()
    world.advance(world.settings.worker.ownership_s - 1)
    assert is_not_allowed(as_stranger(world, home, join(stages[0].spec)))
    world.advance(2)
    assert isinstance(as_stranger(world, home, join(stages[0].spec)), RequestDone)


# --- a rank of an engine that spans nodes is spoken for by the daemon that joined it, and by no other


SECRETS = ("guessed", "0" * 32)  # an empty or a long one is refused before: unit/wire/test_field_limits


def of_the_second_stage(what: str, record: MemberRank, secret: str) -> Message:
    """What its daemon could say of it, by what stands in every manifest: whoever fetched one knows that."""
    of = {"engine_id": KEY.engine_id, "generation": "g1", "rank": SECOND, "secret": secret}
    if what == "ready":
        return RankReady(request=7, transfer_id="t1", incarnation=record.incarnation, **of)
    if what == "leave":
        return LeaveRank(request=7, boot=record.boot, **of)
    incarnation = Incarnation("another") if what == "join of another mapping" else record.incarnation
    binding = msgspec.structs.replace(record.joined.binding, incarnation=incarnation)
    manifest = msgspec.structs.replace(record.joined, binding=binding)
    return JoinRank(request=7, boot=record.boot, manifest=manifest, secret=secret)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("what", ["ready", "leave", "join", "join of another mapping"])
def test_what_a_stranger_says_of_a_rank_changes_nothing(world, stages, home, reader, what, secret):
    record = record_of(home)
    ticket = reader.pull(stages[0].publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    assert is_not_allowed(as_stranger(world, home, of_the_second_stage(what, record, secret)))
    world.settle()
    assert record_of(home) is record
    assert (record.route, record.incarnation) == (b"p1", "first")
    assert not stages[0].received(wk.Released)
    assert reader.ended(ticket) is None
    stages[1].ready("t1")
    assert isinstance(reader.ended(ticket), wk.TicketDelivered)
    assert reader.num_wrong(SINK_IDS, TOKENS, seed=1) == 0


def test_an_answer_counts_from_the_member_that_was_asked_alone(world, stages, home, reader):
    """Not from another route, and not from another key on the same route."""
    stages[1].ready("t1")
    ref = stages[0].publish("t1", IDS, TOKENS)
    world.cut.add(("p0", "p1"))
    reader.say(wk.Prepare(ref=ref))
    (requested,) = [
        a for a in home.node.peer_requests._open.values() if isinstance(a.message, RankPollingRequest)
    ]
    done = RequestDone(request=requested.message.request)
    home.feed(ev.PeerRequest(b"evil", done, world.keys.get("evil", "")))
    if world.keys:
        home.feed(ev.PeerRequest(b"p1", done, STRANGER_KEY))
    assert requested.message.request in home.node.peer_requests._open
    home.feed(ev.PeerRequest(b"p1", done, world.keys.get("p1", "")))
    assert requested.message.request not in home.node.peer_requests._open


def test_two_daemons_with_one_rank_by_mistake_do_not_take_it_from_each_other(world, stages, home):
    world.keys.pop("evil", None)
    if world.keys:
        world.keys["p2"] = MEMBER_KEY  # one key file for all nodes
    late = world.register(world.host("p2"), stages[1].spec)
    world.advance(60)
    assert record_of(home).route in (b"p1", b"p2")
    assert stages[1].received(wk.Registered)
    if not world.keys:
        assert [refused.code for refused in late.received(wk.Refused)] == [Code.NOT_ALLOWED]
        assert record_of(home).route == b"p1"


@pytest.mark.parametrize("is_of_other_shape", [True, False])
def test_who_joined_first_has_no_rank_refused_for_good(stages, home, is_of_other_shape):
    """After a restart of the home another daemon may be first, and what it says of its rank be nonsense."""
    joined = record_of(home).joined
    if is_of_other_shape:
        joined = msgspec.structs.replace(joined, spec=changed(joined.spec, tp_size=2))
    else:
        joined = msgspec.structs.replace(joined, layout=stages[0].layout)
    anew = World()
    home = anew.host("p0")
    message = JoinRank(request=7, boot="b", manifest=joined, secret="guessed")
    home.feed(ev.PeerRequest(b"evil", message, STRANGER_KEY))
    assert home.node.registry.get(KEY) is not None
    (refused,) = anew.register(home, stages[0].spec).received(wk.Refused)
    assert refused.code in RETRIED_ON_REREGISTER


# --- which generation of an engine is the newest does not depend on which rank connects again first


def test_a_replaced_generation_that_connects_again_replaces_nothing(world):
    host = world.host("p")
    former = world.register(host, spec_of("prefill", generation="g1"))
    world.register(host, spec_of("prefill", generation="g2")).publish("t1", [1], 4)
    former.close()
    world.register(host, spec_of("prefill", generation="g1"))
    assert host.node.registry.newest("prefill") == EngineKey("prefill", "g2")
    assert host.node.registry.successor(EngineKey("prefill", "g1")) is not None


def test_what_an_earlier_daemon_had_is_older_than_what_it_never_met(world, sink):
    """The generation that replaced it may register first, while it still connects again."""
    world.register(world.host("p"), spec_of("prefill", generation="g1"))
    host = restarted(world, "p")
    new = world.register(host, spec_of("prefill", generation="g2"))
    world.register(host, spec_of("prefill", generation="g1"))
    assert host.node.registry.newest("prefill") == EngineKey("prefill", "g2")
    new.fill([1, 2], 8, seed=3)
    ticket = sink.pull(new.publish("t1", [1, 2], 8), [3, 4], 8)
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert sink.num_wrong([3, 4], 8, seed=3) == 0


def test_the_former_generation_is_the_newest_again_once_the_later_one_has_left(world):
    host = world.host("p")
    world.register(host, spec_of("prefill", generation="g1"))
    world.register(host, spec_of("prefill", generation="g2")).close()
    assert host.node.registry.newest("prefill") == EngineKey("prefill", "g1")


# --- limits


def owners() -> Owners:
    endpoint = Endpoint("tcp://a:1")
    return Owners(NodeContext(boot=BootId("b"), endpoint=endpoint, settings=Settings(), new_token=str))


def test_the_nodes_limit_leaves_room_for_an_owner_that_has_little(monkeypatch):
    """However many secrets a daemon without a key names, they count as one owner's."""
    lower(monkeypatch, OWNED_RANKS, 16)
    kept = owners()
    kept.restore((f"e{n}", "g", 0, 0, daemon_owner("", str(n))) for n in range(20))
    assert [of for of, *_ in kept.saved_ranks()] == [f"e{n}" for n in range(6, 20)]  # the latest 14
    for engine_id, owner in (
        ("e30", user_owner(1000)),
        ("e31", user_owner(1000)),
        ("e32", daemon_owner("0a", "s")),
    ):
        kept.set_present(EngineKey(engine_id, "g"), Rank(0, 0), owner)
    assert [of for of, *_ in kept.saved_ranks()][14:] == ["e30", "e32"]


def test_the_oldest_generations_and_engines_are_forgotten(monkeypatch):
    monkeypatch.setattr(core_owners, "MAX_ENGINES", 2)
    monkeypatch.setattr(core_owners, "MAX_GENERATIONS", 2)
    kept = owners()
    first, second, third = (EngineKey("e", name) for name in ("g1", "g2", "g3"))
    for key in (first, second, third):
        kept.add_generation(key)
    assert [kept.position_of(key) for key in (first, second, third)] == [-1, 0, 1]
    for engine_id in ("other", "e", "third"):
        kept.add_generation(EngineKey(engine_id, "g3"))
    assert kept.position_of(third) == 1  # the oldest is that which nobody has used for longest
    assert kept.position_of(EngineKey("other", "g3")) == -1


# --- what a member can make its home hold


def test_joined_ranks_are_bounded_by_key_and_in_all():
    world = World()
    home = world.host("p0")
    manifest = join(spec_of("e", home=home.endpoint), "agent").manifest
    home.node.home._member_share.limit = 16 * manifest_bytes([manifest])

    def joins(number: int) -> JoinRank:
        return join(spec_of(f"e{number}", home=home.endpoint), f"agent-{number}")

    replies = [as_holder_of(world, home, "0a", joins(n)) for n in range(15)]
    assert [getattr(a, "code", None) for a in replies] == [None] * 14 + [Code.BUSY]
    assert replies[14].retry_after_s == RETRY_LATER_S
    replies = [as_holder_of(world, home, key, joins(n)) for n, key in ((15, "0b"), (16, "0c"), (17, "0d"))]
    assert [getattr(a, "code", None) for a in replies] == [None, None, Code.BUSY]
    assert isinstance(as_holder_of(world, home, "0a", joins(0)), RequestDone)  # said again: no more
    leave = leave_of(spec_of("e16"), request=9)
    home.node.feed(ev.PeerRequest(b"from 0c", leave, "0c"), world.now)
    assert isinstance(as_holder_of(world, home, "0d", joins(17)), RequestDone)
    outline = PEER_OUTLINES.decode(encode(joins(18)))
    refused = home.node.refusal_of_join(b"from 0e", outline, "0e")  # before a layout is decoded
    assert refused is not None
    assert refused.code is Code.BUSY


def test_a_few_peers_leave_room_for_one_that_has_little():
    """Two whose ranks report transfers that nobody publishes would else leave no room for others' reports."""
    world = World()
    home = world.host("p0")
    home.node.context.ledger[EARLY_READY].limit = 16

    def is_kept(key: str, number: int) -> bool:
        ready = RankReady(
            request=100 * int(key, 16) + number, engine_id=f"{key}-0", generation="g1", rank=Rank(0, 0),
            transfer_id=f"t{number}", incarnation="first", secret="another",
        )  # fmt: skip
        said = world.send_request(home, ready, b"from " + key.encode(), key)
        return any(isinstance(message, RequestDone) for message in said)  # else it is sent again

    for key in ("0a", "0b", "0c"):
        as_holder_of(world, home, key, join(spec_of(f"{key}-0", home=home.endpoint), f"agent-{key}"))
    assert [sum(is_kept(key, number) for number in range(9)) for key in ("0a", "0b", "0c")] == [9, 5, 1]
    kept = Counter(engine.engine_id for engine, _ in home.node.published.announced)
    assert kept == {"0a-0": 9, "0b-0": 5, "0c-0": 1}


def test_a_member_that_found_its_home_busy_asks_again(world, stages):
    share = world.hosts["p0"].node.home._member_share
    share.limit = 3 * share.held // 2
    other = world.register(
        world.hosts["p1"], changed(stages[1].spec, engine_id="other", pp_size=1, pp_rank=0, num_layers=2)
    )
    assert not other.received(wk.Registered)
    assert not other.received(wk.Refused)
    stages[1].close()
    world.advance(RETRY_LATER_S + 1)
    assert other.received(wk.Registered)


def test_open_questions_follow_a_member_without_being_sent_at_once(world, stages, home):
    world.cut.add(("p0", "p1"))
    for number in range(20):
        stages[0].publish(f"t{number}", IDS, TOKENS)
        stages[0].say(wk.Unpublish(transfer_id=f"t{number}"))
    record = record_of(home)
    secret = stages[1].host.node.member._secret
    again = JoinRank(request=99, boot=record.boot, manifest=manifest_of(record), secret=secret)
    effects = home.node.feed(ev.PeerRequest(b"anew", again, world.keys.get("p1", "")), world.now)
    assert [type(effect.message) for effect in effects] == [RequestDone]
    effects = home.node.feed(ev.Tick(), world.now + world.settings.peer.request_timeout_s)
    assert len([e for e in effects if e.route == b"anew"]) == 20
