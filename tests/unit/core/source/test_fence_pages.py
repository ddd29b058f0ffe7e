"""Whose mover serves whose fence page, and what a page that no mover can use costs: its own session."""

from __future__ import annotations

import pytest

from kvxferd.errors import Code
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from tests.support.simulation import IDS, TOKENS, delivers, mover_of, spec_of


@pytest.mark.parametrize("uid", [1001, 0])
def test_a_page_of_another_user_is_registered_by_no_mover_of_the_engine(world, uid):
    """Root is an owner of its own: it publishes for engines of its own."""
    host = world.host("p")
    stranger = world.attach(host, spec_of("prefill"), uid)
    rank = world.register(host, spec_of("prefill", publish_implies_ready=True), uid=1000)
    assert host.node.fence_pages.get(rank.session)
    assert stranger.session not in host.node.fence_pages._pages
    stranger.publish("t1", IDS, TOKENS)
    assert [m.code for m in stranger.received(wk.PublishRefused)] == [Code.OUT_OF_PLACE]


def test_root_is_told_that_it_cannot_publish_for_anothers_engine(world):
    host = world.host("p")
    world.register(host, spec_of("prefill"), uid=1000)
    root = world.attach(host, spec_of("prefill"), uid=0)
    (refused,) = root.received(wk.Refused)
    assert refused.code is Code.NOT_ALLOWED
    assert "1000" in refused.message


def test_a_page_that_no_mover_can_use_ends_its_session_alone(world, sink):
    host = world.host("p")
    (rank,) = world.engine(host, "prefill", publish_implies_ready=True)
    mover = mover_of(rank)
    bad = world.connect(host)
    bad.spoilt = True
    bad.say(wk.Attach(request=5, engine_id="prefill", generation="g1"))
    (farewell,) = bad.received(wk.Farewell)
    assert farewell.code is Code.MOVER_LOST
    assert "fence page" in farewell.message
    assert not bad.connected
    assert mover.alive
    assert mover_of(rank) is mover
    assert delivers(rank, sink, "t1")


def test_a_refusal_of_a_mover_that_was_not_asked_changes_nothing(world):
    host = world.host("p")
    (first,) = world.engine(host, "first")
    (second,) = world.engine(host, "second")
    code, text = Code.REGION_INVALID, "cannot"
    mover_of(second).say(mv.FenceRefused(session=first.session, code=code, message=text))
    assert first.connected
    assert not first.received(wk.Farewell)
    assert host.node.fence_pages.get(first.session)


def test_a_slot_without_a_word_publishes_nothing(world):
    (rank,) = world.engine(world.host("p"), "prefill")
    rank.say(
        wk.Publish(transfer_id="t1", nonce="0" * 32, blocks={}, num_tokens=1, fence_slot=3, incarnations=()),
        bytes(16),
    )
    (refused,) = rank.received(wk.PublishRefused)
    assert "slot 3 holds no word" in refused.message
