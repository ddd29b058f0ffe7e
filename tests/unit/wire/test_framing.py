"""Frames on a stream: a frame is returned with its last byte, and never before."""

from __future__ import annotations

import pytest

from kvxferd.errors import ProtocolError
from kvxferd.wire.framing import FrameDecoder, encode_frame


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
