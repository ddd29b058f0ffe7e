"""`publish(ready_tokens=)`, `extend` and progressive pulls, with a daemon of this version and of the last."""

from __future__ import annotations

import pytest

from kvxferd.client import BlockList, Progress, Released, make_ref
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.layout import unpack_ids
from kvxferd.wire import worker
from kvxferd.wire.common import BlockIds
from kvxferd.wire.limits import IDS_PART_BYTES
from tests.support.client_harness import Stage
from tests.support.scripted_daemon import until

NEWEST = worker.WORKER_VERSIONS.newest


def lists(*ids: int) -> dict[str, BlockList]:
    return {"full": BlockList(ids=list(ids))}


def ids_of(message: worker.Publish | worker.Extend) -> list[int]:
    return list(unpack_ids(message.blocks["full"].ids))


def test_a_transfer_grows(stage: Stage) -> None:
    rank = stage.rank(version=NEWEST)
    rank.publish("t1", lists(3), 40, ready_tokens=16)
    published = stage.side.expect(worker.Publish)
    assert (ids_of(published), published.num_tokens, published.ready_tokens) == ([3], 40, 16)
    rank.extend("t1", 32, lists(1))
    extended = stage.side.expect(worker.Extend)
    assert (ids_of(extended), extended.ready_tokens) == ([1], 32)
    assert extended.incarnation  # the report goes with the blocks
    rank.add_blocks("t1", lists(2))
    added = stage.side.expect(worker.Extend)
    assert (ids_of(added), added.incarnation) == ([2], "")
    rank.extend("t1")
    report = stage.side.expect(worker.Ready)
    assert (report.ready_tokens, report.incarnation) == (-1, extended.incarnation)


@pytest.mark.parametrize("is_report", [True, False])
def test_many_blocks_are_sent_at_once_and_whole(stage: Stage, is_report: bool) -> None:
    """More ids than a frame holds go in parts, and the last part waits for no later request."""
    rank = stage.rank(version=NEWEST)
    num_ids = IDS_PART_BYTES // 4 + 1
    many = {"full": BlockList(ids=[0] * num_ids)}
    rank.publish("t1", {}, num_ids * 16, ready_tokens=0)
    stage.side.expect(worker.Publish)
    if is_report:
        rank.extend("t1", 16, many)
    else:
        rank.add_blocks("t1", many)
    parts = [stage.side.expect(BlockIds).ids for _ in range(2)]
    extended = stage.side.expect(worker.Extend)
    assert len(b"".join(parts)) == 4 * num_ids
    assert extended.ready_tokens == (16 if is_report else -1)


@pytest.mark.parametrize("first", [16, 48, -16])
def test_blocks_that_do_not_continue_the_list_are_refused(stage: Stage, first: int) -> None:
    rank = stage.rank(version=NEWEST)
    rank.publish("t1", lists(3, 4), 80, ready_tokens=32)
    stage.side.expect(worker.Publish)
    with pytest.raises(EngineError, match=f"from token {first} on: those before end at token 32") as refused:
        rank.extend("t1", 48, {"full": BlockList(ids=[5], first_token=first)})
    assert refused.value.code is Code.BLOCKS_INVALID
    rank.extend("t1", 48, {"full": BlockList(ids=[1], first_token=32)})
    assert ids_of(stage.side.expect(worker.Extend)) == [1]


def test_a_report_of_too_much_adds_no_blocks(stage: Stage) -> None:
    rank = stage.rank(version=NEWEST)
    rank.publish("t1", lists(3), 40, ready_tokens=16)
    stage.side.expect(worker.Publish)
    with pytest.raises(EngineError, match="to 41 tokens: it has 40"):
        rank.extend("t1", 41, lists(1))
    rank.extend("t1", 32, lists(2))
    assert ids_of(stage.side.expect(worker.Extend)) == [2]


def test_all_tokens_are_the_whole(stage: Stage) -> None:
    rank = stage.rank(version=NEWEST)
    rank.publish("t1", lists(3, 1, 2), 40, ready_tokens=16)
    stage.side.expect(worker.Publish)
    rank.extend("t1", 40)
    assert stage.side.expect(worker.Ready).ready_tokens == -1


def test_the_next_daemon_gets_all_that_is_there(stage: Stage) -> None:
    rank = stage.rank(version=NEWEST)
    rank.publish("t1", lists(3), 40, ready_tokens=16)
    stage.side.expect(worker.Publish)
    stage.daemon.stop()
    until(lambda: not rank.is_connected, "the daemon is gone")
    rank.extend("t1", 32, lists(1))
    stage.daemon.start()
    side = stage.rejoin(version=NEWEST)
    published = side.expect(worker.Publish)
    assert (ids_of(published), published.ready_tokens) == ([3, 1], 32)
    assert side.expect(worker.Ready).ready_tokens == 32
    rank.extend("t1", None, lists(2))
    assert ids_of(side.expect(worker.Extend)) == [2]


def test_a_daemon_of_the_last_version_gets_the_whole(stage: Stage) -> None:
    rank = stage.rank(version=4)
    rank.publish("t1", lists(3), 40, ready_tokens=16)
    rank.extend("t1", 32, lists(1))
    rank.extend("t1", None, lists(2))
    published = stage.side.expect(worker.Publish)
    assert (ids_of(published), published.ready_tokens) == ([3, 1, 2], -1)
    assert stage.side.expect(worker.Ready).ready_tokens == -1


def test_what_never_becomes_whole_ends_with_its_lease(stage: Stage) -> None:
    rank = stage.rank(version=4)
    rank.publish("t1", lists(3), 40, ready_tokens=16, lease_s=0.2)
    until(lambda: (events := rank.poll()) and events == [Released("t1", Code.LEASE_EXPIRED)], "released")
    rank.publish("t2", lists(3), 40, ready_tokens=16)
    rank.unpublish(rank.publish("t3", lists(4), 40, ready_tokens=16))
    until(lambda: (events := rank.poll()) and events == [Released("t3", Code.UNPUBLISHED)], "released")


def test_tokens_are_reported_when_they_are_written(stage: Stage) -> None:
    class Event:
        is_done = False

        def query(self) -> bool:
            return self.is_done

    rank, event = stage.rank(version=NEWEST), Event()
    rank.publish("t1", lists(3, 1), 40, ready_tokens=0)
    stage.side.expect(worker.Publish)
    rank.extend("t1", 16, lists(2), after=event)
    stage.side.expect(worker.Extend)
    rank.extend("t2", 8)  # of another session's transfer: what was asked for later, and is written
    assert stage.side.expect(worker.Ready).transfer_id == "t2"
    event.is_done = True
    assert stage.side.expect(worker.Ready).ready_tokens == 16


def test_a_late_event_takes_nothing_back(stage: Stage) -> None:
    class Event:
        is_done = False

        def query(self) -> bool:
            return self.is_done

    rank, event = stage.rank(version=NEWEST), Event()
    rank.extend("t1", 16, after=event)  # of another session's transfer
    rank.extend("t1")
    assert stage.side.expect(worker.Ready).ready_tokens == -1
    event.is_done = True
    stage.side.expect(worker.Ready)  # late
    stage.daemon.stop()
    until(lambda: not rank.is_connected, "the daemon is gone")
    stage.daemon.start()
    assert stage.rejoin(version=NEWEST).expect(worker.Ready).ready_tokens == -1


@pytest.mark.parametrize("transfer_id", ["unknown", "whole"])
def test_blocks_of_no_transfer_that_grows_are_refused(stage: Stage, transfer_id: str) -> None:
    rank = stage.rank(version=NEWEST)
    rank.publish("whole", lists(3), 16)
    with pytest.raises(EngineError) as refused:
        rank.extend(transfer_id, 16, lists(1))
    assert refused.value.code is Code.TRANSFER_UNKNOWN


@pytest.mark.parametrize("ready", [-1, 41])
def test_impossible_numbers_are_refused(stage: Stage, ready: int) -> None:
    rank = stage.rank(version=NEWEST)
    with pytest.raises(EngineError):
        rank.publish("t1", lists(3), 40, ready_tokens=ready)
    rank.publish("t1", lists(3), 40, ready_tokens=0)
    with pytest.raises(EngineError):
        rank.extend("t1", ready)


def test_a_router_makes_the_reference(stage: Stage) -> None:
    rank = stage.rank(version=NEWEST)
    ref = make_ref("tcp://10.0.0.1:9441", "e", "g1", "t1")
    assert len(ref.nonce) == 32
    rank.publish("t1", lists(3), 16, nonce=ref.nonce)
    assert stage.side.expect(worker.Publish).nonce == ref.nonce
    with pytest.raises(KvxferdError, match="32 random ones"):
        make_ref("tcp://10.0.0.1:9441", "e", "g1", "t1", nonce="0" * 31)


@pytest.mark.parametrize(("version", "told"), [(NEWEST, True), (4, False)])
def test_a_progressive_pull_is_one_for_a_daemon_that_knows_it(stage: Stage, version: int, told: bool) -> None:
    rank = stage.rank(version=version)
    ref = make_ref("tcp://10.0.0.1:9441", "e", "g1", "t1")
    ticket = rank.pull(ref, lists(3), 16, deadline_s=30, progressive=True, progress=True)
    asked = stage.side.expect(worker.Pull)
    assert (asked.progressive, asked.wants_progress) == (told, told)
    if told:
        stage.side.say(worker.Progress(ticket=asked.ticket, tokens=8))
        until(lambda: (events := rank.poll()) and events == [Progress(ticket, 8)], "progress")
