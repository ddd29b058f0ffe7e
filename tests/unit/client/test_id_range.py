"""Block ids that their group does not have never leave the client."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.client import BlockList, Delivered, Failed, PublishRefused
from kvxferd.client.id_range import SHORT_BYTES, SLICE_BYTES, find_out_of_range
from kvxferd.errors import Code, EngineError
from kvxferd.ids import GroupName, Rank
from kvxferd.layout import PackedBlocks
from kvxferd.wire import worker
from tests.support.client_harness import REF, Stage, blocks, events_of, one_event

FULL = GroupName("full")
LONG = SHORT_BYTES // 4 + 1
INT32 = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-2, 40))


def first_outside(ids: list[int], num_blocks: int) -> int | None:
    return next((one for one in ids if one < 0 or one >= num_blocks), None)


@given(st.lists(INT32, max_size=40), st.one_of(st.integers(1, 40), st.integers(2**31 - 3, 2**31)))
def test_the_first_id_outside_is_found(ids: list[int], num_blocks: int) -> None:
    packed = {FULL: PackedBlocks(array("i", ids).tobytes())}
    found = [one for one in find_out_of_range(packed, {FULL: num_blocks}) if one is not None]
    bad = first_outside(ids, num_blocks)
    # A slice is judged as a whole: what is named is the first of it.
    assert found == ([] if bad is None else [(FULL, bad)])


@pytest.mark.parametrize("at", [0, SLICE_BYTES // 4 - 1, SLICE_BYTES // 4, 3 * SLICE_BYTES // 4])
@pytest.mark.parametrize("bad", [-1, -(2**31), 16, 2**31 - 1])
def test_in_any_slice(at: int, bad: int) -> None:
    ids = array("i", [15] * (SLICE_BYTES + 5))
    ids[at] = bad
    *good, found = find_out_of_range({FULL: PackedBlocks(memoryview(ids).cast("B"))}, {FULL: 16})  # type: ignore[arg-type]
    assert found == (FULL, bad)
    assert good == [None] * (at // (SLICE_BYTES // 4))
    assert list(find_out_of_range({FULL: PackedBlocks(ids.tobytes())}, {})) == []


def long_list(bad: int = 3, *, borrowed: bool = False) -> dict[str, BlockList]:
    ids = array("i", [1] * LONG)
    ids[-1] = bad
    return {"full": BlockList(ids=ids, borrowed=borrowed)}


def test_a_short_list_is_refused_at_once(stage: Stage) -> None:
    rank = stage.rank()
    for bad in (-1, 16):
        with pytest.raises(
            EngineError, match=f"cannot pull req-1: block {bad} of group 'full': its ids are 0 to 15"
        ) as e:
            rank.pull(REF, blocks(1, bad), num_tokens=32, deadline_s=30)
        assert e.value.code is Code.BLOCKS_INVALID
        with pytest.raises(EngineError, match=f"cannot publish 't': block {bad} of group"):
            rank.publish("t", blocks(1, bad), num_tokens=32)
    assert stage.side.is_silent()
    rank.publish("t", blocks(0, 15), num_tokens=32)  # the id is not used up
    stage.side.expect(worker.Publish)


@pytest.mark.parametrize("borrowed", [False, True])
def test_a_long_list_is_refused_by_an_event(stage: Stage, borrowed: bool) -> None:
    rank = stage.rank()
    ticket = rank.pull(REF, long_list(16, borrowed=borrowed), num_tokens=LONG * 16, deadline_s=30)
    failed = one_event(rank)
    assert isinstance(failed, Failed)
    assert (failed.ticket, failed.code, failed.safe_to_reuse) == (ticket, Code.BLOCKS_INVALID, True)
    assert "block 16 of group 'full'" in failed.message
    assert len(list(memoryview(failed.blocks["full"].ids))) == LONG
    rank.publish("t", long_list(-7, borrowed=borrowed), num_tokens=LONG * 16)
    refused = one_event(rank)
    assert isinstance(refused, PublishRefused)
    assert (refused.transfer_id, refused.code) == ("t", Code.BLOCKS_INVALID)
    assert stage.side.is_silent()
    rank.publish("t", blocks(1), num_tokens=16)
    stage.side.expect(worker.Publish)


def test_requests_keep_their_order_around_long_lists(stage: Stage) -> None:
    rank = stage.rank()
    rank.publish("first", long_list(), num_tokens=LONG * 16)
    rank.publish("bad", long_list(99), num_tokens=LONG * 16)
    rank.publish("second", blocks(1), num_tokens=16)
    ticket = rank.pull(REF, long_list(), num_tokens=LONG * 16, deadline_s=30)
    assert [stage.side.expect(worker.Publish).transfer_id for _ in range(2)] == ["first", "second"]
    pull = stage.side.expect(worker.Pull)
    stage.side.say(worker.Delivered(ticket=pull.ticket, bytes=1, runs=1, wire_s=0.1))
    events = {type(one): one for one in events_of(rank, 2)}
    assert events[Delivered].ticket is ticket  # type: ignore[attr-defined]
    assert events[PublishRefused].transfer_id == "bad"  # type: ignore[attr-defined]


def test_a_pull_that_is_cancelled_before_its_check(stage: Stage) -> None:
    """No daemon is there: nothing was sent, so it ends at once, and the check of it later changes nothing."""
    rank = stage.rank()
    stage.daemon.stop()
    while rank.is_connected:
        pass
    ticket = rank.pull(REF, long_list(99), num_tokens=LONG * 16, deadline_s=30)
    ticket.cancel()
    failed = one_event(rank)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.safe_to_reuse) == (Code.CANCELLED, True)
    rank.publish("kept", long_list(), num_tokens=LONG * 16)
    rank.publish("bad", long_list(99), num_tokens=LONG * 16)
    stage.daemon.start()
    stage.rejoin()
    assert stage.side.expect(worker.Publish).transfer_id == "kept"
    refused = one_event(rank)
    assert isinstance(refused, PublishRefused)
    assert stage.side.is_silent()


def test_a_scheduler_knows_no_groups(stage: Stage) -> None:
    """Only the engine's ranks have layouts: the daemon checks."""
    stage.publisher((Rank(0, 0), "first")).publish("t", blocks(99), num_tokens=16)
    stage.side.expect(worker.Publish)
