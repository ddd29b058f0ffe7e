"""An engine whose stages register with daemons on several nodes is one engine at its home."""

from __future__ import annotations

import msgspec
import pytest
from world import World, spec_of

from kvxferd.errors import Code
from kvxferd.wire import worker as wk

IDS, SINK_IDS, TOKENS = [3, 1, 2], [7, 9, 4], 11


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def spread(world):
    """Two stages on two hosts, and a reader on a third."""
    home, other = world.host("p0"), world.host("p1")
    spec = spec_of("prefill", pp=2, layers=4, home=home.endpoint)
    stages = [
        world.register(home, spec),
        world.register(other, msgspec.structs.replace(spec, pp_rank=1)),
    ]
    for stage in stages:
        stage.fill(IDS, TOKENS, seed=1)
    sink = world.engine(world.host("d"), "decode", layout="NHD", layers=4)[0]
    return stages, sink


def test_a_third_node_reads_both_stages(world, spread):
    stages, sink = spread
    assert all(stage.heard(wk.Registered) for stage in stages)
    ref = stages[0].publish("t1", IDS, TOKENS)
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    assert sink.ended(ticket) is None  # the other stage has not finished writing
    stages[1].say(wk.Ready(transfer_id="t1"))
    assert isinstance(sink.ended(ticket), wk.Delivered)
    assert sink.num_wrong(SINK_IDS, TOKENS, seed=1) == 0
    assert [[m.why for m in s.heard(wk.Released)] for s in stages] == [[Code.COMPLETED]] * 2


def test_every_source_mover_polls_before_the_grant(world, spread):
    stages, sink = spread
    movers = [m for s in stages for m in s.host.movers.values()]
    assert not any(m.attended for m in movers)
    ref = stages[0].publish("t1", IDS, TOKENS)
    stages[1].say(wk.Ready(transfer_id="t1"))
    sink.say(wk.Prepare(ref=ref))
    assert all(m.attended for m in movers)
    assert isinstance(sink.ended(sink.pull(ref, SINK_IDS, TOKENS)), wk.Delivered)
    world.advance(2 * world.settings.attend_linger_s + 0.1)  # at home, then at the member
    assert not any(m.attended for m in movers)


def test_a_publish_away_from_home_is_refused_by_name(world, spread):
    stages, _ = spread
    stages[1].publish("t1", IDS, TOKENS)
    (refused,) = stages[1].heard(wk.PublishRefused)
    assert refused.code is Code.NOT_HOME
    assert "tcp://p0:9441" in refused.message


def test_a_members_worker_that_dies_voids_the_engines_transfers(world, spread):
    stages, sink = spread
    ref = stages[0].publish("t1", IDS, TOKENS)
    word = bytes(stages[0].fence[:16])
    stages[1].close()
    assert [m.why for m in stages[0].heard(wk.Released)] == [Code.RANK_LOST]
    assert bytes(stages[0].fence[:16]) != word
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    world.advance(6)
    assert isinstance(sink.ended(ticket), wk.Failed)


def test_without_its_home_a_rank_is_refused_with_a_reason(world):
    other = world.host("p1")
    spec = spec_of("prefill", pp=2, layers=4, home="tcp://p0:9441")
    worker = world.register(other, msgspec.structs.replace(spec, pp_rank=1))
    world.advance(11)
    (refused,) = worker.heard(wk.Refused)
    assert refused.code is Code.HOME_UNREACHABLE


def test_a_home_refuses_a_rank_that_disagrees(world):
    home, other = world.host("p0"), world.host("p1")
    spec = spec_of("prefill", pp=2, layers=4, home=home.endpoint)
    world.register(home, spec)
    worker = world.register(other, msgspec.structs.replace(spec, pp_rank=1, fingerprint="other"))
    (refused,) = worker.heard(wk.Refused)
    assert refused.code is Code.SHAPE_MISMATCH


def test_a_members_mover_that_is_replaced_is_joined_anew(world, spread):
    stages, sink = spread
    first = stages[0].publish("t0", IDS, TOKENS)
    stages[1].say(wk.Ready(transfer_id="t0"))
    assert isinstance(sink.ended(sink.pull(first, SINK_IDS, TOKENS)), wk.Delivered)
    next(iter(stages[1].host.movers.values())).die()
    world.advance(1)
    ref = stages[0].publish("t1", IDS, TOKENS)
    stages[1].say(wk.Ready(transfer_id="t1"))
    assert isinstance(sink.ended(sink.pull(ref, SINK_IDS, TOKENS)), wk.Delivered)
    assert sink.num_wrong(SINK_IDS, TOKENS, seed=1) == 0
