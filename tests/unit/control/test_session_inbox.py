"""A session's frames are taken in turns: a flood of one does not keep the loop from others."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvxferd.control import session_inbox as inbox_module
from kvxferd.control.session_inbox import FRAMES_PER_TURN, SessionInbox
from kvxferd.frame_socket import FrameSocket
from kvxferd.wire.framing import Frame, encode_frame

NUM = 3 * FRAMES_PER_TURN + 7


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, FrameSocket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = FrameSocket(ours)
    with theirs:
        yield theirs, link
    link.close()


def test_a_turn_takes_so_many_frames_and_the_next_goes_on(pair: tuple[socket.socket, FrameSocket]) -> None:
    theirs, link = pair
    theirs.sendall(b"".join(encode_frame(number.to_bytes(4, "little")) for number in range(NUM)))
    inbox, taken, turns = SessionInbox(link), [], 0
    while inbox.process_turn(lambda frame: taken.append(int.from_bytes(frame.payload, "little"))):
        turns += 1
        assert len(taken) <= turns * FRAMES_PER_TURN
        assert inbox.num_handled <= FRAMES_PER_TURN
    assert turns >= NUM // FRAMES_PER_TURN
    assert taken == list(range(NUM))


def test_one_that_takes_long_ends_the_turn(
    pair: tuple[socket.socket, FrameSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "TURN_S", 0.0)
    theirs, link = pair
    theirs.sendall(encode_frame(b"a") + encode_frame(b"b"))
    inbox, taken = SessionInbox(link), []
    assert inbox.process_turn(taken.append)
    assert [frame.payload for frame in taken] == [b"a"]


def test_the_end_comes_after_all_that_was_sent(pair: tuple[socket.socket, FrameSocket]) -> None:
    theirs, link = pair
    theirs.sendall(b"".join(encode_frame(b"x") for _ in range(NUM)))
    theirs.close()
    inbox, taken = SessionInbox(link), []
    while not inbox.is_eof:
        inbox.process_turn(taken.append)
    assert len(taken) == NUM


def test_frames_that_nobody_takes_are_closed(pair: tuple[socket.socket, FrameSocket]) -> None:
    theirs, link = pair
    read, write = os.pipe()
    socket.send_fds(theirs, [encode_frame(b"first", 0)], [])
    socket.send_fds(theirs, [encode_frame(b"", 1)], [write])
    os.close(write)
    inbox = SessionInbox(link)

    def stop_at(frame: Frame) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        inbox.process_turn(stop_at)
    inbox.close()
    link.close()
    assert os.read(read, 1) == b"", "the writing end is open"
    os.close(read)
