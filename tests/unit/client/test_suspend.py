"""Sleep mode: memory goes only after Suspended, and comes back in a new mapping."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvxferd.client import Failed, RankHandle, Released, Suspended
from kvxferd.client.events import Event, PullTicket, Quiesced
from kvxferd.client.fence_slots import FenceSlots
from kvxferd.client.memory_export import MemoryExport
from kvxferd.client.publishes import ClientPublishes
from kvxferd.client.pulls import ClientPulls
from kvxferd.client.registration import RankRole
from kvxferd.client.session import HANDSHAKE_TIMEOUT_S, REREGISTER_TIMEOUT_S, ClientSession
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import Endpoint, EngineId, Generation, RegionId, TransferId
from kvxferd.memory.fence import FencePage
from kvxferd.wire import common, worker
from tests.support.client_harness import (
    LAYOUT,
    REF,
    REGION,
    SPEC,
    Stage,
    blocks,
    events_of,
    one_event,
    slots_on,
)
from tests.support.scripted_daemon import WAIT_S


def suspended(stage: Stage) -> RankHandle:
    """A rank whose memory is out."""
    rank = stage.rank()
    rank.suspend()
    stage.side.expect(worker.Suspend)
    stage.side.say(worker.Suspended())
    assert one_event(rank) == Suspended()
    return rank


def test_suspend_ends_publishes_and_says_when_the_memory_may_go(stage: Stage) -> None:
    rank = stage.rank()
    rank.publish("req-1", blocks(), num_tokens=48)
    stage.side.expect(worker.Publish)
    rank.suspend()
    rank.suspend()  # again: nothing more
    stage.side.expect(worker.Suspend)
    assert rank.poll() == []
    assert rank.memory_in_use
    stage.side.say(worker.Released(transfer_id="req-1", why=Code.SUSPENDED))
    stage.side.say(worker.Suspended())
    assert events_of(rank, 2) == [Released("req-1", Code.SUSPENDED), Suspended()]
    assert not rank.memory_in_use


def test_a_suspended_rank_takes_no_requests(stage: Stage) -> None:
    rank = suspended(stage)
    with pytest.raises(EngineError, match="resume it first") as refused:
        rank.publish("req-1", blocks(), num_tokens=48)
    assert refused.value.code is Code.SUSPENDED
    with pytest.raises(EngineError, match="resume it first"):
        rank.pull(REF, blocks(), num_tokens=48, deadline_s=9.0)
    assert stage.side.is_silent()


def test_a_suspended_rank_keeps_no_memory_alive(stage: Stage) -> None:
    inode = os.fstat(stage.memory.fd).st_ino
    before = _own_fds(inode)
    rank = stage.rank()
    assert _own_fds(inode) == before + 2  # what would be registered again, and what the daemon got
    rank.suspend()
    stage.side.expect(worker.Suspend)
    stage.side.say(worker.Suspended())
    one_event(rank)
    stage.side.close()
    assert _own_fds(inode) == before


def _own_fds(inode: int) -> int:
    """How many descriptors of this process are that file."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.fstat(int(name)).st_ino == inode
        except OSError:
            continue  # the folder's own
    return count


def test_a_refused_resume_leaves_the_rank_suspended(stage: Stage) -> None:
    rank = suspended(stage)
    resuming = stage.calling(rank.resume, {REGION: stage.memory}, WAIT_S)
    resume = stage.side.expect(worker.Resume)
    stage.side.say(worker.Refused(request=resume.request, code=Code.REGION_UNSEALED, message="seal it"))
    with pytest.raises(EngineError, match="seal it"):
        resuming.result(WAIT_S)
    with pytest.raises(EngineError, match="resume it first"):
        rank.publish("req-1", blocks(), num_tokens=48)
    again = stage.calling(rank.resume, {REGION: stage.memory}, WAIT_S)
    resume = stage.side.expect(worker.Resume)
    stage.side.accept_resume(resume.request, stage.new_mover())
    again.result(WAIT_S)


def test_a_resume_that_times_out_goes_on(stage: Stage) -> None:
    rank = suspended(stage)
    with pytest.raises(KvxferdError, match="has not answered") as late:
        rank.resume({REGION: stage.memory}, 0.1)
    assert late.value.code is Code.DEADLINE
    rank.pull(REF, blocks(), num_tokens=48, deadline_s=9.0)
    resume = stage.side.expect(worker.Resume)
    stage.side.accept_resume(resume.request, stage.new_mover())
    stage.side.expect(worker.PullRequest)


def test_pulls_that_no_daemon_heard_of_fail_safely(stage: Stage) -> None:
    rank = stage.rank()
    stage.lose(rank)
    ticket = rank.pull(REF, blocks(), num_tokens=48, deadline_s=30.0)
    rank.suspend()
    event = events_of(rank)[0]
    assert isinstance(event, Failed)
    assert (event.ticket, event.code, event.safe_to_reuse) == (ticket, Code.SUSPENDED, True)


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_dead_mover_is_as_good_as_the_daemons_word(stage: Stage, asked: str) -> None:
    rank = stage.rank()
    rank.publish("req-1", blocks(), num_tokens=48)
    stage.side.expect(worker.Publish)
    if asked == "before":
        rank.suspend()
        stage.side.expect(worker.Suspend)
    stage.lose(rank)
    if asked == "after":
        rank.suspend()
    assert one_event(rank) == Released("req-1", Code.SUSPENDED)
    assert rank.poll() == []
    stage.mover.die()
    assert one_event(rank) == Suspended()
    stage.daemon.start()
    side = stage.accept()
    assert side.is_silent()  # a suspended rank has nothing to register
    resuming = stage.calling(rank.resume, {REGION: stage.memory}, WAIT_S)
    side.register(stage.new_mover())
    resuming.result(WAIT_S)


# --- what a session does first: the word before the event, the movers' end before `Suspended`


@pytest.fixture
def page() -> Iterator[FencePage]:
    page = FencePage.create()
    yield page
    page.close()


def connected(events: list[Event]) -> ClientSession:
    """Return a session whose registration is under way."""
    exports = MemoryExport((worker.RegionExport(RegionId(REGION), 4096),), ())
    session = ClientSession("rank", FenceSlots(), 1, events.append)
    session.register(RankRole(SPEC, LAYOUT, exports))
    session.connection_made(0.0)
    session.handle(
        worker.Welcome(version=worker.WORKER_VERSIONS.newest, boot_id="boot", lease_s=30.0, max_hold_s=600.0),
        0.0,
    )
    return session


def test_without_a_daemon_the_word_is_overwritten_before_the_event(page: FencePage) -> None:
    words: list[bytes] = []
    publishes = ClientPublishes(slots_on(page), lambda event: words.append(page.read(publish.slot)))
    publish = publishes.add(TransferId("t1"), {}, 1, 1, 10.0, ())
    word = page.read(publish.slot)
    publishes.release_locally(TransferId("t1"), Code.LEASE_EXPIRED)
    assert len(words) == 1
    assert words[0] != word


def test_a_mover_that_was_offered_maps_the_memory_until_it_is_dead() -> None:
    """Its daemon may have bound it, and died before `Registered`."""
    events: list[Event] = []
    session = connected(events)
    session.handle(worker.MoverOffered(number=1), 0.1)
    session.connection_lost(0.2, Code.DAEMON_LOST, "gone")
    session.suspend()
    session.tick(0.3)
    assert events == []
    session.movers_exited(session.epoch)
    assert events == [Suspended()]


def test_memory_that_was_taken_back_is_offered_to_no_other_daemon() -> None:
    events: list[Event] = []
    session = connected(events)
    session.handle(worker.MoverOffered(number=1), 0.1)
    session.connection_lost(0.2, Code.DAEMON_LOST, "gone")
    session.suspend()
    session.connection_made(0.3)
    session.handle(
        worker.Welcome(version=worker.WORKER_VERSIONS.newest, boot_id="next", lease_s=30.0, max_hold_s=600.0),
        0.3,
    )
    sent = []
    while outgoing := session.pop_outgoing(0.3):
        sent.append(type(outgoing.message))
    assert sent == [worker.Hello]


def test_a_daemons_doubt_ends_no_doubt() -> None:
    """The client gave up by itself; the daemon's late Failed says that something may write."""
    events: list[Event] = []
    pulls = ClientPulls(events.append)
    ref = common.TransferRef(Endpoint("tcp://n:1"), EngineId("e"), Generation("g"), TransferId("t"), "n")
    pull = pulls.add(ref, {}, 1, 1.0, lambda ticket: None)
    assert isinstance(pull.ticket, PullTicket)
    assert pulls.build_message(pull, 1, 0.0) is not None
    pulls.expire(2.0)
    late = worker.TicketFailed(
        ticket=pull.ticket.number, code=Code.DEADLINE, message="late", safe_to_reuse=False, retry_after_s=0.0
    )
    pulls.handle_failed(late)
    assert [type(event) for event in events] == [Failed]
    pulls.handle_quiesced(worker.TicketQuiesced(ticket=pull.ticket.number))
    assert [type(event) for event in events] == [Failed, Quiesced]


def test_a_daemon_that_does_not_reply_to_hello_is_given_up() -> None:
    session = ClientSession("rank", FenceSlots(), 1, lambda event: None)
    session.connection_made(1.0)
    assert session.next_deadline() == 1.0 + HANDSHAKE_TIMEOUT_S
    session.tick(0.9 + HANDSHAKE_TIMEOUT_S)
    with pytest.raises(KvxferdError):
        session.tick(1.0 + HANDSHAKE_TIMEOUT_S)


def test_a_daemon_that_does_not_reply_to_a_registration_after_a_reconnect_is_given_up(
    page: FencePage,
) -> None:
    session = connected([])
    _, register = [session.pop_outgoing(0.0) for _ in range(2)]
    assert register is not None
    assert isinstance(register.message, worker.Register)
    registered = worker.Registered(request=register.message.request, endpoint=Endpoint("tcp://n:1"))
    session.handle(registered, 0.1, page)
    session.connection_lost(0.2, Code.DAEMON_LOST, "gone")
    session.connection_made(0.3)
    session.handle(
        worker.Welcome(version=worker.WORKER_VERSIONS.newest, boot_id="next", lease_s=30.0, max_hold_s=600.0),
        0.4,
    )
    session.tick(0.3 + REREGISTER_TIMEOUT_S)
    with pytest.raises(KvxferdError):
        session.tick(0.4 + REREGISTER_TIMEOUT_S)


# --- a registration under way is never another's


def exports() -> MemoryExport:
    """Each has an incarnation of its own."""
    return MemoryExport((worker.RegionExport(RegionId(REGION), 4096),), ())


def test_suspended_waits_for_the_reply_to_a_registration_that_is_under_way() -> None:
    """The daemon has the descriptors of the first memory, and would map it for the resume's."""
    events: list[Event] = []
    page = FencePage.create()
    try:
        session = ClientSession("rank", FenceSlots(), 1, events.append)
        session.register(RankRole(SPEC, LAYOUT, exports()))
        session.connection_made(0.0)
        welcome = worker.Welcome(
            version=worker.WORKER_VERSIONS.newest, boot_id="boot", lease_s=30.0, max_hold_s=600.0
        )
        session.handle(welcome, 0.0)
        sent = [session.pop_outgoing(0.0) for _ in range(2)]
        assert sent[1] is not None
        assert isinstance(sent[1].message, worker.Register)

        session.suspend()
        session.tick(0.1)
        assert events == []
        with pytest.raises(EngineError, match="before its Suspended") as e:
            session.resume(exports())
        assert e.value.code is Code.OUT_OF_PLACE

        registered = worker.Registered(request=sent[1].message.request, endpoint="tcp://n:1")
        session.handle(registered, 0.2, page)
        outgoing = session.pop_outgoing(0.2)
        assert outgoing is not None
        assert isinstance(outgoing.message, worker.Suspend)
        session.handle(worker.Suspended(), 0.3)
        assert events == [Suspended()]
    finally:
        page.close()
