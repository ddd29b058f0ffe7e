"""The outbox holds pulls and publishes, and builds their messages when it sends them."""

from __future__ import annotations

import os
from array import array

from kvxferd.client import BlockList, Event, Failed, PublishRefused, Released, TransferRef
from kvxferd.client.arguments import pack_blocks
from kvxferd.client.outbox import Outbox
from kvxferd.client.publishes import ClientPublish, ClientPublishes
from kvxferd.client.pulls import MIN_STALE_TIMERS, ClientPull, ClientPullPhase, ClientPulls
from kvxferd.errors import Code
from kvxferd.ids import Endpoint, EngineId, Generation, GroupName, TransferId
from kvxferd.layout import PackedBlocks, pack_ids
from kvxferd.wire import worker
from kvxferd.wire.common import Message
from kvxferd.wire.limits import FENCE_WORD_BYTES
from tests.support.client_harness import slots_on

REF = TransferRef(
    Endpoint("tcp://10.0.0.9:7701"), EngineId("prefill-0"), Generation("g9"), TransferId("req-1"), "ab" * 16
)
BLOCKS = pack_blocks({"full": BlockList(ids=array("i", [1, 2]))}, None, "pull")


class Page:
    """A fence page in a dictionary."""

    def __init__(self) -> None:
        self._words: dict[int, bytes] = {}

    def write(self, slot: int, word: bytes) -> None:
        self._words[slot] = word

    def read(self, slot: int) -> bytes:
        return self._words[slot]

    def overwrite(self, slot: int) -> None:
        self._words[slot] = os.urandom(FENCE_WORD_BYTES)

    def close(self) -> None:
        self._words.clear()


class Queue:
    """An outbox with its pulls and publishes, and the events that they emit."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.pulls = ClientPulls(self.events.append)
        self.publishes = ClientPublishes(slots_on(Page()), self.events.append)
        self.outbox = Outbox(self.pulls, self.publishes)

    def pull(self, deadline: float) -> ClientPull:
        pull = self.pulls.add(REF, BLOCKS, 32, deadline, lambda number: None)
        self.outbox.queue(pull)
        return pull

    def publish(self, expires_at: float, transfer_id: str = "req-1") -> ClientPublish:
        publish = self.publishes.add(TransferId(transfer_id), BLOCKS, 32, 1, expires_at, ())
        self.outbox.queue(publish)
        return publish

    def sent(self, now: float) -> list[Message]:
        messages: list[Message] = []
        while (outgoing := self.outbox.pop(True, 1, now)) is not None:
            messages.append(outgoing.message)
        return messages


def test_deadlines_and_leases_are_those_of_the_moment_of_sending() -> None:
    queue = Queue()
    queue.pull(deadline=30.0)
    queue.publish(expires_at=60.0)
    assert queue.outbox.pop(False, 1, now=2.0) is None  # no daemon takes requests yet
    pull, publish = queue.sent(now=12.5)
    assert isinstance(pull, worker.PullRequest)
    assert isinstance(publish, worker.Publish)
    assert (pull.deadline_s, publish.lease_s) == (17.5, 47.5)


def test_what_has_ended_before_its_turn_is_not_sent() -> None:
    queue = Queue()
    cancelled, late = queue.pull(deadline=30.0), queue.pull(deadline=5.0)
    released, expired = queue.publish(60.0, "req-1"), queue.publish(5.0, "req-2")
    queue.pulls.cancel(cancelled.ticket.number)
    queue.publishes.release_locally(released.transfer_id, Code.UNPUBLISHED)
    assert queue.sent(now=6.0) == []
    first, second, third, fourth = queue.events
    assert isinstance(first, Failed)
    assert isinstance(third, Failed)
    assert (first.code, third.code) == (Code.CANCELLED, Code.DEADLINE)
    assert second == Released(TransferId("req-1"), Code.UNPUBLISHED)
    assert fourth == Released(TransferId("req-2"), Code.LEASE_EXPIRED)
    assert late.ticket is third.ticket
    assert expired.transfer_id == "req-2"


def test_an_item_that_has_ended_keeps_no_block_ids_alive() -> None:
    queue = Queue()
    pull, publish = queue.pull(deadline=30.0), queue.publish(expires_at=60.0)
    queue.pulls.cancel(pull.ticket.number)
    queue.publishes.release_locally(publish.transfer_id, Code.UNPUBLISHED)
    assert (pull.blocks, publish.blocks) == ({}, {})
    (failed, _) = queue.events
    assert isinstance(failed, Failed)
    assert list(failed.blocks["full"].ids) == [1, 2]  # the event has them


def test_pulls_that_were_never_sent_are_sent_to_the_next_daemon() -> None:
    queue = Queue()
    kept, held = queue.pull(deadline=30.0), queue.pull(deadline=30.0)
    held.awaits_gpu = True
    queue.pulls.cancel(queue.pull(deadline=30.0).ticket.number)
    queue.outbox.connection_lost()
    assert queue.sent(now=1.0) == []
    assert queue.pulls.replay() == [kept]


def test_timers_of_ended_pulls_do_not_wait_for_their_deadline() -> None:
    queue = Queue()
    kept = queue.pull(deadline=30.0)
    for _ in range(4 * MIN_STALE_TIMERS):
        queue.pulls.cancel(queue.pull(deadline=1e9).ticket.number)
    assert len(queue.pulls._timers) <= MIN_STALE_TIMERS + 4
    assert queue.pulls.next_deadline() == 30.0
    queue.pulls.expire(31.0)
    assert kept.phase is ClientPullPhase.ENDED


def test_a_refused_publish_is_not_sent_in_the_place_of_the_next_of_its_id() -> None:
    queue = Queue()
    queue.publish(expires_at=60.0)
    refused = worker.PublishRefused(transfer_id=TransferId("req-1"), code=Code.BUSY, message="full")
    queue.publishes.handle_refused(refused, now=1.0)
    again = queue.publish(expires_at=90.0)
    (publish,) = queue.sent(now=10.0)
    assert isinstance(publish, worker.Publish)
    assert (publish.nonce, publish.lease_s) == (again.nonce, 80.0)
    assert [type(event) for event in queue.events] == [PublishRefused]


def test_a_request_is_short_by_its_block_ids() -> None:
    queue = Queue()
    queue.pull(deadline=30.0)
    assert queue.outbox.has_one_short_item(8)
    assert not queue.outbox.has_one_short_item(7)
    queue.pull(deadline=30.0)
    assert not queue.outbox.has_one_short_item(1 << 20)


def test_an_extension_is_short_by_its_block_ids() -> None:
    queue = Queue()
    blocks = {GroupName("full"): PackedBlocks(pack_ids([1, 2]))}
    queue.outbox.queue(worker.Ready(transfer_id=TransferId("req-1"), blocks=blocks))
    assert queue.outbox.has_one_short_item(8)
    assert not queue.outbox.has_one_short_item(7)
