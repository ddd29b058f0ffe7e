"""Frames and descriptors over a real socketpair."""

from __future__ import annotations

import os
import resource
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvxferd.errors import ProtocolError
from kvxferd.frame_socket import LOST_FD, FrameSocket, dup_fds
from kvxferd.wire.framing import HEADER, encode_frame
from kvxferd.wire.limits import MAX_FDS_PER_FRAME, MAX_FRAME_BYTES
from tests.support.open_fds import num_open_fds


@pytest.fixture
def ends() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    left, right = (FrameSocket(end) for end in socket.socketpair())
    yield left, right
    left.close()
    right.close()
    right.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, FrameSocket]]:
    """A socket, and the frames of the other end; afterwards no descriptor is left."""
    before = num_open_fds()
    left, right = socket.socketpair()
    frames = FrameSocket(right)
    yield left, frames
    frames.close()
    left.close()
    assert num_open_fds() == before


@contextmanager
def room_for(num_fds: int) -> Iterator[None]:
    """Let this process open so many descriptors and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + num_fds, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def test_a_frame_larger_than_the_socket_takes_many_turns(ends: tuple[FrameSocket, FrameSocket]) -> None:
    left, right = ends
    pipe = os.pipe()
    payload = os.urandom(MAX_FRAME_BYTES)
    left.send(payload, dup_fds(pipe))
    left.send(b"after", dup_fds(pipe[:1]))
    left.flush()
    assert not left.is_flushed
    frames = []
    while not frames or frames[-1].payload != b"after":
        left.flush()
        frames += right.receive()
    assert frames[0].payload == payload
    assert [identity(fd) for fd in frames[0].fds] == [identity(fd) for fd in pipe]
    assert [identity(fd) for fd in frames[1].fds] == [identity(pipe[0])]
    assert left.is_flushed
    assert left.unsent_bytes == 0
    for fd in (*pipe, *frames[0].fds, *frames[1].fds):
        os.close(fd)


def test_small_frames_that_wait_take_little_more_than_their_bytes(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    left, right = ends
    frames = [b"small %d" % number for number in range(100_000)]
    tracemalloc.start()
    for frame in frames:
        left.send(frame)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1.25 * left.unsent_bytes < 30 * len(frames)  # a buffer grows by an eighth at a time
    received = []
    while not left.is_flushed or len(received) < len(frames):
        left.flush()
        received += [payload for payload, _ in right.receive()]
    assert received == frames
    assert left.unsent_bytes == 0


def test_as_many_descriptors_as_the_kernel_carries(ends: tuple[FrameSocket, FrameSocket]) -> None:
    left, right = ends
    fds = [os.memfd_create(f"{n}") for n in range(MAX_FDS_PER_FRAME)]
    left.send(b"many", dup_fds(fds))
    left.flush()
    frames = right.receive()
    assert len(frames[0].fds) == MAX_FDS_PER_FRAME
    with pytest.raises(ProtocolError):
        left.send(b"one more", dup_fds((*fds, fds[0])))
    for fd in (*fds, *frames[0].fds):
        os.close(fd)


def test_nothing_leaks_when_a_stream_is_closed_half_way() -> None:
    before = num_open_fds()
    left, right = (FrameSocket(end) for end in socket.socketpair())
    reader, writer = os.pipe()
    left.send(b"sent", dup_fds((reader,)))
    left.flush()
    left.send(b"never sent", (reader, writer))
    left.close()
    frames = right.receive()
    os.close(frames[0].fds[0])
    right.close()
    assert num_open_fds() == before


def test_a_reader_may_accept_a_frame_whose_descriptor_it_has_no_room_for(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    left, right = ends
    left.send(b"with", dup_fds((0,)))
    left.flush()
    right.accept_lost_fds()
    with room_for(0):
        ((payload, fds),) = right.receive() or []
    assert (payload, fds) == (b"with", (LOST_FD,))


def test_descriptors_that_were_cut_off_are_noticed(ends: tuple[FrameSocket, FrameSocket]) -> None:
    left, right = ends
    right.send(b"x", dup_fds((0, 1, 2)))
    right.flush()
    with room_for(1), pytest.raises(ProtocolError, match="cut off"):
        left.receive()


@pytest.mark.parametrize(
    ("sent", "fds"),
    [
        (HEADER.pack(MAX_FRAME_BYTES + 1, 0, 0), []),
        (HEADER.pack(1, 0, 9) + b"x", []),
        (HEADER.pack(1, 1, 0) + b"x", []),
        (encode_frame(b"x", 1) + HEADER.pack(0, 0, 9), [1]),  # behind a good one, whose descriptor is there
    ],
)
def test_frames_that_no_correct_sender_sends(
    raw: tuple[socket.socket, FrameSocket], sent: bytes, fds: list[int]
) -> None:
    left, frames = raw
    socket.send_fds(left, [sent], fds)
    with pytest.raises(ProtocolError):
        frames.receive()


def test_descriptors_that_no_frame_takes_are_closed(raw: tuple[socket.socket, FrameSocket]) -> None:
    left, frames = raw
    socket.send_fds(left, [HEADER.pack(10, 2, 0)], [0, 1])
    assert frames.receive() == []


def test_a_closed_link_has_ended_though_a_forked_process_holds_its_socket(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    left, right = ends
    inherited = os.dup(left.fileno())
    left.send(b"last words")
    left.flush()
    left.close()
    frames = right.receive()
    assert frames is not None
    assert [frame.payload for frame in frames] == [b"last words"]
    assert right.receive() is None
    os.close(inherited)


def test_no_more_frames_are_made_of_a_read_than_are_asked_for(ends: tuple[FrameSocket, FrameSocket]) -> None:
    """A read of 256 KiB may be 32,768 frames: 130 ms, and 4 MB of objects."""
    left, right = ends
    for number in range(10):
        left.send(number.to_bytes(1, "little"))
    reader, writer = os.pipe()
    left.send(b"last", (reader,))
    left.flush()
    os.close(writer)
    sizes, payloads = [], []
    while not payloads or payloads[-1] != b"last":
        frames = right.receive(1, 4)
        assert frames is not None
        sizes.append(len(frames))
        payloads += [frame.payload for frame in frames]
        assert right.has_buffered_frames or len(payloads) >= 8
    assert max(sizes) <= 4
    assert payloads == [*(number.to_bytes(1, "little") for number in range(10)), b"last"]
    assert len(frames[-1].fds) == 1
    os.close(frames[-1].fds[0])


def test_last_words_are_read_though_sending_fails(ends: tuple[FrameSocket, FrameSocket]) -> None:
    left, right = ends
    left.send(b"unread")
    left.flush()  # the other end's close resets the connection
    right.send(b"last words")
    right.flush()
    right.close()
    left.send(b"to nobody")
    left.flush()
    frames = left.receive()
    assert frames is not None
    assert frames[0].payload == b"last words"
    assert left.receive() is None
