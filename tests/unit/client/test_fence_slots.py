"""The daemon's fence page: where a session's words are before, between and after its daemons."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvxferd.client import Released
from kvxferd.client.session import ClientSession
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import Rank
from kvxferd.memory import FencePage
from kvxferd.wire import worker
from tests.support.client_harness import Stage, blocks, one_event
from tests.support.scripted_daemon import DaemonSide

EMPTY = bytes(16)


@contextmanager
def page_of(side: DaemonSide) -> Iterator[FencePage]:
    """The page that a side's movers go on serving when the side itself is gone."""
    page = FencePage(os.dup(side.page.fd))
    try:
        yield page
    finally:
        page.close()


def publish(stage: Stage, rank, name: str = "t1") -> worker.Publish:
    rank.publish(name, blocks(1, 2), num_tokens=32)
    return stage.side.expect(worker.Publish)


def test_a_publisher_gets_its_page_with_the_answer_to_attach(stage: Stage) -> None:
    stage.publisher((Rank(0, 0), "first")).publish("t1", blocks(1, 2), num_tokens=32)
    assert stage.side.page.read(stage.side.expect(worker.Publish).fence_slot) != EMPTY


def test_after_a_reconnect_the_old_words_are_gone_before_a_replay(stage: Stage) -> None:
    """The dead daemon's movers may serve the old page still, to readers that hold the old word."""
    rank = stage.rank()
    slot = publish(stage, rank).fence_slot
    old_word = stage.side.page.read(slot)
    with page_of(stage.side) as old:
        stage.lose(rank)
        rank.publish("t2", blocks(3, 4), num_tokens=32)
        assert old.read(slot) == old_word  # nothing is released: what reads now is right
        stage.daemon.start()
        side = stage.rejoin()
        slots = {said.transfer_id: said.fence_slot for said in (side.expect(worker.Publish) for _ in "12")}
        assert slots["t1"] == slot
        assert old.read(slot) not in (old_word, EMPTY)
        words = {side.page.read(slots[name]) for name in ("t1", "t2")}
        assert len(words) == 2
        assert not words & {old_word, EMPTY}


def test_what_is_released_without_a_daemon_is_void_in_the_page_that_movers_serve(stage: Stage) -> None:
    rank = stage.rank()
    ref = rank.publish("t1", blocks(1, 2), num_tokens=32)
    slot = stage.side.expect(worker.Publish).fence_slot
    word = stage.side.page.read(slot)
    with page_of(stage.side) as page:
        stage.lose(rank)
        rank.unpublish(ref)
        event = one_event(rank)
        assert isinstance(event, Released)
        assert event.why is Code.UNPUBLISHED
        assert page.read(slot) != word


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_of_ours_ends_the_session_and_leaves_no_descriptor(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: ClientSession, message: worker.DaemonMessage) -> bool:
        if isinstance(message, worker.Registered):
            raise RuntimeError("a defect")
        return False

    monkeypatch.setattr(ClientSession, "carries_fence_page", fail)
    client = stage.client()
    joining = stage.calling(client.attach, "decode-0", "g1", 10.0)
    stage.side.say_registered(stage.side.expect(worker.Attach).request)
    with pytest.raises(KvxferdError) as raised:
        joining.result(10.0)
    assert raised.value.code is Code.INTERNAL
