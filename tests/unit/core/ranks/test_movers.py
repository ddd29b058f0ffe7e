"""What a node keeps of each mover."""

from __future__ import annotations

import pytest

from kvxferd.core.ranks import movers as core_movers
from kvxferd.core.ranks.movers import Mover
from kvxferd.ids import AgentName, Endpoint, MoverId, SessionId
from tests.support.simulation import IDS, TOKENS


def test_the_agents_that_a_peer_names_are_bounded_and_push_out_its_own_alone(
    world, source, sink, monkeypatch
):
    """Each grant may name another: what was known of each was kept for ten minutes."""
    each = core_movers.REMOTE_OVERHEAD_BYTES + len(b"metadata")
    monkeypatch.setattr(core_movers, "MAX_REMOTE_BYTES_PER_PEER", 3 * each)
    assert sink.reads(source.publish("t1", IDS, TOKENS))
    movers, (number,) = sink.host.node.movers, sink.host.movers
    mover = movers.get(number)
    assert mover is not None
    honest, liar = set(mover.remotes), Endpoint("tcp://liar:9441")
    for name in "abcde":
        movers.load_remotes(number, liar, [(name, b"metadata", 0)])
    assert set(mover.remotes) == honest | set("cde")
    assert mover.remote_bytes_of[liar] == 3 * each
    for name in "bcdef":
        movers.load_remotes(number, liar, [(name, b"metadata", 0)])
    assert set(mover.remotes) == honest | set("def")
    for number_of_page in range(9):  # and each may name its fence page by other metadata
        movers.load_remotes(number, liar, [("f", b"metadat%d" % number_of_page, 0)])
        assert mover.remote_bytes_of[liar] <= 3 * each


def test_the_plans_of_a_mover_are_bounded_and_loaded_again_where_one_is_needed(world, sink, monkeypatch):
    """They are counted as they are decoded there, for 5 KiB each: as they are sent, both would have room."""
    monkeypatch.setattr(core_movers, "MAX_PLAN_BYTES_PER_MOVER", 8192)
    sources = [world.engine(world.host(f"p{tp}"), f"prefill{tp}", tp=tp) for tp in (1, 2)]
    ((number_of_mover, mover),) = sink.host.movers.items()
    for number in range(3):
        for first, *others in sources:
            ref = first.publish(f"t{number}", IDS, TOKENS)
            for other in others:
                other.ready(f"t{number}")
            assert sink.reads(ref)
            assert len(mover.plans) == 1
            assert list(mover.plans) == list(sink.host.node.movers.get(number_of_mover).plans)


@pytest.mark.parametrize("is_resident", [False, True])
def test_a_resident_mover_that_was_to_end_is_not_waited_for(world, is_resident):
    """It may be stuck in its library. A child is killed, and dead within a moment."""
    movers = world.host("d").node.movers
    first, second = (
        Mover(MoverId(100 + n), SessionId(1), AgentName(f"m{n}"), resident=is_resident) for n in range(2)
    )
    movers.add(first)
    movers.add(second)
    assert movers.kill_others(second)
    assert movers.kill_others(second) is not is_resident
