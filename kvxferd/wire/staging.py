"""Messages between movers, through the transfer library: chunks that a source fills for a reader.

The reader requests a chunk, the source copies it into a staging buffer, the reader reads that and
releases it. That is done for memory that the library cannot reach, and where a reader needs small parts of
long stretches: then it requests strided patterns.

Any agent may send such a message with any content, so it is checked, and refused or dropped.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxferd.errors import ProtocolError
from kvxferd.wire.bounds import METADATA, REASON
from kvxferd.wire.codec import Decoder
from kvxferd.wire.common import Message

# 512 address ranges of 12 bytes each, and the reader's metadata.
MAX_STAGING_MESSAGE_BYTES = 16 << 10
MAX_CHUNK_RUNS = 512
STAMP_BYTES = 16
# 1,024 starts are 8 KiB. With 16 tokens of 512 bytes at each they fill a chunk twice.
MAX_GATHER_STARTS = 1024
MAX_GATHER_PATTERNS = 64


class ChunkRequest(Message, frozen=True, tag="ask"):
    """Copy these address ranges, one behind the other, into a staging buffer."""

    number: int  # chosen by the reader; never used twice
    addresses: bytes  # little-endian u64 each
    lengths: bytes  # little-endian u32 each
    metadata: bytes  # of the reader's agent, for the reply


class ChunkReady(Message, frozen=True, tag="lent"):
    """The reply to `ChunkRequest`: the bytes are valid while the stamp is unchanged."""

    number: int
    address: int
    stamp_address: int
    stamp: bytes


class ChunkRefused(Message, frozen=True, tag="denied"):
    """The refusal of a `ChunkRequest`, and why."""

    number: int
    message: str


class ChunkRelease(Message, frozen=True, tag="returned"):
    """The chunk has been read, or is not needed any more."""

    number: int


class GatherPattern(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Runs of one length, `outer` times `inner` of them from each start on, in this order."""

    starts: bytes  # little-endian u64 each: addresses in the source's process
    length: int
    outer: int
    outer_stride: int
    inner: int
    inner_stride: int


class GatherRequest(Message, frozen=True, tag="gather"):
    """Pack these runs, one behind the other, into a chunk. The reply is `GatherReady` or `GatherRefused`.

    The source packs bytes of blocks alone that are granted under this fence word.
    """

    number: int  # chosen by the reader; never used twice
    word: bytes
    patterns: Annotated[tuple[GatherPattern, ...], msgspec.Meta(max_length=MAX_GATHER_PATTERNS)]
    metadata: bytes  # of the reader's agent, for the reply


class GatherReady(Message, frozen=True, tag="gathered"):
    """The reply to `GatherRequest`: the packed bytes are valid while the stamp is unchanged."""

    number: int
    address: int
    stamp_address: int
    stamp: bytes
    metadata: Annotated[bytes, METADATA]  # of the chunk, which holds the stamp too


class GatherRefused(Message, frozen=True, tag="gather-refused"):
    """The refusal of a `GatherRequest`, and why."""

    number: int
    message: Annotated[str, REASON]


class GatherRelease(Message, frozen=True, tag="gather-released"):
    """The packed bytes have been read, or are not needed any more."""

    number: int


GatherReply = GatherReady | GatherRefused
GatherMessage = GatherRequest | GatherReply | GatherRelease
StagingMessage = ChunkRequest | ChunkReady | ChunkRefused | ChunkRelease | GatherMessage

_DECODER: Decoder[StagingMessage] = Decoder(StagingMessage)


def decode_staging_message(payload: bytes) -> StagingMessage:
    """Return the message. Raises ProtocolError."""
    if len(payload) > MAX_STAGING_MESSAGE_BYTES:
        raise ProtocolError(
            f"cannot take a staging message of {len(payload)} bytes: the limit is {MAX_STAGING_MESSAGE_BYTES}"
        )
    return _DECODER.decode(payload)
