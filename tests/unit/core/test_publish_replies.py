"""A publish that wants a reply has one, in version 3 alone; no other publish has."""

from __future__ import annotations

from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from tests.support.simulation import World

IDS, TOKENS = [3, 1], 8


def test_one_reply_before_the_release() -> None:
    world = World()
    (rank,) = world.engine(world.host("p"), "prefill")
    rank.publish("quiet", IDS, TOKENS)
    assert not rank.heard(wk.PublishAccepted)
    ref = rank.publish("t1", IDS, TOKENS, wants_reply=True)
    assert rank.heard(wk.PublishAccepted) == [wk.PublishAccepted(transfer_id="t1")]
    assert ref.transfer_id == "t1"
    rank.say(wk.Unpublish(transfer_id="t1"))
    kinds = [type(m) for m in rank.inbox if isinstance(m, wk.PublishAccepted | wk.Released)]
    assert kinds == [wk.PublishAccepted, wk.Released]


def test_a_refusal_is_the_only_reply() -> None:
    world = World()
    (rank,) = world.engine(world.host("p"), "prefill")
    rank.publish("t1", [1, 1], TOKENS, wants_reply=True)
    assert not rank.heard(wk.PublishAccepted)
    assert [m.code for m in rank.heard(wk.PublishRefused)] == [Code.BLOCKS_INVALID]
