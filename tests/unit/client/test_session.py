"""A session as data, with no socket and a clock that is moved: its pulls, publishes and messages in order."""

from __future__ import annotations

import itertools
import math
import os
import socket
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import pytest

from kvxferd.client import BlockList, Delivered, Failed, PublishRefused, Quiesced, Released, Suspended
from kvxferd.client.arguments import pack_blocks
from kvxferd.client.events import Event
from kvxferd.client.fence_slots import FenceSlots
from kvxferd.client.memory_export import MemoryExport
from kvxferd.client.outbox import Outbox
from kvxferd.client.publishes import ClientPublish, ClientPublishes
from kvxferd.client.pulls import (
    DEADLINE_GRACE_S,
    MIN_STALE_TIMERS,
    MOVER_DEATH_S,
    ClientPull,
    ClientPullPhase,
    ClientPulls,
)
from kvxferd.client.registration import RankRole
from kvxferd.client.session import HANDSHAKE_TIMEOUT_S, REREGISTER_TIMEOUT_S, ClientSession
from kvxferd.errors import Code, EngineError, KvxferdError, ProtocolError
from kvxferd.ids import AgentName, BootId, Endpoint, Incarnation, TransferId
from kvxferd.layout import pack_ids
from kvxferd.memory import FencePage
from kvxferd.resident.thread_mover import ThreadMover
from kvxferd.wire import worker
from kvxferd.wire.common import Message
from kvxferd.wire.limits import FENCE_SLOTS
from tests.support.client_harness import LAYOUT, REF, REGION, SPEC, WAIT_S
from tests.support.memory_transport import Fabric, MemoryTransport

BLOCKS = pack_blocks({"full": BlockList(ids=array("i", [1, 2]))}, None, "pull")
WELCOME = worker.Welcome(
    version=worker.WORKER_VERSIONS.newest, boot_id="boot", lease_s=30.0, max_hold_s=600.0
)
DELIVERED = worker.TicketDelivered(ticket=1, bytes=1, runs=1, wire_s=0.0)
FAILED = worker.TicketFailed(ticket=1, code=Code.TRANSPORT, message="", safe_to_reuse=True)
IN_DOUBT = worker.TicketFailed(ticket=1, code=Code.TRANSPORT, message="", safe_to_reuse=False)


def add(pulls: ClientPulls, deadline: float) -> ClientPull:
    return pulls.add(REF, BLOCKS, 32, deadline, lambda number: None)


@pytest.fixture
def page() -> Iterator[FencePage]:
    with closing(FencePage.create()) as made:
        yield made


class Requests:
    """A session's pulls and publishes, the events that they emit, and the outbox that sends them."""

    def __init__(self, page: FencePage) -> None:
        self.events: list[Event] = []
        self.pulls = ClientPulls(self.events.append)
        fence = FenceSlots(FENCE_SLOTS)
        fence.switch_page(page)
        self.publishes = ClientPublishes(fence, self.events.append)
        self.outbox = Outbox(self.pulls, self.publishes)

    def pull(self, deadline: float) -> ClientPull:
        pull = add(self.pulls, deadline)
        self.outbox.queue(pull)
        return pull

    def publish(self, expires_at: float, transfer_id: str = "req-1") -> ClientPublish:
        publish = self.publishes.add(TransferId(transfer_id), BLOCKS, 32, 1, expires_at, ())
        self.outbox.queue(publish)
        return publish

    def sent(self, now: float) -> list[Message]:
        return [outgoing.message for outgoing in iter(lambda: self.outbox.pop(True, 1, now), None)]


@pytest.fixture
def requests(page: FencePage) -> Requests:
    return Requests(page)


# --- pulls


class Life:
    """One pull, and everything that can happen to it, whether it makes sense or not."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.pulls = ClientPulls(self.events.append)
        self.pull = add(self.pulls, deadline=5.0)
        self.now = 0.0
        self.is_connected = True

    def send(self) -> None:
        if self.is_connected:
            self.pulls.build_message(self.pull, 1, self.now)

    def lose(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self.pulls.connection_lost(1, self.now, Code.DAEMON_LOST, "gone")

    def wait(self) -> None:
        self.now += 3.0
        self.pulls.expire(self.now)


ACTS: dict[str, Callable[[Life], object]] = {
    "sent": Life.send,
    "cancelled": lambda life: life.pulls.cancel(1),
    "delivered": lambda life: life.pulls.handle_delivered(DELIVERED),
    "failed": lambda life: life.pulls.handle_failed(FAILED),
    "in doubt": lambda life: life.pulls.handle_failed(IN_DOUBT),
    "quiesced": lambda life: life.pulls.handle_quiesced(worker.TicketQuiesced(ticket=1)),
    "dropped": lambda life: life.pulls.fail_queued(Code.SUSPENDED, ""),
    "lost": Life.lose,
    "time": Life.wait,
}


@pytest.mark.parametrize("end", ["movers live on", "movers exit", "closed"])
def test_a_pull_ends_once_and_quiesces_only_where_it_was_unsafe(end: str) -> None:
    for first, acts in itertools.product(("sent", "waiting"), itertools.product(ACTS, repeat=3)):
        story, life = (first, *acts), Life()
        if first == "sent":
            life.send()
        try:
            for act in acts:
                num_before = len(life.events)
                ACTS[act](life)
                if act == "in doubt":
                    assert Quiesced not in map(type, life.events[num_before:]), (story, "doubt ends no doubt")
        except ProtocolError:
            pass  # nonsense: the connection is lost
        life.lose()
        if end == "movers exit":
            life.pulls.movers_exited(1)
        elif end == "closed":
            life.pulls.close(Code.CANCELLED, "closed")
        life.pulls.expire(life.now + 100.0)
        life.pulls.movers_exited(1)
        terminal, *later = life.events
        assert isinstance(terminal, Delivered | Failed), story
        was_unsafe = isinstance(terminal, Failed) and not terminal.safe_to_reuse
        assert list(map(type, later)) == [Quiesced] * was_unsafe, story
        assert len(life.pulls) == 0, story


def test_timers_follow_the_phase() -> None:
    events: list[Event] = []
    pulls = ClientPulls(events.append)
    pull = add(pulls, deadline=10.0)
    assert pulls.next_deadline() == 10.0
    assert pulls.build_message(pull, epoch=1, now=1.0).deadline_s == 9.0
    assert pulls.expire(10.0) == []  # the daemon may still say how it ended
    assert pulls.next_deadline() == 10.0 + DEADLINE_GRACE_S
    pulls.connection_lost(1, 10.1, Code.DAEMON_LOST, "gone")
    assert pulls.expire(10.2) == []
    assert pulls.expire(10.0 + DEADLINE_GRACE_S) == []  # judged now, and no daemon is there to cancel it
    assert [type(event) for event in events] == [Failed]
    assert pulls.expire(100.0) == []
    pulls.movers_exited(1)
    assert [type(event) for event in events] == [Failed, Quiesced]
    assert (len(pulls), pulls.next_deadline()) == (0, math.inf)
    pulls.build_message(add(pulls, deadline=1000.0), epoch=2, now=100.0)
    pulls.connection_lost(2, 105.0, Code.DAEMON_LOST, "gone")
    assert pulls.next_deadline() == 105.0 + MOVER_DEATH_S, "judged within a second"


def test_a_progressive_pull_is_waited_for_as_long_as_its_daemon_may_have_it_wait() -> None:
    """Its deadline counts from when its source is ready, which the daemon alone knows."""
    events: list[Event] = []
    pulls = ClientPulls(events.append)
    pulls.max_hold_s = 600.0
    pull = add(pulls, deadline=10.0)
    pull.progressive = True
    assert pulls.build_message(pull, epoch=1, now=1.0).deadline_s == 9.0
    assert pulls.expire(610.0) == []
    assert not events
    assert pulls.expire(610.0 + DEADLINE_GRACE_S) == [pull.ticket.number]
    assert [(event.code, event.safe_to_reuse) for event in events] == [(Code.DEADLINE, False)]


def test_a_session_that_closes_after_its_connection_ends_its_pulls_once() -> None:
    """A resident rank's: its movers are gone, and its pulls were lost before."""
    events: list[Event] = []
    pulls = ClientPulls(events.append)
    pulls.build_message(add(pulls, deadline=9.0), epoch=1, now=0.0)
    pulls.connection_lost(1, 2.0, Code.DAEMON_LOST, "gone")
    pulls.connection_lost(1, 2.1, Code.CANCELLED, "closed")
    pulls.movers_exited(1)
    assert [(event.code, event.safe_to_reuse) for event in events] == [(Code.DAEMON_LOST, True)]


def test_other_epochs_are_left_alone() -> None:
    events: list[Event] = []
    pulls = ClientPulls(events.append)
    pulls.build_message(add(pulls, deadline=9.0), epoch=1, now=0.0)
    pulls.build_message(add(pulls, deadline=9.0), epoch=2, now=0.0)
    pulls.connection_lost(1, 0.0, Code.DAEMON_LOST, "gone")
    pulls.movers_exited(1)
    assert [event.ticket.number for event in events] == [1]
    pulls.handle_delivered(worker.TicketDelivered(ticket=2, bytes=1, runs=1, wire_s=0.0))
    assert isinstance(events[1], Delivered)


def test_timers_of_ended_pulls_do_not_wait_for_their_deadline(requests: Requests) -> None:
    kept = requests.pull(deadline=30.0)
    for _ in range(4 * MIN_STALE_TIMERS):
        requests.pulls.cancel(requests.pull(deadline=1e9).ticket.number)
    assert len(requests.pulls._timers) <= MIN_STALE_TIMERS + 4
    assert requests.pulls.next_deadline() == 30.0
    requests.pulls.expire(31.0)
    assert kept.phase is ClientPullPhase.ENDED


# --- the outbox holds pulls and publishes, and builds their messages when it sends them


def test_deadlines_and_leases_are_those_of_the_moment_of_sending(requests: Requests) -> None:
    requests.pull(deadline=30.0)
    requests.publish(expires_at=60.0)
    assert requests.outbox.pop(False, 1, now=2.0) is None  # no daemon takes requests yet
    pull, publish = requests.sent(now=12.5)
    assert isinstance(pull, worker.PullRequest)
    assert isinstance(publish, worker.Publish)
    assert (pull.deadline_s, publish.lease_s) == (17.5, 47.5)


def test_what_has_ended_before_its_turn_is_not_sent_and_keeps_no_block_ids_alive(requests: Requests) -> None:
    cancelled, late = requests.pull(deadline=30.0), requests.pull(deadline=5.0)
    released, expired = requests.publish(60.0, "req-1"), requests.publish(5.0, "req-2")
    requests.pulls.cancel(cancelled.ticket.number)
    requests.publishes.release_locally(released.transfer_id, Code.UNPUBLISHED)
    assert requests.sent(now=6.0) == []
    assert requests.pulls.expire(6.0) == []
    first, second, third, fourth = requests.events
    assert isinstance(first, Failed)
    assert isinstance(fourth, Failed)
    assert (first.code, first.ticket, fourth.code, fourth.ticket) == (
        *(Code.CANCELLED, cancelled.ticket),
        *(Code.DEADLINE, late.ticket),
    )
    assert (first.safe_to_reuse, fourth.safe_to_reuse) == (True, True)
    assert second == Released(TransferId("req-1"), Code.UNPUBLISHED)
    assert third == Released(TransferId("req-2"), Code.LEASE_EXPIRED)
    assert [ended.blocks for ended in (cancelled, late, released, expired)] == [{}] * 4
    assert list(first.blocks["full"].ids) == [1, 2]  # the event has them


def test_what_was_not_sent_is_left_to_the_replay(requests: Requests) -> None:
    kept = requests.pull(deadline=30.0)
    requests.publish(expires_at=60.0)
    requests.outbox.connection_lost()
    assert requests.sent(now=1.0) == []
    assert requests.pulls.replay() == [kept]


def test_a_refused_publish_is_not_sent_in_the_place_of_the_next_of_its_id(requests: Requests) -> None:
    requests.publish(expires_at=60.0)
    refused = worker.PublishRefused(transfer_id=TransferId("req-1"), code=Code.BUSY, message="full")
    requests.publishes.handle_refused(refused, now=1.0)
    again = requests.publish(expires_at=90.0)
    (publish,) = requests.sent(now=10.0)
    assert isinstance(publish, worker.Publish)
    assert (publish.nonce, publish.lease_s) == (again.nonce, 80.0)
    assert [type(event) for event in requests.events] == [PublishRefused]


def test_a_request_is_short_by_its_block_ids(requests: Requests) -> None:
    requests.pull(deadline=30.0)
    assert requests.outbox.pop_short(7, 1, now=1.0) is None
    assert isinstance(requests.outbox.pop_short(8, 1, now=1.0), worker.PullRequest)
    ready = worker.Ready(transfer_id=TransferId("req-1"), blocks=BLOCKS)
    requests.outbox.queue(ready)
    requests.outbox.queue(ready)
    assert requests.outbox.pop_short(1 << 20, 1, now=1.0) is None, "two are not one"
    assert requests.outbox.pop(True, 1, now=1.0)
    assert requests.outbox.pop_short(7, 1, now=1.0) is None
    assert requests.outbox.pop_short(8, 1, now=1.0) is ready
    assert requests.outbox.pop_short(8, 1, now=1.0) is None, "it is not sent twice"


def test_without_a_daemon_the_word_is_overwritten_before_the_event(page: FencePage) -> None:
    words: list[bytes] = []
    fence = FenceSlots(FENCE_SLOTS)
    fence.switch_page(page)
    publishes = ClientPublishes(fence, lambda event: words.append(page.read(publish.slot)))
    publish = publishes.add(TransferId("t1"), {}, 1, 1, 10.0, ())
    word = page.read(publish.slot)
    publishes.release_locally(TransferId("t1"), Code.LEASE_EXPIRED)
    assert len(words) == 1
    assert words[0] != word


def test_readiness_for_others_is_not_said_again_after_a_lease(requests: Requests) -> None:
    own = requests.publish(expires_at=90.0)
    name = TransferId("of-the-scheduler")
    requests.publishes.remember_ready(name, now=1.0, incarnation=Incarnation("first"))
    for now, said in ((30.9, [name]), (31.0, [])):
        publish, *reports = requests.publishes.replay(now, lease_s=30.0)
        assert (publish, [report.transfer_id for report in reports]) == (own, said)


def test_what_a_rank_reports_before_its_own_publish_is_said_again_as_long_as_that_lives(
    requests: Requests,
) -> None:
    own = requests.publish(expires_at=90.0)
    requests.publishes.remember_ready(own.transfer_id, now=1.0, incarnation=Incarnation("first"))
    publish, report = requests.publishes.replay(80.0, lease_s=30.0)
    assert (publish, report.transfer_id) == (own, own.transfer_id)


def test_a_publish_that_is_being_sent_does_not_grow(requests: Requests) -> None:
    own = requests.publish(expires_at=90.0)
    before = bytes(own.blocks["full"].ids)
    for number in (1, 2):  # the first makes a list that grows in place
        added = pack_blocks({"full": BlockList(ids=array("i", [number]))}, None, "add")
        requests.publishes.add_blocks(own, added, now=1.0)
        if number == 1:
            sent = requests.publishes.build_message(own, epoch=1, now=1.0)
    assert sent is not None
    assert sent.blocks["full"].ids == before + pack_ids([1])


# --- daemons that do not reply, and memory that is taken back


def greeted(session: ClientSession, now: float) -> ClientSession:
    """Connect it to a daemon, which welcomes it."""
    session.connection_made(now)
    session.handle(WELCOME, now)
    return session


def registering(events: list[Event]) -> ClientSession:
    """Return a session whose registration is under way."""
    session = ClientSession("rank", FenceSlots(FENCE_SLOTS), 1, events.append)
    session.register(RankRole(SPEC, LAYOUT, exports()))
    return greeted(session, 0.0)


def exports() -> MemoryExport:
    """Each has an incarnation of its own."""
    return MemoryExport((worker.RegionExport(REGION, 4096),), ())


def sent(session: ClientSession) -> list[Message]:
    return [outgoing.message for outgoing in iter(lambda: session.pop_outgoing(0.0), None)]


def reply_to(register: Message) -> worker.Registered:
    assert isinstance(register, worker.Register)
    return worker.Registered(request=register.request, endpoint=Endpoint("tcp://n:1"))


def test_a_daemon_that_does_not_reply_to_hello_is_given_up() -> None:
    session = ClientSession("rank", FenceSlots(FENCE_SLOTS), 1, lambda event: None)
    session.connection_made(1.0)
    assert session.next_deadline() == 1.0 + HANDSHAKE_TIMEOUT_S
    session.tick(0.9 + HANDSHAKE_TIMEOUT_S)
    with pytest.raises(KvxferdError):
        session.tick(1.0 + HANDSHAKE_TIMEOUT_S)


def test_a_daemon_that_does_not_reply_to_a_registration_after_a_reconnect_is_given_up(
    page: FencePage,
) -> None:
    session = registering([])
    _, register = sent(session)
    session.handle(reply_to(register), 0.1, page)
    session.connection_lost(0.2, Code.DAEMON_LOST, "gone")
    greeted(session, 0.4)
    session.tick(0.3 + REREGISTER_TIMEOUT_S)
    with pytest.raises(KvxferdError):
        session.tick(0.4 + REREGISTER_TIMEOUT_S)


def test_memory_that_is_taken_back_stays_until_an_offered_mover_is_dead_and_is_offered_to_no_other() -> None:
    """The mover's daemon may have bound it, and died before `Registered`."""
    events: list[Event] = []
    session = registering(events)
    session.handle(worker.MoverOffered(number=1), 0.1)
    session.connection_lost(0.2, Code.DAEMON_LOST, "gone")
    session.suspend()
    session.tick(0.3)
    assert events == []
    greeted(session, 0.3)
    assert [type(message) for message in sent(session)] == [worker.Hello]
    session.movers_exited(1)
    assert events == [Suspended()]


def test_a_lost_connection_ends_a_resident_mover_whose_daemon_stands_still() -> None:
    fabric, movers = Fabric(), list[ThreadMover]()

    def launch(boot: BootId, regions: tuple[worker.RegionExport, ...]) -> ThreadMover:
        movers.append(ThreadMover(AgentName("resident"), regions, partial(MemoryTransport, fabric)))
        return movers[-1]

    memory = worker.RegionExport(REGION, 4096, kind="resident", address=4096)
    session = ClientSession("rank", FenceSlots(FENCE_SLOTS), 1, lambda event: None)
    session.register(RankRole(SPEC, LAYOUT, MemoryExport((memory,), ())), launch)
    greeted(session, 0.0)
    (mover,) = movers
    with socket.socket(fileno=os.dup(mover.daemon_end)):  # while that is open, no mover ends by itself
        session.connection_lost(0.2, Code.DAEMON_LOST, "gone")
        assert mover.wait(WAIT_S)
    mover.close()


def test_suspended_waits_for_the_reply_to_a_registration_that_is_under_way(page: FencePage) -> None:
    """The daemon has the descriptors of the first memory, and would map it for the resume's."""
    events: list[Event] = []
    session = registering(events)
    _, register = sent(session)
    session.suspend()
    session.tick(0.1)
    assert events == []
    with pytest.raises(EngineError, match="before its Suspended") as refused:
        session.resume(exports())
    assert refused.value.code is Code.OUT_OF_PLACE

    session.handle(reply_to(register), 0.2, page)
    assert sent(session) == [worker.Suspend()]
    session.handle(worker.Suspended(), 0.3)
    assert events == [Suspended()]
