"""An engine id is its user's through a restart of the daemon, for some minutes, and within bounds."""

from __future__ import annotations

import msgspec

from kvxferd.core import events as ev
from kvxferd.core.context import NodeContext
from kvxferd.core.ranks import generation_order, ownerships
from kvxferd.core.ranks.generation_order import GenerationOrder
from kvxferd.core.ranks.ownerships import Ownerships
from kvxferd.core.settings import Settings
from kvxferd.errors import Code
from kvxferd.ids import BootId, Endpoint, EngineId, EngineKey, Generation
from kvxferd.wire import worker as wk
from tests.support.simulation import World, spec_of


def restarted(world: World, name: str):
    """The next daemon of that node, with what the last one had kept."""
    listed = world.hosts[name].node.ownerships.saved_users()
    host = world.host(name)
    world.feed(host, ev.OwnershipsLoaded(listed))
    return host


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
    world.advance(2 * world.settings.ownership_s)
    second.close()
    world.advance(world.settings.ownership_s - 1)
    assert refusals(world.register(host, spec_of("prefill"), uid=1001)) == [Code.NOT_ALLOWED]
    world.advance(2)
    assert world.register(host, spec_of("prefill"), uid=1001).received(wk.Registered)
    assert host.node.ownerships.saved_users() == (("prefill", 1001),)


def test_who_never_had_a_readable_rank_owns_nothing(world):
    host = world.host("p")
    host.give_movers = False
    world.register(host, spec_of("prefill"), uid=1001).close()
    assert host.node.ownerships.saved_users() == ()


def test_an_operator_gives_an_id_back(world):
    world.register(world.host("p"), spec_of("prefill"), uid=1001).close()
    host = restarted(world, "p")
    world.feed(host, ev.DisownRequested("prefill"))
    assert world.register(host, spec_of("prefill"), uid=1000).received(wk.Registered)


def test_root_takes_over_and_has_it_then(world):
    host = world.host("p")
    world.register(host, spec_of("prefill"), uid=1000).close()
    world.register(host, spec_of("prefill", generation="g2"), uid=0)
    assert host.node.ownerships.saved_users() == (("prefill", 0),)
    assert refusals(world.register(host, spec_of("prefill", generation="g3"), uid=1000)) == [Code.NOT_ALLOWED]


def test_nobody_replaces_an_engine_whose_ranks_are_all_on_other_nodes(world):
    """It has no user at its home, so whoever was on that node could end it by a start of another name."""
    home = world.host("p0")
    spec = spec_of("big", tp=2, home=home.endpoint)
    assert world.register(world.host("p1"), spec).received(wk.Registered)
    key, other = spec.key, msgspec.structs.replace(spec, generation="g2")
    assert refusals(world.register(home, other, uid=4242)) == [Code.NOT_ALLOWED]
    assert not home.node.registry.is_superseded(key)
    scheduler = world.connect(home, 4242)
    scheduler.say(wk.Attach(request=5, engine_id="big", generation="g1"))
    assert scheduler.received(wk.Registered)
    beside = world.register(home, msgspec.structs.replace(spec, tp_rank=1), uid=1000)
    assert beside.received(wk.Registered)
    beside.close()
    assert world.register(home, other, uid=1000).received(wk.Registered)


def test_the_daemons_own_user_may_replace_an_engine_of_other_nodes():
    world = World(settings=Settings(own_uid=1000))
    home = world.host("p0")
    world.register(world.host("p1"), spec_of("big", home=home.endpoint))
    replaced = spec_of("big", home=home.endpoint, generation="g2")
    assert world.register(home, replaced, uid=1000).received(wk.Registered)


# --- bounds


def owned() -> Ownerships:
    endpoint = Endpoint("tcp://a:1")
    return Ownerships(NodeContext(boot=BootId("b"), endpoint=endpoint, settings=Settings(), new_token=str))


def test_a_users_bound_costs_that_user_the_oldest(monkeypatch):
    monkeypatch.setattr(ownerships, "MAX_PER_USER", 3)
    own = owned()
    own.rank_ready("other", 2000)
    for name in ("live", "a", "b", "c"):
        own.rank_ready(name, 1000)
        if name != "live":
            own.last_rank_left(name)
    assert dict(own.saved_users()) == {"other": 2000, "live": 1000, "b": 1000, "c": 1000}


def test_the_nodes_bound_costs_whoever_comes_and_nobody_else(monkeypatch):
    monkeypatch.setattr(ownerships, "MAX_OWNERSHIPS", 2)
    own = owned()
    own.restore((("a", 1), ("b", 2), ("c", 3)))
    own.rank_ready("d", 4)
    own.rank_ready("a", 1)
    assert dict(own.saved_users()) == {"a": 1, "b": 2}


def test_recorded_ids_are_shown_with_their_users_and_how_long_they_are_kept(world):
    host = world.host("p")
    rank = world.register(host, spec_of("prefill"), uid=1000)
    (shown,) = host.node.snapshot().ownerships
    assert (shown.engine_id, shown.uid, shown.expires_in_s) == ("prefill", 1000, None)
    rank.close()
    world.advance(100)
    (shown,) = host.node.snapshot().ownerships
    assert shown.expires_in_s == world.settings.ownership_s - 100
    assert shown.num_kept_ranks == 1
    (shown,) = restarted(world, "p").node.snapshot().ownerships
    assert shown.expires_in_s == world.settings.ownership_s


def test_ranks_that_are_kept_for_another_node_are_shown_too(world):
    node = world.host("p").node
    node.ownerships.rank_holders.restore(
        [("spanning", "g1", 0, 0, "ab" * 32), ("spanning", "g1", 0, 1, "ab" * 32)]
    )
    (shown,) = node.snapshot().ownerships
    assert (shown.engine_id, shown.uid, shown.num_kept_ranks) == ("spanning", None, 2)


# --- which generation of an engine is the newest does not depend on which rank connects again first


def key(generation: str, engine_id: str = "e") -> EngineKey:
    return EngineKey(EngineId(engine_id), Generation(generation))


def test_a_replaced_generation_that_connects_again_replaces_nothing(world):
    host = world.host("p")
    former = world.register(host, spec_of("prefill", generation="g1"))
    world.register(host, spec_of("prefill", generation="g2")).publish("t1", [1], 4)
    former.close()
    world.register(host, spec_of("prefill", generation="g1"))
    assert host.node.registry.newest(EngineId("prefill")) == key("g2", "prefill")
    assert host.node.registry.is_superseded(key("g1", "prefill"))


def test_what_an_earlier_daemon_had_is_older_than_what_it_never_met(world):
    """The generation that replaced it may register first, while it still connects again."""
    first = world.host("p")
    world.register(first, spec_of("prefill", generation="g1"))
    saved = first.node.ownerships.saved_users(), first.node.ownerships.rank_holders.saved_ranks()
    host = world.host("p")
    world.feed(host, ev.OwnershipsLoaded(*saved))
    new = world.register(host, spec_of("prefill", generation="g2"))
    world.register(host, spec_of("prefill", generation="g1"))
    assert host.node.registry.newest(EngineId("prefill")) == key("g2", "prefill")
    new.fill([1, 2], 8, seed=3)
    sink = world.engine(world.host("d"), "decode")[0]
    ticket = sink.pull(new.publish("t1", [1, 2], 8), [3, 4], 8)
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert sink.num_wrong([3, 4], 8, seed=3) == 0


def test_the_former_generation_is_the_newest_again_once_the_later_one_has_left(world):
    host = world.host("p")
    world.register(host, spec_of("prefill", generation="g1"))
    world.register(host, spec_of("prefill", generation="g2")).close()
    assert host.node.registry.newest(EngineId("prefill")) == key("g1", "prefill")


def test_the_oldest_generations_and_engines_are_forgotten(monkeypatch):
    monkeypatch.setattr(generation_order, "MAX_ENGINES", 2)
    monkeypatch.setattr(generation_order, "MAX_GENERATIONS", 2)
    order = GenerationOrder()
    for generation in ("g1", "g2", "g3"):
        order.add(key(generation))
    assert order.sort([key("g3"), key("g2"), key("g1")]) == [key("g1"), key("g2"), key("g3")]
    for engine_id in ("other", "third"):
        order.add(key("g1", engine_id))
    assert order.sort([key("g3"), key("g2")]) == [key("g3"), key("g2")]  # as they came: nothing is known
