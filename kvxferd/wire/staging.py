"""Messages between movers, through the transfer library: chunks that a source fills for a reader.

The reader requests a chunk, the source copies it into a staging buffer, the reader reads that and
releases it. That is done for memory that the library cannot reach.

The source writes a fresh stamp before the first byte, and the reader reads the stamp behind the bytes: if
it is that of the reply, the bytes are those requested. A chunk that is not returned is taken back after its
stamp was overwritten.

Any agent may send such a message with any content, so it is checked, and refused or dropped.
"""

from __future__ import annotations

from kvxferd.errors import ProtocolError
from kvxferd.wire.codec import Decoder
from kvxferd.wire.common import Message

# 512 address ranges of 12 bytes each, and the reader's metadata.
MAX_STAGING_MESSAGE_BYTES = 16 << 10
MAX_CHUNK_RUNS = 512
STAMP_BYTES = 16


class ChunkRequest(Message, frozen=True):
    """Copy these address ranges, one behind the other, into a staging buffer."""

    number: int  # chosen by the reader; never used twice
    addresses: bytes  # little-endian u64 each
    lengths: bytes  # little-endian u32 each
    metadata: bytes  # of the reader's agent, for the reply


class ChunkReady(Message, frozen=True):
    """The reply to `ChunkRequest`: the bytes are valid while the stamp is unchanged."""

    number: int
    address: int
    stamp_address: int
    stamp: bytes


class ChunkRefused(Message, frozen=True):
    """The refusal of a `ChunkRequest`, and why."""

    number: int
    message: str


class ChunkRelease(Message, frozen=True):
    """The chunk has been read, or is not needed any more."""

    number: int


StagingMessage = ChunkRequest | ChunkReady | ChunkRefused | ChunkRelease

_DECODER: Decoder[StagingMessage] = Decoder(StagingMessage)


def decode_staging_message(payload: bytes) -> StagingMessage:
    """Return the message. Raises ProtocolError."""
    if len(payload) > MAX_STAGING_MESSAGE_BYTES:
        raise ProtocolError(
            f"cannot take a staging message of {len(payload)} bytes: the limit is {MAX_STAGING_MESSAGE_BYTES}"
        )
    return _DECODER.decode(payload)
