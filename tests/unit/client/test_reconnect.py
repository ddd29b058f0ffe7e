"""A daemon that dies, restarts, says farewell or talks nonsense: what the engine hears, what is replayed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import msgspec
import pytest

from kvxferd.client import Disconnected, Failed, PublishRefused, Quiesced, Released
from kvxferd.errors import Code, KvxferdError
from kvxferd.wire import worker
from kvxferd.wire.framing import HEADER
from tests.support.client_harness import (
    LAYOUT,
    REF,
    SPEC,
    Kernel,
    Stage,
    blocks,
    events_of,
    one_event,
    one_failure,
)
from tests.support.nodes.waiting import wait_until

# --- pulls


def test_a_replaced_mover_must_be_dead_too(stage: Stage) -> None:
    rank = stage.rank()
    first = stage.mover
    stage.pull(rank, deadline_s=0.01)
    one_failure(rank)  # in doubt: the first mover is stuck in it
    stage.side.expect(worker.Cancel)
    stage.side.offer(stage.new_mover())
    stage.mover.die()
    stage.lose(rank)
    assert rank.poll() == []
    first.die()
    assert isinstance(one_event(rank), Quiesced)


def test_what_is_asked_meanwhile_goes_to_the_next_daemon(stage: Stage) -> None:
    rank = stage.rank()
    stage.lose(rank)
    kept = rank.pull(REF, blocks(4, 5), num_tokens=32, deadline_s=30.0)
    rank.pull(REF, blocks(), num_tokens=48, deadline_s=30.0, after=Kernel())  # and its blocks are in use
    cancelled = rank.pull(REF, blocks(6, 7), num_tokens=32, deadline_s=30.0)
    cancelled.cancel()
    event = one_failure(rank)
    assert (event.ticket, event.code, event.safe_to_reuse) == (cancelled, Code.CANCELLED, True)
    rank.abandon(REF)
    stage.daemon.start()
    assert stage.rejoin().expect(worker.Abandon).ref.transfer_id == "req-1"
    pull = stage.side.expect(worker.PullRequest)
    assert pull.ticket == kept.number
    assert 20.0 < pull.deadline_s < 30.0
    assert stage.side.is_silent()


def test_a_farewell_explains_the_failures(stage: Stage) -> None:
    rank = stage.rank()
    stage.pull(rank)
    stage.mover.die()
    stage.side.say(worker.Farewell(code=Code.DRAINING, message="this node drains"))
    event = one_failure(rank)
    assert (event.code, event.safe_to_reuse) == (Code.DRAINING, True)
    assert "this node drains" in event.message
    stage.rejoin()
    wait_until(lambda: rank.is_connected, "back")


# --- replay


def test_a_restarted_daemon_gets_everything_that_is_not_released(stage: Stage) -> None:
    rank = stage.rank()
    stage.publish(rank, "over")
    stage.side.say(worker.Released(transfer_id="over", why=Code.COMPLETED))
    assert one_event(rank) == Released("over", Code.COMPLETED)
    kept = stage.publish(rank, "kept", num_readers=3, lease_s=20.0)
    rank.ready("kept")
    rank.ready("of-the-scheduler")
    stage.lose(rank)
    meanwhile = rank.publish("meanwhile", blocks(6), num_tokens=16)
    stage.daemon.start()
    side = stage.accept()
    register = side.register(stage.new_mover(), endpoint="tcp://10.0.0.1:8802")
    assert (register.engine, register.layout) == (SPEC, LAYOUT)
    assert os.fstat(side.fds[0]).st_ino == os.fstat(stage.memory.fd).st_ino
    again, new = side.expect(worker.Publish), side.expect(worker.Publish)
    assert (again.transfer_id, again.nonce, again.fence_slot) == ("kept", kept.nonce, kept.fence_slot)
    assert (again.blocks, again.num_readers) == (kept.blocks, 3)
    assert 15.0 < again.lease_s < 20.0
    assert (new.transfer_id, new.nonce) == ("meanwhile", meanwhile.nonce)
    assert side.expect(worker.Ready).transfer_id == "of-the-scheduler"  # a publish implies its rank's own
    assert side.is_silent()
    assert rank.publish("later", blocks(), num_tokens=48).endpoint == "tcp://10.0.0.1:8802"


def test_unpublish_without_a_daemon_is_done_at_once(stage: Stage) -> None:
    rank = stage.rank()
    requested = rank.publish("asked", blocks(), num_tokens=48)
    stage.side.expect(worker.Publish)
    stage.publish(rank, "kept")
    rank.unpublish(requested)
    stage.side.expect(worker.Unpublish)  # and dies before it says Released
    stage.daemon.stop()
    assert one_event(rank) == Released("asked", Code.UNPUBLISHED)
    rank.unpublish(rank.publish("meanwhile", blocks(), num_tokens=48))
    assert one_event(rank) == Released("meanwhile", Code.UNPUBLISHED)
    stage.daemon.start()
    assert stage.rejoin().expect(worker.Publish).transfer_id == "kept"


def test_what_the_last_daemon_released_is_not_published_again(stage: Stage) -> None:
    """It had told a rank, which reuses the blocks, and died before it told the publisher."""
    rank = stage.rank()
    stage.side.page.overwrite(stage.publish(rank, "released").fence_slot)
    stage.publish(rank, "kept")
    stage.daemon.restart()
    side = stage.rejoin()
    assert side.expect(worker.Publish).transfer_id == "kept"
    assert side.is_silent()
    assert one_event(rank) == Released("released", Code.RELEASED)


def test_a_replay_that_comes_before_the_ranks_is_made_again(stage: Stage) -> None:
    rank = stage.rank()
    first = rank.publish("req-1", blocks(), num_tokens=48)
    rank.publish("req-2", blocks(), num_tokens=48)
    word = worker.PublishRefused(transfer_id="", code=Code.ENGINE_INCOMPLETE, message="no rank is here yet")
    stage.daemon.restart()
    side = stage.rejoin()
    for _ in range(2):
        refused = side.expect(worker.Publish).transfer_id
        side.say(msgspec.structs.replace(word, transfer_id=refused))
    assert {side.expect(worker.Publish).transfer_id for _ in range(2)} == {"req-1", "req-2"}
    assert rank.poll() == []
    side.say(msgspec.structs.replace(word, transfer_id="req-1"))
    side.say(worker.Released(transfer_id="req-2", why=Code.COMPLETED))
    assert one_event(rank) == Released("req-2", Code.COMPLETED)
    rank.unpublish(first)  # no daemon has it
    assert one_event(rank) == Released("req-1", Code.UNPUBLISHED)
    stage.publish(rank, "req-3")  # a first publish is not made again
    side.say(msgspec.structs.replace(word, transfer_id="req-3"))
    assert one_event(rank) == PublishRefused("req-3", Code.ENGINE_INCOMPLETE, "no rank is here yet")


# --- daemons that do not take the rank back


def test_a_final_refusal_ends_the_session(stage: Stage) -> None:
    rank = stage.rank()
    stage.publish(rank)
    stage.lose(rank)
    queued = rank.pull(REF, blocks(), num_tokens=48, deadline_s=30.0)
    stage.daemon.start()
    side = stage.accept()
    register = side.expect(worker.Register)
    why = "cannot register: a newer generation is there"
    side.say(worker.Refused(request=register.request, code=Code.GENERATION_STALE, message=why))
    failed, released, over = events_of(rank, 3)
    assert isinstance(failed, Failed)
    assert (failed.ticket, failed.code, failed.safe_to_reuse) == (queued, Code.GENERATION_STALE, True)
    assert released == Released("req-1", Code.PUBLISHER_GONE)
    assert over == Disconnected(Code.GENERATION_STALE, why)
    with pytest.raises(KvxferdError, match="newer generation") as refused:
        rank.pull(REF, blocks(), num_tokens=48, deadline_s=30.0)
    assert refused.value.code is Code.GENERATION_STALE
    assert stage.daemon.nobody_comes(0.3)


@pytest.mark.parametrize(
    "code",
    [
        Code.NOT_ALLOWED,
        Code.RANK_TAKEN,
        Code.SHAPE_MISMATCH,
        Code.UNEQUAL_STAGES,
        Code.LAYERS_MISSING,
        Code.NOT_HOME,
    ],
)
def test_who_was_taken_before_is_not_refused_for_good(stage: Stage, code: Code) -> None:
    """Another has its rank or its engine id for a moment, or another daemon the home's address."""
    rank = stage.rank()
    stage.side.say(worker.Farewell(code=code, message="another daemon has that rank"))
    for _ in range(2):
        side = stage.accept()
        request = side.expect(worker.Register).request
        side.say(worker.Refused(request=request, code=code, message="its ranks here are of uid 1001"))
    stage.rejoin()
    wait_until(lambda: rank.is_connected, "taken again")
    assert rank.poll() == []


# --- daemons that talk nonsense


def cut_frame(stage: Stage) -> None:
    stage.side.write(HEADER.pack(100, 0, 0) + b"cut")
    stage.side.close()


SECOND_WELCOME = worker.Welcome(
    version=worker.WORKER_VERSIONS.newest, boot_id="b", lease_s=1.0, max_hold_s=600.0
)
RELEASED = worker.Released(transfer_id="x", why=Code.COMPLETED)
NONSENSE: dict[str, Callable[[Stage], object]] = {
    "bad header": lambda stage: stage.side.write(HEADER.pack(4, 0, 1) + b"oops"),
    "too large": lambda stage: stage.side.write(HEADER.pack(1 << 31, 0, 0)),
    "undecodable": lambda stage: stage.side.write(HEADER.pack(4, 0, 0) + b"oops"),
    "unknown field": lambda stage: stage.side.write(HEADER.pack(15, 0, 0) + b"\x82\xa1t\xa9suspended\xa1x"),
    "no descriptor": lambda stage: stage.side.say(worker.MoverOffered(number=2)),
    "two movers": lambda stage: stage.side.say(worker.MoverOffered(number=2), *[stage.mover.pidfd] * 2),
    "descriptor of nothing announced": lambda stage: stage.side.say(RELEASED, stage.mover.pidfd),
    # A file is always readable: epoll refuses it.
    "descriptor of a file": lambda stage: stage.side.say(worker.MoverOffered(number=2), stage.memory.fd),
    "second welcome": lambda stage: stage.side.say(SECOND_WELCOME),
    "reply to nothing": lambda stage: stage.side.say(worker.Refused(request=9, code=Code.BUSY, message="no")),
    "unknown ticket": lambda stage: stage.side.say(worker.TicketQuiesced(ticket=99)),
    "ticket of nobody": lambda stage: stage.side.say(worker.TicketQuiesced(ticket=0)),
    "interruption of nobody": lambda stage: stage.side.say(worker.PullsInterrupted(number=3, tickets=(7,))),
    "quiesced too early": lambda stage: stage.side.say(worker.TicketQuiesced(ticket=1)),
    "suspension of nobody": lambda stage: stage.side.say(worker.Suspended()),
    "cut frame": cut_frame,
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_costs_the_connection_and_no_more(stage: Stage, nonsense: Callable[[Stage], object]) -> None:
    rank = stage.rank()
    ticket = stage.pull(rank)
    stage.mover.die()
    nonsense(stage)
    event = one_failure(rank)
    assert (event.ticket, event.safe_to_reuse) == (ticket, True)
    stage.rejoin()
    wait_until(lambda: rank.is_connected, "back")
    assert rank.poll() == []


def test_a_publisher_is_offered_nothing(stage: Stage) -> None:
    stage.publisher()
    stage.side.say(worker.MoverOffered(number=1), stage.new_mover().pidfd)
    with pytest.raises(ConnectionError):
        stage.side.receive()


def test_a_process_without_a_descriptor_left_tries_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory's descriptors are copied as they are sent: without room for a copy the session goes on."""
    rank = stage.rank()
    real, has_room = os.dup, [False]

    def dup(fd: int) -> int:
        if not has_room[0]:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(fd)

    stage.daemon.restart()
    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", dup)
        side = stage.accept()
        with pytest.raises(ConnectionError):
            side.receive()
        has_room[0] = True
    stage.rejoin()
    wait_until(lambda: rank.is_connected, "the rank is there again")
    assert rank.poll() == []
