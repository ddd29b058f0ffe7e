"""What is remembered of transfers that have ended."""

from __future__ import annotations

from kvxferd.core.limits.table import ENDED_TRANSFERS, RETRY_LATER_S
from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from tests.support.simulation import IDS, TOKENS, World


def test_an_ended_transfer_is_remembered_for_as_long_as_messages_about_it_are_repeated() -> None:
    world = World()
    source = world.engine(world.host("p"), "prefill")[0]
    node = source.host.node
    node.context.ledger[ENDED_TRANSFERS].limit = 16

    def publish(numbers: range) -> None:
        for number in numbers:
            source.publish(f"t{number}", IDS, TOKENS)
            source.say(wk.Unpublish(transfer_id=f"t{number}"))

    publish(range(15))
    (refused,) = source.received(wk.PublishRefused)
    assert (refused.transfer_id, refused.code, refused.retry_after_s) == ("t14", Code.BUSY, RETRY_LATER_S)
    world.advance(2 * node.context.settings.acknowledge_for_s)
    publish(range(15, 18))
    assert len(source.received(wk.PublishRefused)) == 1
    assert [name for _, name in node.published.ended] == [f"t{n}" for n in (*range(3, 14), 15, 16, 17)]
    world.advance(node.context.settings.tombstone_s)
    assert not len(node.published.ended)
    assert node.context.ledger[ENDED_TRANSFERS].held == 0
