"""What is not wanted any more is forgotten: engines that restart under new names do not add up."""

from __future__ import annotations

import pytest

from kvxferd.core import Settings
from kvxferd.wire import worker as wk
from tests.support.simulation import IDS, TOKENS, World

HOLD_S = 60.0


@pytest.fixture
def world() -> World:
    return World(settings=Settings(max_hold_s=HOLD_S))


def test_engines_and_agents_that_nobody_wants_are_forgotten_when_others_are_learnt(world):
    prefill, decode = world.host("p"), world.host("d")
    (sink,) = world.engine(decode, "decode")
    for number in range(8):
        (source,) = world.engine(prefill, f"prefill-{number}")
        source.fill(IDS, TOKENS, seed=number)
        ticket = sink.pull(source.publish(f"t{number}", IDS, TOKENS), IDS, TOKENS)
        assert isinstance(sink.ended(ticket), wk.Delivered)
        source.close()
        world.advance(HOLD_S * 0.6)
    (mover,) = [m for m in decode.movers.values() if m.alive]
    assert len(mover.remotes) <= 2
    rank = decode.node.sessions[sink.session].rank
    assert len(list(rank.topology.engines())) <= 2
    with pytest.raises(Exception, match="prefill-0"):
        rank.topology.get_engine_info("prefill-0")


def test_what_is_wanted_again_and_again_is_kept(world):
    prefill, decode = world.host("p"), world.host("d")
    (sink,) = world.engine(decode, "decode")
    (source,) = world.engine(prefill, "prefill")
    for number in range(5):
        (other,) = world.engine(prefill, f"other-{number}")
        for publisher in (source, other):
            publisher.fill(IDS, TOKENS, seed=number)
            ref = publisher.publish(f"t{number}-{publisher.session}", IDS, TOKENS)
            assert isinstance(sink.ended(sink.pull(ref, IDS, TOKENS)), wk.Delivered)
        other.close()
        world.advance(HOLD_S * 0.6)
    handshakes = [r for r in decode.records if getattr(r, "engine_id", None) == "prefill"]
    assert len([r for r in handshakes if type(r).__name__ == "HandshakeRecord"]) == 1
