"""A source's block ids come in pages, each asked for when the one before is there and has room."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from kvxferd.core.limits.table import BLOCK_ID_BYTES
from kvxferd.core.source import grants
from kvxferd.errors import Code
from kvxferd.layout import num_id_bytes
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Message
from kvxferd.wire.peer import GrantReply, PeerRefused
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Worker, World, delivers

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


def test_a_long_list_comes_in_pages(world, source, sink):
    ticket = start_pull(world, source, sink)
    replies = [m for m in deliver(world, lambda message: message) if isinstance(m, GrantReply)]
    assert [num_id_bytes(reply.blocks) for reply in replies] == [4 * PAGE_IDS] * (NUM_PAGES - 1) + [
        4 * (len(IDS) - PAGE_IDS * (NUM_PAGES - 1))
    ]
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert source.host.node.is_idle


def change_the_second(change: Callable[[GrantReply], Message | None]) -> Callable[[Message], Message | None]:
    """Return how to deliver all messages as they are, and the second page changed."""
    numbers = itertools.count(1)

    def deliver_one(message: Message) -> Message | None:
        is_second = isinstance(message, GrantReply) and next(numbers) == 2
        return change(message) if is_second else message

    return deliver_one


def test_a_page_that_is_lost_is_asked_for_again(world, source, sink):
    ticket = start_pull(world, source, sink)
    deliver(world, change_the_second(lambda page: None))
    world.hold_network = False
    world.advance(world.settings.peer.request_timeout_s + 0.1)
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)


def refuse(page: GrantReply) -> PeerRefused:
    return PeerRefused(request=page.request, code=Code.BUSY, message="no room")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (partial(replace, blocks={}, has_more=True), Code.BAD_FRAME),  # it would be asked for ever
        (partial(replace, fence_word=b"w" * 16), Code.RELEASED),  # the pages are of two transfers
        (partial(replace, lease_s=-1.0), Code.BAD_FRAME),
        (refuse, Code.BUSY),
    ],
    ids=["more, and no ids", "another word", "a lease that is none", "a refusal"],
)
def test_a_second_page_that_is_none_fails_its_pull_alone_and_gives_the_grant_back(
    world, source, sink, change, code
):
    ticket = start_pull(world, source, sink)
    arrived = deliver(world, change_the_second(change))
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (code, True)
    assert len([m for m in arrived if isinstance(m, GrantReply | PeerRefused)]) == 2
    assert not source.host.node.published.table.by_grant
    world.hold_network = False
    assert delivers(source, sink, "t2")


def test_a_page_without_room_fails_its_pull_as_busy(world, source, sink, monkeypatch):
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


def test_a_transfer_that_ends_between_two_pages_is_not_read(world, source, sink):
    ticket = start_pull(world, source, sink)

    def end_behind_the_first(message: Message) -> Message:
        if isinstance(message, GrantReply):
            source.say(wk.Unpublish(transfer_id="t1"))
        return message

    arrived = deliver(world, end_behind_the_first)
    assert len([m for m in arrived if isinstance(m, GrantReply)]) == 1
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (Code.RELEASED, True)
