"""Many threads on one session, and a session whose thread fails."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvxferd.client import Delivered, Disconnected, Failed, Released
from kvxferd.client.session import ClientSession
from kvxferd.errors import Code, KvxferdError
from kvxferd.wire import worker
from tests.support.client_harness import REF, Stage, blocks, events_of
from tests.support.scripted_daemon import WAIT_S

NUM_THREADS, EACH = 8, 50


def test_many_threads_publish_pull_and_poll(stage: Stage) -> None:
    rank = stage.rank()
    serving = stage.calling(_serve, stage, NUM_THREADS * EACH)
    start = threading.Barrier(NUM_THREADS)

    def work(thread: int) -> list[object]:
        start.wait()
        events: list[object] = []
        for number in range(EACH):
            rank.publish(f"t{thread}-{number}", blocks(1), num_tokens=16)
            rank.pull(REF, blocks(2), num_tokens=16, deadline_s=30.0)
            events += rank.poll()
        return events

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        events = [event for part in pool.map(work, range(NUM_THREADS)) for event in part]
    serving.result(WAIT_S)
    if missing := 2 * NUM_THREADS * EACH - len(events):
        events += events_of(rank, missing)
    tickets = [event.ticket.number for event in events if isinstance(event, Delivered)]
    released = [event.transfer_id for event in events if isinstance(event, Released)]
    assert sorted(tickets) == list(range(1, NUM_THREADS * EACH + 1))
    assert len(set(released)) == len(released) == NUM_THREADS * EACH


def _serve(stage: Stage, number: int) -> None:
    """Deliver every pull and release every publish."""
    for _ in range(2 * number):
        match stage.side.receive()[0]:
            case worker.PullRequest(ticket=ticket):
                stage.side.say(worker.TicketDelivered(ticket=ticket, bytes=1, runs=1, wire_s=0.0))
            case worker.Publish(transfer_id=transfer_id):
                stage.side.say(worker.Released(transfer_id=transfer_id, why=Code.COMPLETED))
            case other:
                raise AssertionError(other)


def test_closing_while_others_call(stage: Stage) -> None:
    rank = stage.rank()
    start = threading.Barrier(5)

    def work() -> Code:
        start.wait()
        try:
            while True:
                rank.prepare(REF)
                rank.poll()
        except KvxferdError as error:
            return error.code

    working = [stage.calling(work) for _ in range(4)]
    start.wait()
    rank.close()
    assert {each.result(WAIT_S) for each in working} <= {Code.CANCELLED, Code.BUSY}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_thread_leaves_nobody_waiting(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = stage.rank()
    stage.publish(rank)
    ticket = stage.pull(rank)
    monkeypatch.setattr(rank._session, "handle", lambda *_: 1 / 0)
    stage.side.say(worker.Suspended())
    released, failed, over = events_of(rank, 3)
    assert released == Released("req-1", Code.PUBLISHER_GONE)
    assert isinstance(failed, Failed)
    assert (failed.ticket, failed.code, failed.safe_to_reuse) == (ticket, Code.INTERNAL, False)
    assert isinstance(over, Disconnected)
    with pytest.raises(KvxferdError, match="I/O thread failed"):
        rank.prepare(REF)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_before_a_fence_page_is_taken_leaves_no_caller_and_no_descriptor(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: ClientSession, message: worker.DaemonMessage) -> bool:
        if isinstance(message, worker.Registered):
            raise RuntimeError("a defect")
        return False

    monkeypatch.setattr(ClientSession, "carries_fence_page", fail)
    attaching = stage.calling(stage.client().attach, "decode-0", "g1", WAIT_S)
    stage.take_publisher()
    with pytest.raises(KvxferdError) as raised:
        attaching.result(WAIT_S)
    assert raised.value.code is Code.INTERNAL


@pytest.mark.process
def test_a_process_that_forgets_to_close_ends_all_the_same(stage: Stage) -> None:
    program = """
        import os, sys
        from kvxferd.client import connect
        client = connect(sys.argv[1])
        print("connected", flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), os.fspath(stage.daemon.path)],
        stdout=subprocess.PIPE,
    )
    with process:
        side = stage.accept()
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        assert process.wait(WAIT_S) == 0
        with pytest.raises(ConnectionError):
            side.receive()
