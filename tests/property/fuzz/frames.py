"""Target: bytes and descriptors on a stream socket, in any chunks, up to the decoded messages."""

from __future__ import annotations

from contextlib import suppress

from kvxferd.errors import ProtocolError
from kvxferd.wire.block_id_parts import BlockIdAssembly
from kvxferd.wire.codec import CLIENT_MESSAGES, DAEMON_MESSAGES, FROM_MOVER, PEER_MESSAGES, TO_MOVER, Decoder
from kvxferd.wire.common import BlockIds
from kvxferd.wire.framing import HEADER, FrameDecoder
from kvxferd.wire.limits import MAX_FDS_PER_FRAME, MAX_OPEN_ASSEMBLIES
from tests.property.fuzz.draw import Draw

DECODERS: list[Decoder[object]] = [CLIENT_MESSAGES, DAEMON_MESSAGES, FROM_MOVER, TO_MOVER, PEER_MESSAGES]
SMALL_PAYLOAD = 1 << 12  # so that the limit is met
MAX_CHUNK = 300
MAX_FDS_PER_CHUNK = 254


def try_frames(source: bytes) -> None:
    """No exception but ProtocolError, nothing held beyond the limits, no descriptor out of nowhere."""
    draw = Draw(source)
    decoder = FrameDecoder(SMALL_PAYLOAD)
    assembly = BlockIdAssembly()
    messages = draw.pick(DECODERS)
    taken: set[int] = set()
    given = 0
    try:
        while not draw.is_over:
            num_fds = draw.pick([0, 0, 0, 1, 2, MAX_FDS_PER_CHUNK])
            fds = range(given, given + num_fds)
            given += num_fds
            for frame in decoder.feed(_chunk(draw), fds):
                taken.update(frame.fds)
                message = messages.decode(frame.payload)
                if isinstance(message, BlockIds):
                    assembly.add(message)
        decoder.check_complete()
    except ProtocolError:
        pass
    assert taken <= set(range(given))
    assert len(decoder._fds) <= MAX_FDS_PER_FRAME + MAX_FDS_PER_CHUNK
    assert len(decoder._buffer) <= SMALL_PAYLOAD + HEADER.size + MAX_CHUNK
    assert len(assembly._streams) <= MAX_OPEN_ASSEMBLIES


def _chunk(draw: Draw) -> bytes:
    """A piece of stream: raw bytes, or a header that is nearly right before them."""
    kind = draw.below(4)
    if kind == 0:
        return draw.take(draw.below(MAX_CHUNK))
    payload = draw.take(draw.below(64))
    length = len(payload) if kind < 3 else draw.pick([0, 1, SMALL_PAYLOAD, SMALL_PAYLOAD + 1, 2**32 - 1])
    num_fds = draw.pick([0, 0, 0, 1, MAX_FDS_PER_FRAME, MAX_FDS_PER_FRAME + 1])
    return HEADER.pack(length, num_fds, draw.pick([0, 0, 0, 1])) + payload


def try_payload(source: bytes) -> None:
    """Any payload is a message or a ProtocolError."""
    for decoder in DECODERS:
        with suppress(ProtocolError):
            decoder.decode(source)
