"""Frames and descriptors over a real socketpair."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator

import pytest

from kvxferd.errors import ProtocolError
from kvxferd.mover.stream import FrameStream
from kvxferd.wire.framing import HEADER
from kvxferd.wire.limits import MAX_FDS_PER_FRAME, MAX_FRAME_BYTES


@pytest.fixture
def ends() -> Iterator[tuple[FrameStream, FrameStream]]:
    left, right = (FrameStream(end) for end in socket.socketpair())
    yield left, right
    left.close()
    right.close()
    right.close()


def identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def test_a_frame_larger_than_the_socket_takes_many_turns(ends: tuple[FrameStream, FrameStream]) -> None:
    left, right = ends
    pipe = os.pipe()
    payload = os.urandom(MAX_FRAME_BYTES)
    left.queue(payload, pipe)
    left.queue(b"after", pipe[:1])
    assert not left.flush()
    assert left.has_output
    frames = []
    while not frames or frames[-1].payload != b"after":
        left.flush()
        frames += right.receive()[0]
    assert frames[0].payload == payload
    assert [identity(fd) for fd in frames[0].fds] == [identity(fd) for fd in pipe]
    assert [identity(fd) for fd in frames[1].fds] == [identity(pipe[0])]
    assert not left.has_output
    for fd in (*pipe, *frames[0].fds, *frames[1].fds):
        os.close(fd)


def test_descriptors_are_duplicated_when_queued(ends: tuple[FrameStream, FrameStream]) -> None:
    left, right = ends
    reader, writer = os.pipe()
    known = identity(reader)
    left.queue(b"x", (reader,))
    os.close(reader)
    os.close(writer)
    left.flush()
    ((_, (received,)),), ended = right.receive()
    assert (identity(received), ended) == (known, False)
    os.close(received)


def test_as_many_descriptors_as_the_kernel_carries(ends: tuple[FrameStream, FrameStream]) -> None:
    left, right = ends
    fds = [os.memfd_create(f"{n}") for n in range(MAX_FDS_PER_FRAME)]
    left.queue(b"many", fds)
    left.flush()
    frames, _ = right.receive()
    assert len(frames[0].fds) == MAX_FDS_PER_FRAME
    with pytest.raises(ProtocolError):
        left.queue(b"one more", [*fds, fds[0]])
    for fd in (*fds, *frames[0].fds):
        os.close(fd)


def test_the_end_is_told_after_the_last_frame(ends: tuple[FrameStream, FrameStream]) -> None:
    left, right = ends
    left.queue(b"last")
    left.flush()
    left.close()
    frames, ended = right.receive()
    assert ([frame.payload for frame in frames], ended) == ([b"last"], True)


def test_a_peer_that_is_gone_is_an_error_to_send_to(ends: tuple[FrameStream, FrameStream]) -> None:
    left, right = ends
    right.close()
    left.queue(b"anyone?")
    with pytest.raises(OSError):  # noqa: PT011
        left.flush()


def test_nothing_leaks_when_a_stream_is_closed_half_way() -> None:
    before = len(os.listdir("/proc/self/fd"))
    left, right = (FrameStream(end) for end in socket.socketpair())
    reader, writer = os.pipe()
    left.queue(b"sent", (reader,))
    left.flush()
    left.queue(b"never sent", (reader, writer))
    os.close(reader)
    os.close(writer)
    left.close()
    frames, _ = right.receive()
    os.close(frames[0].fds[0])
    right.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_that_no_frame_takes_are_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    raw, end = socket.socketpair()
    stream = FrameStream(end)
    pipe = os.pipe()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", pipe))]
    raw.sendmsg([HEADER.pack(10, 2, 0)], rights)
    assert stream.receive() == ([], False)
    stream.close()
    raw.close()
    for fd in pipe:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "sent",
    [HEADER.pack(MAX_FRAME_BYTES + 1, 0, 0), HEADER.pack(1, 0, 9) + b"x", HEADER.pack(1, 1, 0) + b"x"],
)
def test_frames_that_no_correct_sender_sends(sent: bytes) -> None:
    raw, end = socket.socketpair()
    stream = FrameStream(end)
    raw.sendall(sent)
    with pytest.raises(ProtocolError):
        stream.receive()
    stream.close()
    raw.close()


def test_many_small_frames_arrive_in_order(ends: tuple[FrameStream, FrameStream]) -> None:
    left, right = ends
    sent = [bytes([n % 256]) for n in range(5000)]
    for payload in sent:
        left.queue(payload)
    got: list[bytes] = []
    while len(got) < len(sent):
        left.flush()
        got += [frame.payload for frame in right.receive()[0]]
    assert got == sent
