"""The sink's side: terminal events, cancelling, deadlines that the client keeps itself."""

from __future__ import annotations

import select
import time

import numpy as np
import pytest

from kvxferd.client import BlockList, Delivered, Failed, Quiesced, RankHandle
from kvxferd.errors import Code
from kvxferd.layout import unpack_ids
from kvxferd.wire import worker
from tests.support.client_harness import REF, Stage, blocks, events_of, one_event, one_failure


def pulled(stage: Stage, rank: RankHandle, deadline_s: float = 30.0):
    """A pull that the daemon has received: its ticket and its message."""
    ticket = rank.pull(REF, blocks(4, 5, first_token=16), num_tokens=48, deadline_s=deadline_s)
    return ticket, stage.side.expect(worker.PullRequest)


@pytest.mark.parametrize("form", ["ref", "dict", "json", "bytes"])
def test_a_pull_is_sent_whatever_form_its_reference_has(stage: Stage, form: str) -> None:
    rank = stage.rank()
    forms = {"ref": REF, "dict": REF.to_dict(), "json": REF.to_json(), "bytes": REF.to_json().encode()}
    ticket = rank.pull(forms[form], blocks(4, 5, first_token=16), num_tokens=48, deadline_s=9.0)
    pull = stage.side.expect(worker.PullRequest)
    assert (pull.ref.transfer_id, pull.ref.nonce, pull.ticket) == ("req-1", REF.nonce, ticket.number)
    assert list(unpack_ids(pull.blocks["full"].ids)) == [4, 5]
    assert pull.blocks["full"].first_token == 16
    assert 8.0 < pull.deadline_s <= 9.0


def test_delivered(stage: Stage) -> None:
    rank = stage.rank()
    ticket, pull = pulled(stage, rank)
    assert ticket.delivered is None
    stage.side.say(worker.TicketDelivered(ticket=pull.ticket, bytes=4096, runs=2, wire_s=0.25))
    assert one_event(rank) == Delivered(ticket, 4096, 2, 0.25)
    assert ticket.delivered is True


def test_failed_safely(stage: Stage) -> None:
    rank = stage.rank()
    ticket, pull = pulled(stage, rank)
    stage.side.say(
        worker.TicketFailed(ticket=pull.ticket, code=Code.NONCE_WRONG, message="cannot", safe_to_reuse=True)
    )
    event = one_failure(rank)
    assert (event.ticket, event.code, event.message, event.safe_to_reuse) == (
        ticket,
        Code.NONCE_WRONG,
        "cannot",
        True,
    )
    assert list(event.blocks["full"].ids) == [4, 5]
    assert event.blocks["full"].first_token == 16
    assert ticket.delivered is False


def test_failed_in_doubt_and_quiesced_later(stage: Stage) -> None:
    rank = stage.rank()
    ticket, pull = pulled(stage, rank)
    stage.side.say(
        worker.TicketFailed(ticket=pull.ticket, code=Code.TRANSPORT, message="cannot", safe_to_reuse=False)
    )
    assert not one_failure(rank).safe_to_reuse
    assert ticket.delivered is None, "its blocks may still be written"
    stage.side.say(worker.TicketQuiesced(ticket=pull.ticket))
    quiesced = one_event(rank)
    assert isinstance(quiesced, Quiesced)
    assert quiesced.ticket is ticket
    assert ticket.delivered is False
    assert list(quiesced.blocks["full"].ids) == [4, 5]
    stage.side.say(worker.TicketQuiesced(ticket=pull.ticket))  # said twice: told once
    _, other = pulled(stage, rank)
    stage.side.say(worker.TicketDelivered(ticket=other.ticket, bytes=1, runs=1, wire_s=0.0))
    assert isinstance(one_event(rank), Delivered)


def test_a_silent_daemon_cannot_hold_a_pull_past_its_deadline(stage: Stage) -> None:
    rank = stage.rank()
    started = time.monotonic()
    ticket, pull = pulled(stage, rank, deadline_s=0.2)
    event = one_event(rank)
    assert time.monotonic() - started >= 0.2
    assert isinstance(event, Failed)
    assert (event.ticket, event.code, event.safe_to_reuse) == (ticket, Code.DEADLINE, False)
    assert stage.side.expect(worker.Cancel).ticket == pull.ticket


@pytest.mark.parametrize(
    "late",
    [
        worker.TicketDelivered(ticket=1, bytes=1, runs=1, wire_s=0.0),
        worker.TicketFailed(ticket=1, code=Code.CANCELLED, message="cancelled", safe_to_reuse=True),
        worker.TicketQuiesced(ticket=1),
    ],
    ids=["delivered", "failed", "quiesced"],
)
def test_a_late_terminal_message_only_proves_quiet(stage: Stage, late: object) -> None:
    rank = stage.rank()
    ticket, _ = pulled(stage, rank, deadline_s=0.01)
    one_failure(rank)
    stage.side.say(worker.TicketFailed(ticket=1, code=Code.DEADLINE, message="late", safe_to_reuse=False))
    stage.side.say(late)
    event = one_event(rank)
    assert isinstance(event, Quiesced)
    assert event.ticket is ticket


def test_a_lent_list_is_not_copied_and_comes_back_with_a_failure(stage: Stage) -> None:
    rank = stage.rank()
    ids = np.arange(65_536, dtype=np.int32) % 16
    rank.pull(REF, {"full": BlockList(ids=ids, borrowed=True)}, num_tokens=1_048_576, deadline_s=30.0)
    pull = stage.side.expect(worker.PullRequest)
    assert pull.blocks["full"].ids == ids.tobytes()
    stage.side.say(
        worker.TicketFailed(ticket=pull.ticket, code=Code.RELEASED, message="gone", safe_to_reuse=True)
    )
    failed = one_event(rank)
    assert isinstance(failed, Failed)
    assert np.shares_memory(np.asarray(failed.blocks["full"].ids), ids)


def test_the_descriptor_is_readable_while_there_are_events(stage: Stage) -> None:
    rank = stage.rank()
    readable = select.poll()
    readable.register(rank.fileno(), select.POLLIN)
    assert readable.poll(0) == []
    first, second = pulled(stage, rank)[1], pulled(stage, rank)[1]
    for pull in (first, second):
        stage.side.say(worker.TicketDelivered(ticket=pull.ticket, bytes=1, runs=1, wire_s=0.0))
    assert len(events_of(rank, 2)) == 2
    assert readable.poll(0) == []
    assert rank.poll() == []


def test_closing_ends_every_pull(stage: Stage) -> None:
    rank = stage.rank()
    ticket, _ = pulled(stage, rank)
    rank.close()
    (event,) = rank.poll()
    assert isinstance(event, Failed)
    assert (event.ticket, event.code, event.safe_to_reuse) == (ticket, Code.CANCELLED, False)
