"""`publish(ready_tokens=)` and `ready` with blocks: a transfer that grows."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from kvxferd.client import BlockList, RankHandle
from kvxferd.errors import Code, EngineError
from kvxferd.layout import unpack_ids
from kvxferd.wire import worker
from kvxferd.wire.block_id_parts import BlockIdAssembly
from kvxferd.wire.common import BlockIds
from kvxferd.wire.limits import IDS_PART_BYTES
from tests.support.client_harness import Kernel, Stage


def lists(*ids: int) -> dict[str, BlockList]:
    return {"full": BlockList(ids=list(ids))}


def ids_of(message: worker.Publish | worker.Ready) -> list[int]:
    return list(unpack_ids(message.blocks["full"].ids))


def growing(stage: Stage, *ids: int) -> RankHandle:
    """A rank with a transfer of 40 tokens, 16 of which are written."""
    rank = stage.rank()
    rank.publish("t1", lists(*ids), 40, ready_tokens=16)
    published = stage.side.expect(worker.Publish)
    assert (ids_of(published), published.num_tokens, published.ready_tokens) == (list(ids), 40, 16)
    return rank


def test_a_transfer_grows(stage: Stage) -> None:
    rank = growing(stage, 3)
    rank.ready("t1", 32, lists(1))
    extended = stage.side.expect(worker.Ready)
    assert (ids_of(extended), extended.ready_tokens) == ([1], 32)
    assert extended.incarnation  # the report goes with the blocks
    rank.add_blocks("t1", lists(2))
    added = stage.side.expect(worker.Ready)
    assert (ids_of(added), added.incarnation) == ([2], "")
    for all_tokens in ((40,), ()):
        rank.ready("t1", *all_tokens)
        report = stage.side.expect(worker.Ready)
        assert (report.ready_tokens, report.incarnation) == (-1, extended.incarnation)


IDS = array("i", range(2 * IDS_PART_BYTES // 4 + 1))
MANY = {"full": BlockList(ids=IDS)}
TOKENS = 16 * len(IDS)
IN_PARTS: dict[str, Callable[[RankHandle], object]] = {
    "publish": lambda rank: rank.publish("t2", MANY, TOKENS),
    "ready": lambda rank: rank.ready("t1", 16, MANY),
    "add_blocks": lambda rank: rank.add_blocks("t1", MANY),
}


@pytest.mark.parametrize("ask", IN_PARTS.values(), ids=IN_PARTS)
def test_more_blocks_than_a_frame_holds_go_in_parts_and_whole(
    stage: Stage, ask: Callable[[RankHandle], object]
) -> None:
    """The last part waits for no later request."""
    rank = stage.rank()
    rank.publish("t1", {}, TOKENS, ready_tokens=0)
    stage.side.expect(worker.Publish)
    ask(rank)
    assembly, num_parts = BlockIdAssembly(), 0
    while isinstance(message := stage.side.receive()[0], BlockIds):
        assert len(message.ids) <= IDS_PART_BYTES
        assembly.add(message)
        num_parts += 1
    assert num_parts == 3
    assert isinstance(message, worker.Publish | worker.Ready)
    assert assembly.complete(message.blocks, message.stream)["full"].ids == IDS.tobytes()


@pytest.mark.parametrize("first", [16, 48, -16])
def test_blocks_that_do_not_continue_the_list_are_refused(stage: Stage, first: int) -> None:
    rank = growing(stage, 3, 4)
    with pytest.raises(EngineError, match=f"from token {first} on: those before end at token 32") as refused:
        rank.ready("t1", 40, {"full": BlockList(ids=[5], first_token=first)})
    assert refused.value.code is Code.BLOCKS_INVALID
    rank.ready("t1", 40, {"full": BlockList(ids=[1], first_token=32)})
    assert ids_of(stage.side.expect(worker.Ready)) == [1]


def test_the_next_daemon_gets_all_that_is_there(stage: Stage) -> None:
    rank = growing(stage, 3)
    stage.lose(rank)
    rank.ready("t1", 32, lists(1))
    stage.daemon.start()
    side = stage.rejoin()
    published = side.expect(worker.Publish)
    assert (ids_of(published), published.ready_tokens) == ([3, 1], 32)
    rank.ready("t1", None, lists(2))
    assert ids_of(side.expect(worker.Ready)) == [2]


def test_tokens_are_reported_when_they_are_written(stage: Stage) -> None:
    rank, event = growing(stage, 3, 1), Kernel()
    rank.ready("t1", 32, lists(2), after=event)
    assert stage.side.expect(worker.Ready).incarnation == ""  # the blocks alone
    rank.ready("t2", 8)  # of another session's transfer: what was asked for later, and is written
    assert stage.side.expect(worker.Ready).transfer_id == "t2"
    event.done.set()
    assert stage.side.expect(worker.Ready).ready_tokens == 32


def test_a_late_event_takes_nothing_back(stage: Stage) -> None:
    rank, event = stage.rank(), Kernel()
    rank.ready("t1", 16, after=event)  # of another session's transfer
    rank.ready("t1")
    assert stage.side.expect(worker.Ready).ready_tokens == -1
    event.done.set()
    stage.side.expect(worker.Ready)  # late
    stage.lose(rank)
    stage.daemon.start()
    assert stage.rejoin().expect(worker.Ready).ready_tokens == -1


@pytest.mark.parametrize("transfer_id", ["unknown", "whole"])
def test_blocks_of_no_transfer_that_grows_are_refused(stage: Stage, transfer_id: str) -> None:
    rank = stage.rank()
    rank.publish("whole", lists(3), 16)
    with pytest.raises(EngineError) as refused:
        rank.ready(transfer_id, 16, lists(1))
    assert refused.value.code is Code.TRANSFER_UNKNOWN


def test_impossible_numbers_are_refused_and_add_no_blocks(stage: Stage) -> None:
    rank = growing(stage, 3)
    for ready in (-1, 41):
        with pytest.raises(EngineError):
            rank.publish("t2", lists(3), 40, ready_tokens=ready)
        with pytest.raises(EngineError):
            rank.ready("t1", ready, lists(1))
    rank.ready("t1", 32, lists(2))
    assert ids_of(stage.side.expect(worker.Ready)) == [2]
