"""The sink's side: terminal events, cancelling, deadlines that the client keeps itself."""

from __future__ import annotations

import select
import time

import numpy as np
import pytest

from kvxferd.client import BlockList, Delivered, Failed, Quiesced
from kvxferd.errors import Code
from kvxferd.layout import unpack_ids
from kvxferd.wire import worker
from tests.support.client_harness import REF, Stage, blocks, delivered, events_of, one_event, one_failure


@pytest.mark.parametrize("form", ["ref", "dict", "json", "bytes"])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_pull_is_sent_whatever_form_its_reference_has(stage: Stage, form: str, progressive: bool) -> None:
    rank = stage.rank()
    forms = {"ref": REF, "dict": REF.to_dict(), "json": REF.to_json(), "bytes": REF.to_json().encode()}
    ticket = rank.pull(
        forms[form],
        blocks(4, 5, first_token=16),
        num_tokens=48,
        deadline_s=9.0,
        progressive=progressive,
    )
    pull = stage.side.expect(worker.PullRequest)
    assert (pull.ref.transfer_id, pull.ref.nonce, pull.ticket) == ("req-1", REF.nonce, ticket.number)
    assert list(unpack_ids(pull.blocks["full"].ids)) == [4, 5]
    assert (pull.blocks["full"].first_token, pull.progressive) == (16, progressive)
    assert 8.0 < pull.deadline_s <= 9.0


def test_delivered(stage: Stage) -> None:
    rank = stage.rank()
    ticket = stage.pull(rank)
    assert ticket.delivered is None
    stage.side.say(delivered(ticket))
    assert one_event(rank) == Delivered(ticket, 3, 2, 0.5)
    assert ticket.delivered is True


def test_failed_safely(stage: Stage) -> None:
    rank = stage.rank()
    ticket = rank.pull(REF, blocks(4, 5, first_token=16), num_tokens=48, deadline_s=9.0)
    stage.side.expect(worker.PullRequest)
    stage.fail(ticket, is_safe=True, code=Code.NONCE_WRONG)
    event = one_failure(rank)
    assert (event.ticket, event.code) == (ticket, Code.NONCE_WRONG)
    assert (event.message, event.safe_to_reuse) == ("cannot", True)
    assert list(event.blocks["full"].ids) == [4, 5]
    assert event.blocks["full"].first_token == 16
    assert ticket.delivered is False


def test_failed_in_doubt_and_quiesced_later(stage: Stage) -> None:
    rank = stage.rank()
    ticket = stage.pull(rank)
    stage.fail(ticket, is_safe=False)
    assert not one_failure(rank).safe_to_reuse
    assert ticket.delivered is None, "its blocks may still be written"
    stage.side.say(worker.TicketQuiesced(ticket=ticket.number))
    quiesced = one_event(rank)
    assert isinstance(quiesced, Quiesced)
    assert quiesced.ticket is ticket
    assert ticket.delivered is False
    assert list(quiesced.blocks["full"].ids) == [1, 2, 3]
    stage.side.say(worker.TicketQuiesced(ticket=ticket.number))  # said twice: told once
    stage.side.say(delivered(stage.pull(rank)))
    assert isinstance(one_event(rank), Delivered)


def test_a_silent_daemon_cannot_hold_a_pull_past_its_deadline(stage: Stage) -> None:
    rank = stage.rank()
    started = time.monotonic()
    ticket = stage.pull(rank, deadline_s=0.2)
    event = one_failure(rank)
    assert time.monotonic() - started >= 0.2
    assert (event.ticket, event.code, event.safe_to_reuse) == (ticket, Code.DEADLINE, False)
    assert stage.side.expect(worker.Cancel).ticket == ticket.number


def test_a_lent_list_is_not_copied_and_comes_back_with_a_failure(stage: Stage) -> None:
    rank = stage.rank()
    ids = np.arange(65_536, dtype=np.int32) % 16
    lent = {"full": BlockList(ids=ids, borrowed=True)}
    ticket = rank.pull(REF, lent, num_tokens=1_048_576, deadline_s=30.0)
    assert stage.side.expect(worker.PullRequest).blocks["full"].ids == ids.tobytes()
    stage.fail(ticket, is_safe=True)
    assert np.shares_memory(np.asarray(one_failure(rank).blocks["full"].ids), ids)


def test_the_descriptor_is_readable_while_there_are_events(stage: Stage) -> None:
    rank = stage.rank()
    readable = select.poll()
    readable.register(rank.fileno(), select.POLLIN)
    assert readable.poll(0) == []
    for ticket in (stage.pull(rank), stage.pull(rank)):
        stage.side.say(delivered(ticket))
    assert len(events_of(rank, 2)) == 2
    assert readable.poll(0) == []
    assert rank.poll() == []


def test_closing_ends_every_pull(stage: Stage) -> None:
    rank = stage.rank()
    ticket = stage.pull(rank)
    rank.close()
    (event,) = rank.poll()
    assert isinstance(event, Failed)
    assert (event.ticket, event.code, event.safe_to_reuse) == (ticket, Code.CANCELLED, False)
