"""The pulls' state machine by itself: whatever happens in whatever order, each says one terminal thing."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.client import BlockList, Delivered, Failed, Quiesced
from kvxferd.client.arguments import pack_blocks
from kvxferd.client.events import Event
from kvxferd.client.pulls import (
    DEADLINE_GRACE_S,
    MOVER_DEATH_S,
    MOVES,
    ClientPull,
    ClientPullPhase,
    ClientPulls,
    EngineEvent,
)
from kvxferd.errors import Code, ProtocolError
from kvxferd.wire import worker
from tests.support.client_harness import REF

BLOCKS = pack_blocks({"full": BlockList(ids=array("i", [1, 2]))}, None, "pull")


def add(pulls: ClientPulls, deadline: float) -> ClientPull:
    return pulls.add(REF, BLOCKS, 32, deadline, lambda number: None)


def test_every_path_says_one_terminal_thing_and_quiesces_only_what_was_unsafe() -> None:
    terminal = (EngineEvent.DELIVERED, EngineEvent.FAILED_SAFE, EngineEvent.FAILED_UNSAFE)
    paths: list[tuple[ClientPullPhase, tuple[EngineEvent, ...]]] = [(ClientPullPhase.QUEUED, ())]
    ended = set()
    for phase, said in paths:
        for (start, _), (end, says) in MOVES.items():
            if start is not phase or (end is phase and says is EngineEvent.NOTHING):
                continue
            now = (*said, says) if says is not EngineEvent.NOTHING else said
            (ended.add(now) if end is ClientPullPhase.ENDED else paths.append((end, now)))
            assert sum(says in terminal for says in now) <= 1
            if end is ClientPullPhase.ENDED:
                assert sum(says in terminal for says in now) == 1
                assert (EngineEvent.QUIESCED in now) == (EngineEvent.FAILED_UNSAFE in now)
    assert ended == {
        (EngineEvent.DELIVERED,),
        (EngineEvent.FAILED_SAFE,),
        (EngineEvent.FAILED_UNSAFE, EngineEvent.QUIESCED),
    }


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
    assert (len(pulls), pulls.next_deadline()) == (0, None)


def test_a_progressive_pull_is_waited_for_as_long_as_its_daemon_may_have_it_wait() -> None:
    """Its deadline counts from when its source is ready, which the daemon alone knows."""
    events: list[Event] = []
    pulls = ClientPulls(events.append)
    pulls.max_hold_s = 600.0
    pull = add(pulls, deadline=10.0)
    pull.progressive = True
    assert pulls.build_message(pull, epoch=1, now=1.0).deadline_s == 9.0
    assert pulls.expire(10.0 + DEADLINE_GRACE_S) == []
    assert pulls.expire(610.0) == []
    assert not events
    assert pulls.expire(610.0 + DEADLINE_GRACE_S) == [pull.ticket.number]
    assert [(event.code, event.safe_to_reuse) for event in events] == [(Code.DEADLINE, False)]


def test_a_lost_pull_is_judged_within_a_second() -> None:
    events: list[Event] = []
    pulls = ClientPulls(events.append)
    pulls.build_message(add(pulls, deadline=1000.0), epoch=1, now=0.0)
    pulls.connection_lost(1, 5.0, Code.DAEMON_LOST, "gone")
    assert pulls.next_deadline() == 5.0 + MOVER_DEATH_S


def test_a_pull_whose_deadline_passed_is_not_sent() -> None:
    events: list[Event] = []
    pulls = ClientPulls(events.append)
    assert pulls.build_message(add(pulls, deadline=1.0), epoch=1, now=1.0) is None
    (event,) = events
    assert isinstance(event, Failed)
    assert event.safe_to_reuse


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


@pytest.mark.parametrize("number", [0, -1, 2, 1 << 40])
def test_a_ticket_that_was_never_given_out(number: int) -> None:
    pulls = ClientPulls(lambda event: None)
    add(pulls, deadline=1.0)
    with pytest.raises(ProtocolError, match="never requested"):
        pulls.handle_quiesced(worker.TicketQuiesced(ticket=number))


class Life:
    """One pull, and everything that can happen to it, whether it makes sense or not."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.pulls = ClientPulls(self.events.append)
        self.pull = add(self.pulls, deadline=5.0)
        self.number = self.pull.ticket.number
        self.now = 0.0

    def send(self) -> None:
        self.pulls.build_message(self.pull, 1, self.now)

    def cancel(self) -> None:
        self.pulls.cancel(self.number)

    def deliver(self) -> None:
        self.pulls.handle_delivered(worker.TicketDelivered(ticket=self.number, bytes=1, runs=1, wire_s=0.0))

    def fail_safely(self) -> None:
        self._fail(True)

    def fail_in_doubt(self) -> None:
        self._fail(False)

    def _fail(self, safe: bool) -> None:
        self.pulls.handle_failed(
            worker.TicketFailed(ticket=self.number, code=Code.TRANSPORT, message="", safe_to_reuse=safe)
        )

    def quiesce(self) -> None:
        self.pulls.handle_quiesced(worker.TicketQuiesced(ticket=self.number))

    def drop(self) -> None:
        self.pulls.fail_queued(Code.SUSPENDED, "")

    def wait(self) -> None:
        self.now += 3.0
        self.pulls.expire(self.now)


ACTS = (
    Life.send,
    Life.cancel,
    Life.deliver,
    Life.fail_safely,
    Life.fail_in_doubt,
    Life.quiesce,
    Life.drop,
    Life.wait,
)


@given(acts=st.lists(st.sampled_from(ACTS), max_size=10), quiet=st.booleans(), closed=st.booleans())
def test_any_order_of_anything(acts: list[Callable[[Life], None]], quiet: bool, closed: bool) -> None:
    life = Life()
    try:
        for act in acts:
            act(life)
    except ProtocolError:
        pass  # nonsense: the connection is lost
    life.pulls.connection_lost(1, life.now, Code.DAEMON_LOST, "gone")
    if quiet:
        life.pulls.movers_exited(1)
    if closed:
        life.pulls.close(Code.CANCELLED, "closed")
    life.pulls.expire(life.now + 100.0)
    life.pulls.movers_exited(1)
    terminal = [event for event in life.events if isinstance(event, Delivered | Failed)]
    assert len(terminal) == 1
    assert len(life.pulls) == 0
    if len(life.events) > 1:
        assert [type(event) for event in life.events] == [Failed, Quiesced]
        assert not terminal[0].safe_to_reuse
