"""Frames and descriptors over a socket that takes little at a time."""

from __future__ import annotations

import gc
import os
import resource
import select
import socket

import pytest

from kvxferd.errors import ProtocolError
from kvxferd.frame_socket import FrameSocket
from kvxferd.wire import worker
from kvxferd.wire.codec import CLIENT_MESSAGES, encode
from kvxferd.wire.framing import encode_frame
from tests.support.scripted_daemon import WAIT_S, DaemonSide


@pytest.fixture
def ends():
    """A link and the daemon's end of it."""
    gc.collect()  # what earlier tests dropped is closed now, not between two counts
    fds = set(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    link, side = FrameSocket(ours), DaemonSide(theirs)
    yield link, side
    link.close()
    side.close()
    assert set(os.listdir("/proc/self/fd")) == fds


def test_a_large_frame_goes_in_pieces_and_its_descriptors_once(ends: tuple[FrameSocket, DaemonSide]) -> None:
    link, side = ends
    attach = worker.Attach(request=7, engine_id="x" * (3 << 20), generation="g")
    read_end, write_end = os.pipe()
    link.send(encode(attach), (read_end,))
    link.send(encode(worker.Suspend()))
    link.flush()
    assert not link.is_flushed  # the kernel does not take it whole
    messages = []
    while len(messages) < 2:
        link.flush()
        messages += [(CLIENT_MESSAGES.decode(f.payload), f.fds) for f in side.frames_there()]
    assert link.is_flushed
    assert messages[0][0] == attach
    assert messages[1] == (worker.Suspend(), ())
    (arrived,) = messages[0][1]
    os.write(write_end, b"same pipe")
    assert os.read(arrived, 9) == b"same pipe"
    os.close(write_end)


def test_what_was_never_sent_keeps_no_descriptor(ends: tuple[FrameSocket, DaemonSide]) -> None:
    link, side = ends
    side.close()
    link.send(encode(worker.Suspend()), (os.dup(1),))
    link.flush()
    link.send(encode(worker.Suspend()), (os.dup(1),))
    assert link.is_flushed
    assert link.receive() is None


def test_last_words_are_read_though_sending_fails(ends: tuple[FrameSocket, DaemonSide]) -> None:
    link, side = ends
    link.send(encode(worker.Suspend()))
    link.flush()  # never read by the daemon: its close resets the connection
    side.say(worker.Suspended())
    side.close()
    link.send(encode(worker.Suspend()))
    link.flush()
    frames = link.receive()
    assert frames is not None
    assert frames[0].payload == encode(worker.Suspended())
    assert link.receive() is None


def test_descriptors_that_were_cut_off_are_noticed(ends: tuple[FrameSocket, DaemonSide]) -> None:
    link, side = ends
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    side.say(worker.MoverChanged(), 0, 1, 2)
    assert select.select([link], [], [], WAIT_S)[0]
    lowest_free = os.dup(0)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))  # room for one of the three
        with pytest.raises(ProtocolError, match="cut off"):
            link.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_broken_frame_closes_the_descriptors_of_the_good_one_before(
    ends: tuple[FrameSocket, DaemonSide],
) -> None:
    link, side = ends
    side.write(encode_frame(encode(worker.MoverChanged()), 1) + b"\0\0\0\0\0\0\xff\xff", 1)
    with pytest.raises(ProtocolError, match="two zero bytes"):
        link.receive()  # the fixture counts descriptors
