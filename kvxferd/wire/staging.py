"""What movers tell each other through the transfer library: memory that it cannot reach is lent in chunks.

The reader asks for a chunk, the source copies it to where it can be read, the reader reads it and gives
it back. A note from anybody may be anything: it is checked, and refused or dropped.
"""

from __future__ import annotations

import msgspec

from kvxferd.errors import ProtocolError
from kvxferd.wire.common import Message

# 512 stretches, 12 bytes each, and the asker's metadata.
MAX_STAGING_MESSAGE_BYTES = 16 << 10
MAX_CHUNK_RUNS = 512
STAMP_BYTES = 16


class ChunkRequest(Message, frozen=True, tag="ask"):
    """Lend me these bytes, one after the other."""

    number: int  # of the asker's choice; never used twice
    addresses: bytes  # little-endian u64 each
    lengths: bytes  # little-endian u32 each
    metadata: bytes  # by which the answer finds its way


class ChunkReady(Message, frozen=True, tag="lent"):
    """The bytes of an `Ask`; theirs for as long as the stamp is what it is."""

    number: int
    address: int
    stamp_address: int
    stamp: bytes


class ChunkRefused(Message, frozen=True, tag="denied"):
    """An `Ask` that is not done, and why."""

    number: int
    message: str


class ChunkRelease(Message, frozen=True, tag="returned"):
    """What was lent has been read, or is not wanted any more."""

    number: int


StagingMessage = ChunkRequest | ChunkReady | ChunkRefused | ChunkRelease

_DECODER: msgspec.msgpack.Decoder[StagingMessage] = msgspec.msgpack.Decoder(StagingMessage)


def decode_staging_message(payload: bytes) -> StagingMessage:
    """Return what was told. Raises ProtocolError."""
    if len(payload) > MAX_STAGING_MESSAGE_BYTES:
        raise ProtocolError(
            f"cannot take a note of {len(payload)} bytes: the limit is {MAX_STAGING_MESSAGE_BYTES}"
        )
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"cannot take a note: {error}") from error
