"""Frames on a stream: a frame is returned with its last byte, and never before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvxferd.errors import BusyError, ProtocolError
from kvxferd.ids import GroupName
from kvxferd.layout import PackedBlocks
from kvxferd.wire.block_id_parts import BlockIdAssembly
from kvxferd.wire.common import BlockIds
from kvxferd.wire.fd_batches import FdBatchAssembly, leading_fd_batches, start_of_last_batch
from kvxferd.wire.framing import FrameDecoder, encode_frame
from kvxferd.wire.limits import MAX_DESCRIPTORS_PER_RANK, MAX_FDS_PER_FRAME, MAX_NAME_CHARS


def test_a_frame_without_its_last_bytes_is_none() -> None:
    stream = encode_frame(b"first") + encode_frame(b"second")
    first = len(encode_frame(b"first"))
    for cut in range(len(stream)):
        decoder = FrameDecoder()
        before = [frame.payload for frame in decoder.feed(stream[:cut])]
        assert before == [b"first"][: cut >= first]
        if cut not in {0, first}:
            with pytest.raises(ProtocolError, match="ended inside a frame"):
                decoder.check_complete()
        after = [frame.payload for frame in decoder.feed(stream[cut:])]
        assert before + after == [b"first", b"second"]
        decoder.check_complete()


# --- more descriptors than a frame carries


FULL = MAX_FDS_PER_FRAME


@pytest.mark.parametrize(
    ("count", "ahead", "left"),
    [
        (0, [], 0),
        (1, [], 1),
        (FULL, [], FULL),  # all in the message's own frame
        (FULL + 1, [FULL], 1),
        (3 * FULL, [FULL, FULL], FULL),
    ],
)
def test_parts_and_what_is_left_are_all_in_order(count: int, ahead: list[int], left: int) -> None:
    fds = list(range(count))
    parts = list(leading_fd_batches(fds))
    assert [len(part) for _, part in parts] == ahead
    assert len(fds[start_of_last_batch(count) :]) == left
    early = FdBatchAssembly()
    for message, part in parts:
        assert early.add(message.first, part) == ()
    assert [*early.pop_all(), *fds[start_of_last_batch(count) :]] == fds
    assert early.pop_all() == ()


def test_a_new_start_gives_the_old_ones_back() -> None:
    early = FdBatchAssembly()
    early.add(0, (5, 6))
    assert early.add(0, (7,)) == (5, 6)
    assert early.pop_all() == (7,)


@pytest.mark.parametrize(
    ("first", "fds"),
    [
        *[(1, (5,)), (-1, (5,)), (3, (5,))],  # a gap
        *[(2, ()), (0, ())],  # nothing at all
        (0, range(MAX_DESCRIPTORS_PER_RANK + 1)),
        (2, range(MAX_DESCRIPTORS_PER_RANK - 1)),  # with those before, one too many
    ],
)
def test_what_cannot_follow_is_refused_and_loses_nothing(first: int, fds: Sequence[int]) -> None:
    early = FdBatchAssembly()
    early.add(0, (1, 2))
    with pytest.raises(ProtocolError):
        early.add(first, fds)
    assert early.pop_all() == (1, 2)


# --- block ids that travel in parts: their order is kept, and a part that was lost is noticed


GROUP = GroupName("full")
REST = {GROUP: PackedBlocks(ids=b"-end")}


def part(offset: int, ids: bytes) -> BlockIds:
    return BlockIds(stream=2, group=GROUP, offset=offset, ids=ids)


def test_parts_come_before_what_the_request_itself_holds() -> None:
    assembly = BlockIdAssembly()
    assembly.add(part(0, b"one-"))
    assembly.add(part(4, b"two-"))
    assert assembly.complete(REST, 2)[GROUP].ids == b"one-two--end"


def test_a_request_whose_ids_had_no_room_is_refused() -> None:
    room = 6

    def reserve(num_bytes: int) -> bool:
        return num_bytes <= room

    assembly = BlockIdAssembly(reserve)
    assembly.add(part(0, b"one-"))
    assembly.add(part(4, b"two-two-"))
    assert assembly.num_bytes == 0
    with pytest.raises(BusyError, match="has all the room that it may"):
        assembly.complete(REST, 2)
    assert assembly.complete(REST, 0) == REST


def test_a_part_may_be_of_a_group_with_the_longest_name_and_of_none_longer() -> None:
    assembly = BlockIdAssembly()
    longest = GroupName("x" * MAX_NAME_CHARS)
    assembly.add(BlockIds(stream=2, group=longest, offset=0, ids=b"ids-"))
    assert assembly.complete({longest: PackedBlocks(ids=b"end")}, 2)[longest].ids == b"ids-end"
    with pytest.raises(ProtocolError, match="groups for one request"):
        assembly.add(BlockIds(stream=3, group=GroupName(longest + "x"), offset=0, ids=b"ids-"))


def test_a_part_that_comes_twice_behind_another_is_refused() -> None:
    assembly = BlockIdAssembly()
    assembly.add(part(0, b"one-"))
    assembly.add(part(4, b"two-"))
    with pytest.raises(ProtocolError, match="8 bytes came before"):
        assembly.add(part(4, b"two-"))
