"""A source's block ids come in pages, each asked for when the one before is there and has room."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvxferd.core.limits.table import BLOCK_ID_BYTES
from kvxferd.core.source import grants
from kvxferd.errors import Code
from kvxferd.layout import num_id_bytes
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Message
from kvxferd.wire.peer import GrantReply, PeerRefused, ReleaseGrant
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Worker, World

PAGE_IDS = 2
NUM_PAGES = -(-len(IDS) // PAGE_IDS)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grants, "MAX_PAGE_BYTES", 4 * PAGE_IDS)


def deliver(world: World, change: Callable[[Message], Message | None]) -> list[Message]:
    """Deliver all messages between the daemons, changed; return those that arrive. None: it is lost."""
    arrived = []
    while world.network:
        envelope = world.network.popleft()
        message = change(PEER_MESSAGES.decode(envelope.payload))
        if message is not None:
            arrived.append(message)
            envelope.payload = encode(message)
            world.arrive(envelope)
    return arrived


def start_pull(world: World, source: Worker, sink: Worker) -> int:
    world.hold_network = True
    return sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)


def test_a_long_list_comes_in_pages(world: World, source: Worker, sink: Worker) -> None:
    ticket = start_pull(world, source, sink)
    replies = [m for m in deliver(world, lambda message: message) if isinstance(m, GrantReply)]
    assert [num_id_bytes(reply.blocks) for reply in replies] == [4 * PAGE_IDS] * (NUM_PAGES - 1) + [
        4 * (len(IDS) - PAGE_IDS * (NUM_PAGES - 1))
    ]
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert source.host.node.is_idle


def test_a_page_that_is_lost_is_asked_for_again(world: World, source: Worker, sink: Worker) -> None:
    ticket, lost = start_pull(world, source, sink), list[Message]()

    def lose_the_second(message: Message) -> Message | None:
        if isinstance(message, GrantReply):
            lost.append(message)
        return None if lost and message is lost[-1] and len(lost) == 2 else message

    deliver(world, lose_the_second)
    world.hold_network = False
    world.advance(world.settings.resend_s + 0.1)
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"blocks": {}, "has_more": True}, Code.BAD_FRAME),  # it would be asked for ever
        ({"fence_word": b"w" * 16}, Code.RELEASED),  # the pages are of two transfers
        ({"lease_s": -1.0}, Code.BAD_FRAME),
    ],
    ids=["more, and no ids", "another word", "a lease that is none"],
)
def test_a_second_page_that_makes_no_sense_fails_its_pull_alone(
    world: World, source: Worker, sink: Worker, change: dict[str, object], code: Code
) -> None:
    ticket, num_replies = start_pull(world, source, sink), 0

    def spoil_the_second(message: Message) -> Message | None:
        nonlocal num_replies
        num_replies += isinstance(message, GrantReply)
        is_second = isinstance(message, GrantReply) and num_replies == 2
        return msgspec.structs.replace(message, **change) if is_second else message

    arrived = deliver(world, spoil_the_second)
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (code, True)
    assert [type(m) for m in arrived if isinstance(m, GrantReply | ReleaseGrant)] == [
        *[GrantReply] * 2, ReleaseGrant,
    ]  # fmt: skip
    world.hold_network = False
    good = sink.pull(source.publish("t2", IDS, TOKENS), SINK_IDS, TOKENS)
    assert isinstance(sink.ended(good), wk.TicketDelivered)


def test_a_second_page_that_is_refused_gives_the_grant_back(
    world: World, source: Worker, sink: Worker
) -> None:
    ticket, num_replies = start_pull(world, source, sink), 0

    def refuse_the_second(message: Message) -> Message:
        nonlocal num_replies
        num_replies += isinstance(message, GrantReply)
        if isinstance(message, GrantReply) and num_replies == 2:
            return PeerRefused(request=message.request, code=Code.BUSY, message="no room")
        return message

    deliver(world, refuse_the_second)
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (Code.BUSY, True)
    assert not source.host.node.published.table.by_grant


def test_a_page_without_room_fails_its_pull_as_busy(
    world: World, source: Worker, sink: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket, memory = start_pull(world, source, sink), sink.host.node.context.ledger[BLOCK_ID_BYTES]

    def fill_behind_the_first(message: Message) -> Message:
        if isinstance(message, GrantReply):
            monkeypatch.setattr(memory, "limit", memory.held)
        return message

    replies = [m for m in deliver(world, fill_behind_the_first) if isinstance(m, GrantReply)]
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (Code.BUSY, True)
    assert len(replies) < NUM_PAGES
    assert not source.host.node.published.table.by_grant
    assert memory.held == 0


def test_a_transfer_that_ends_between_two_pages_is_not_read(
    world: World, source: Worker, sink: Worker
) -> None:
    ticket, num_replies = start_pull(world, source, sink), 0

    def end_behind_the_first(message: Message) -> Message:
        nonlocal num_replies
        if isinstance(message, GrantReply):
            num_replies += 1
            source.say(wk.Unpublish(transfer_id="t1"))
        return message

    deliver(world, end_behind_the_first)
    assert num_replies == 1
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (Code.RELEASED, True)
