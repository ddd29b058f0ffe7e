"""The fuzzing targets, tried for a moment: bytes of hypothesis's choosing, and what was found once."""

from __future__ import annotations

import array
import os
import socket
import tracemalloc

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvxferd.errors import ProtocolError
from kvxferd.frame_socket import FrameSocket, close_fds
from kvxferd.wire.framing import HEADER
from tests.property.fuzz.frames import try_frames, try_payload
from tests.property.fuzz.layouts import pairs, try_layouts
from tests.property.fuzz.recorded_sessions import tapes
from tests.property.fuzz.sessions import try_session
from tests.support.open_fds import num_open_fds

sources = st.binary(max_size=400)


@settings(max_examples=300, deadline=None)
@given(sources)
def test_any_stream_in_any_chunks(source):
    try_frames(source)


@settings(max_examples=300, deadline=None)
@given(sources)
def test_any_payload(source):
    try_payload(source)


@settings(max_examples=200, deadline=None)
@given(sources)
def test_any_change_to_what_a_node_hears(source):
    try_session(source)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_layout_and_request(source):
    tracemalloc.start()
    try:
        event(try_layouts(source))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize("tape", range(len(tapes())))
def test_tapes_are_worth_changing(tape):
    """Unchanged, every one is heard to its end."""
    assert len(tapes()[tape].received) > 10
    try_session(bytes([tape]))


@pytest.mark.parametrize("pair", range(len(pairs())))
def test_layouts_are_worth_changing(pair):
    """Unchanged, every one of them moves bytes."""
    assert try_layouts(bytes([pair])) == "expanded"


# --- real descriptors


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=40), st.integers(0, 3), st.integers(0, 4)), max_size=12))
def test_no_descriptor_is_lost_whatever_a_stream_says(chunks):
    """Headers that lie about lengths and descriptors; frames taken, dropped half-way, or cut off."""
    before = num_open_fds(collect=False)  # 150 collections would take a minute
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = FrameSocket(ours)
    try:
        for payload, num_sent, num_said in chunks:
            said = HEADER.pack(len(payload) + (num_said == 4), num_said % 4, 0) + payload
            passed = [os.dup(0) for _ in range(num_sent)]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
            theirs.sendmsg([said], rights)
            close_fds(passed)
            for frame in link.receive() or []:
                close_fds(frame.fds)
    except ProtocolError:
        pass
    finally:
        link.close()
        theirs.close()
    assert num_open_fds(collect=False) <= before
