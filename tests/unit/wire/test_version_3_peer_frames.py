"""Frames between daemons as version 3 sent them: this version reads each, and writes the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from kvxferd.wire import peer
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.outlines import PEER_OUTLINES
from kvxferd.wire.versions import for_peer_version

FRAMES: dict[str, list[str]] = json.loads(Path(__file__).with_name("peer_frames_3.json").read_text())
# Messages that came with version 4: a daemon of version 3 is never sent one.
NEW = {"start-probe", "probe-started", "read-probe-back", "probe-report", "end-probe", "still-waiting"}


@pytest.mark.parametrize("tag", FRAMES)
def test_frames_of_version_3(tag: str) -> None:
    for frame in map(bytes.fromhex, FRAMES[tag]):
        message = PEER_MESSAGES.decode(frame)
        assert message.__struct_config__.tag == tag
        assert encode(for_peer_version(message, 3)) == frame
        PEER_OUTLINES.decode(frame)


def test_what_is_new() -> None:
    tags = {str(message.__struct_config__.tag) for message in get_args(peer.PeerMessage)}
    assert tags - FRAMES.keys() == NEW
