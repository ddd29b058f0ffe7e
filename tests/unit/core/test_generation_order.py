"""Which generation of an engine is the newest does not depend on which rank connects again first."""

from __future__ import annotations

from kvxferd.core import events as ev
from kvxferd.core import generation_order
from kvxferd.core.generation_order import GenerationOrder
from kvxferd.ids import EngineId, EngineKey, Generation
from kvxferd.wire import worker as wk
from tests.support.simulation import spec_of


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
    assert isinstance(sink.ended(ticket), wk.Delivered)
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
