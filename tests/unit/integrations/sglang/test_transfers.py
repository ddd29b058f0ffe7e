"""A request's states on either side, as SGLang polls them: aborts, doubt, and rooms that come again.

A rank stands for the daemon: it records what it is asked, and emits what a test says.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvxferd import engine as kv
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import Ticket, TransferId
from kvxferd.integrations.sglang.identity import SourceIdentity
from kvxferd.integrations.sglang.transfers import (
    MAX_EARLY_ROOMS,
    Publication,
    RankTransfers,
    Reception,
    State,
)

IDENTITY = SourceIdentity("tcp://10.0.0.1:9441", "sglang-p", "g1", "s" * 32)
ROOM = 7
PAGES = {"full": kv.BlockList(ids=[3, 4])}


class ScriptedRank:
    """The calls of a rank that the backend makes."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.events: list[kv.Event] = []
        self.refuses: KvxferdError | None = None
        self.cancelled: list[int] = []

    def _take(self, *call: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.calls.append(call)

    def publish(self, transfer_id: str, blocks: Any, num_tokens: int, **given: Any) -> None:
        self._take("publish", transfer_id, num_tokens, given["ready_tokens"], given["after"])
        assert len(given["nonce"]) == 64

    def ready(self, transfer_id: str, tokens: int | None, blocks: Any, after: Any) -> None:
        self._take("ready", transfer_id, tokens, blocks is not None, after)

    def unpublish(self, ref: Any) -> None:
        self._take("unpublish", ref.transfer_id)

    def pull(self, ref: Any, blocks: Any, num_tokens: int, deadline_s: float, **given: Any) -> kv.PullTicket:
        self._take("pull", ref.transfer_id, ref.generation, num_tokens, deadline_s)
        assert given["progressive"]
        return kv.PullTicket(Ticket(len(self.calls)), TransferId(ref.transfer_id), self.cancelled.append)

    def poll(self) -> list[kv.Event]:
        events, self.events = self.events, []
        return events


def side(*, is_lead: bool = True) -> RankTransfers:
    return RankTransfers(ScriptedRank(), IDENTITY, is_lead=is_lead)


def emit(owner: RankTransfers, *events: kv.Event) -> None:
    owner.rank.events += events
    owner.pump()


def released(why: Code, room: int = ROOM) -> kv.Released:
    return kv.Released(TransferId(f"room-{room}"), why)


def published(owner: RankTransfers, *, is_whole: bool = True) -> Publication:
    """A request whose reader has come, and whose pages are published."""
    owner.handle_reader(ROOM)
    publication = owner.open_publication(ROOM)
    assert publication.state is State.WAITING, "a reader may come before the request"
    publication.send(PAGES, 32, None if is_whole else 16)
    return publication


def pulling(owner: RankTransfers) -> tuple[Reception, kv.PullTicket]:
    reception = Reception(owner, ROOM)
    reception.pull(IDENTITY, PAGES, 32, 30.0)
    (ticket,) = owner.receptions
    return reception, ticket


def failed(ticket: kv.PullTicket, code: Code = Code.CANCELLED, *, safe: bool = True) -> kv.Failed:
    return kv.Failed(ticket, code, "cannot pull: a test says so", {}, safe)


class TestPrefill:
    def test_waits_for_a_reader_and_ends_completed(self) -> None:
        owner = side()
        publication = owner.open_publication(ROOM)
        assert publication.state is State.BOOTSTRAPPING
        owner.handle_reader(ROOM)
        assert publication.state is State.WAITING
        publication.send(PAGES, 32, 16, after="event")
        publication.send(PAGES, 32, None)
        assert publication.state is State.TRANSFERRING
        assert owner.rank.calls == [
            ("publish", "room-7", 32, 16, "event"),
            ("ready", "room-7", None, True, None),
        ]
        emit(owner, released(Code.COMPLETED))
        assert (publication.state, publication.is_released) == (State.SUCCESS, True)

    @pytest.mark.parametrize("has_reader", [True, False])
    def test_aborted_before_it_is_published_it_fails_at_once(self, has_reader: bool) -> None:
        owner = side()
        publication = owner.open_publication(ROOM)
        if has_reader:
            owner.handle_reader(ROOM)
        publication.abort("Aborted")
        assert (publication.state, publication.error) == (State.FAILED, "Aborted")
        publication.send(PAGES, 32, None)
        # So that its reader does not wait until the pull's deadline.
        assert owner.rank.calls == [("publish", "room-7", 1, 0, None), ("unpublish", "room-7")]
        emit(owner, released(Code.UNPUBLISHED))
        assert (publication.state, publication.error) == (State.FAILED, "Aborted")

    @pytest.mark.parametrize("is_whole", [True, False])
    def test_aborted_later_it_fails_only_once_it_is_released(self, is_whole: bool) -> None:
        owner = side()
        publication = published(owner, is_whole=is_whole)
        publication.abort("Aborted")
        publication.abort("Aborted again")
        assert (publication.state, publication.is_released) == (State.TRANSFERRING, False)
        publication.send(PAGES, 32, None)  # SGLang computes one chunk more
        assert [call[0] for call in owner.rank.calls] == ["publish", "unpublish", "unpublish"]
        emit(owner, released(Code.UNPUBLISHED))
        assert (publication.state, publication.error) == (State.FAILED, "Aborted")

    def test_a_reader_that_was_quicker_than_the_abort_has_the_cache(self) -> None:
        owner = side()
        publication = published(owner)
        publication.abort("Aborted")
        emit(owner, released(Code.COMPLETED))
        assert publication.state is State.SUCCESS

    @pytest.mark.parametrize("is_early", [True, False])
    def test_a_reader_that_gives_up_ends_it(self, is_early: bool) -> None:
        owner = side()
        if is_early:
            owner.handle_reader_gone(ROOM)
            owner.handle_reader(ROOM)  # of another rank, whose message was slower
        publication = owner.open_publication(ROOM)
        if not is_early:
            owner.handle_reader_gone(ROOM)
        assert publication.state is State.FAILED
        assert "given the request up" in publication.error

    @pytest.mark.parametrize(
        "event",
        [
            released(Code.LEASE_EXPIRED),
            kv.PublishRefused(TransferId("room-7"), Code.ENGINE_INCOMPLETE, "cannot publish: a rank is gone"),
        ],
    )
    def test_what_the_daemon_ends_has_failed(self, event: kv.Event) -> None:
        owner = side()
        publication = published(owner)
        emit(owner, event)
        assert (publication.state, publication.is_released) == (State.FAILED, True)
        assert event.why if isinstance(event, kv.Released) else event.code in publication.error

    def test_a_publish_that_is_refused_at_once_has_failed(self) -> None:
        owner = side()
        owner.rank.refuses = EngineError("cannot publish", Code.TRANSFER_EXISTS)
        publication = published(owner)
        assert (publication.state, publication.is_released) == (State.FAILED, True)
        assert publication.error == "cannot publish (transfer-exists)"

    def test_the_end_of_the_session_ends_everything(self) -> None:
        owner = side()
        publication, early = published(owner), owner.open_publication(8)
        owner.rank.refuses = KvxferdError("the session is over")
        emit(owner, kv.Disconnected(Code.DAEMON_LOST, "cannot register again"))
        late = owner.open_publication(9)
        assert {one.state for one in (publication, early, late)} == {State.FAILED}
        assert "restart this engine" in late.error

    def test_a_room_that_comes_again_is_refused_while_its_pages_are_read(self) -> None:
        owner = side()
        first = published(owner)
        first.abort("Aborted")
        owner.forget(first)
        second = owner.open_publication(ROOM)
        assert second.state is State.FAILED
        assert "give each its own room" in second.error
        emit(owner, released(Code.UNPUBLISHED))
        assert first.state is State.FAILED
        assert owner.open_publication(ROOM).state is State.BOOTSTRAPPING

    def test_readers_without_a_request_are_limited(self) -> None:
        owner = side()
        for room in range(MAX_EARLY_ROOMS + 1):
            owner.handle_reader(room)
        assert owner.open_publication(0).state is State.BOOTSTRAPPING
        assert owner.open_publication(MAX_EARLY_ROOMS).state is State.WAITING


class TestOtherRanksOfPrefill:
    def test_they_report_and_leave_the_end_to_the_first(self) -> None:
        owner = side(is_lead=False)
        publication = owner.open_publication(ROOM)
        assert publication.state is State.WAITING
        publication.send(PAGES, 32, 16)
        assert publication.state is State.TRANSFERRING
        publication.send(PAGES, 32, None)
        assert publication.state is State.SUCCESS
        assert owner.rank.calls == [
            ("ready", "room-7", 16, False, None),
            ("ready", "room-7", None, False, None),
        ]

    def test_an_abort_is_the_first_ranks_to_conclude(self) -> None:
        owner = side(is_lead=False)
        publication, unsent = owner.open_publication(ROOM), owner.open_publication(8)
        publication.send(PAGES, 32, 16)
        publication.abort("Aborted")
        assert publication.state is State.SUCCESS
        emit(owner, released(Code.UNPUBLISHED))
        assert publication.state is State.FAILED
        unsent.abort("Aborted")
        assert unsent.state is State.FAILED, "nothing was sent: at once"

    def test_a_report_that_is_refused_fails_the_request_on_all_ranks(self) -> None:
        owner = side(is_lead=False)
        publication = owner.open_publication(ROOM)
        owner.rank.refuses = EngineError("cannot report", Code.SUSPENDED)
        publication.send(PAGES, 32, None)
        assert publication.state is State.FAILED


class TestStages:
    """Of a pipeline: the lead publishes what all stages have written."""

    def lead(self) -> RankTransfers:
        return RankTransfers(ScriptedRank(), IDENTITY, is_lead=True, num_stages=2)

    def test_what_the_slowest_has_written_is_ready(self) -> None:
        owner = self.lead()
        publication = published(owner, is_whole=False)
        owner.handle_stage(ROOM, 1, {"full.1": kv.BlockList(ids=[8])}, 32, 16)
        publication.send(PAGES, 32, None)
        owner.handle_stage(ROOM, 1, {"full.1": kv.BlockList(ids=[9])}, 32, None)
        assert owner.rank.calls == [
            ("publish", "room-7", 32, 0, None),
            ("ready", "room-7", 16, True, None),
            ("ready", "room-7", 16, True, None),
            ("ready", "room-7", None, True, None),
        ]
        emit(owner, released(Code.COMPLETED))
        assert publication.state is State.SUCCESS

    def test_an_abort_ends_it_whatever_the_others_send(self) -> None:
        owner = self.lead()
        publication = published(owner)
        publication.abort("Aborted")
        owner.handle_stage(ROOM, 1, {"full.1": kv.BlockList(ids=[8])}, 32, None)
        owner.handle_stage(8, 1, {}, 32, None)  # of a request that is gone
        assert [call[0] for call in owner.rank.calls] == ["publish", "unpublish"]

    def test_another_stage_keeps_its_pages_until_it_hears_of_the_end(self) -> None:
        owner = RankTransfers(ScriptedRank(), IDENTITY, is_lead=False, stage=1, num_stages=2)
        publication = owner.open_publication(ROOM)
        assert publication.is_released
        publication.send(PAGES, 32, None)
        publication.abort("Aborted")
        assert not publication.is_released
        owner.forget(publication)
        emit(owner, released(Code.UNPUBLISHED))
        assert publication.is_released


class TestDecode:
    def test_pulls_to_delivered(self) -> None:
        owner = side()
        reception, ticket = pulling(owner)
        assert (reception.state, reception.is_quiet) == (State.TRANSFERRING, False)
        assert owner.rank.calls == [("pull", "room-7", "g1", 32, 30.0)]
        emit(owner, kv.Delivered(ticket, 4096, 2, 0.001))
        assert (reception.state, reception.is_quiet) == (State.SUCCESS, True)
        assert not owner.receptions

    def test_aborted_while_it_pulls_it_is_quiet_only_at_the_end(self) -> None:
        owner = side()
        reception, ticket = pulling(owner)
        reception.cancel()
        assert owner.rank.cancelled == [ticket.number]
        assert not owner.is_quiet(ROOM)
        emit(owner, failed(ticket))
        assert owner.is_quiet(ROOM)
        reception.cancel()
        assert owner.rank.cancelled == [ticket.number]

    def test_pages_in_doubt_are_not_quiet_before_quiesced(self) -> None:
        owner = side()
        reception, ticket = pulling(owner)
        emit(owner, failed(ticket, Code.DAEMON_LOST, safe=False))
        assert (reception.state, reception.is_quiet, owner.is_quiet(ROOM)) == (State.FAILED, False, False)
        assert owner.is_quiet(8)
        emit(owner, kv.Quiesced(ticket, {}))
        assert reception.is_quiet
        assert owner.is_quiet(ROOM)
        assert not owner.receptions

    def test_a_pull_that_cannot_begin_has_failed(self) -> None:
        owner = side()
        owner.rank.refuses = EngineError("cannot pull", Code.SUSPENDED)
        reception = Reception(owner, ROOM)
        reception.pull(IDENTITY, PAGES, 32, 30.0)
        assert (reception.state, reception.is_quiet) == (State.FAILED, True)
        assert (reception.code, reception.error) == (Code.SUSPENDED, "cannot pull (suspended)")

    def test_a_source_that_has_restarted_is_pulled_from_again(self) -> None:
        owner = side()
        reception, ticket = pulling(owner)
        emit(owner, failed(ticket, Code.GENERATION_STALE))
        reception.pull(SourceIdentity("tcp://10.0.0.1:9441", "sglang-p", "g2", "t" * 32), PAGES, 32, 30.0)
        assert (reception.state, reception.code) == (State.TRANSFERRING, None)
        assert owner.rank.calls[-1][2] == "g2"
