"""What movers tell each other through the transfer library: memory that it cannot reach is lent in chunks.

The reader asks for a chunk, the source copies it to where it can be read, the reader reads it and gives
it back. A note from anybody may be anything: it is checked, and refused or dropped.
"""

from __future__ import annotations

import msgspec

from kvxferd.errors import ProtocolError
from kvxferd.wire.common import Message

# 512 stretches, 12 bytes each, and the asker's metadata.
MAX_NOTE_BYTES = 16 << 10
MAX_ASKED_RUNS = 512
STAMP_BYTES = 16


class Ask(Message, frozen=True, tag="ask"):
    """Lend me these bytes, one after the other."""

    number: int  # of the asker's choice; never used twice
    addresses: bytes  # little-endian u64 each
    lengths: bytes  # little-endian u32 each
    metadata: bytes  # by which the answer finds its way


class Lent(Message, frozen=True, tag="lent"):
    """The bytes of an `Ask`; theirs for as long as the stamp is what it is."""

    number: int
    address: int
    stamp_address: int
    stamp: bytes


class Denied(Message, frozen=True, tag="denied"):
    """An `Ask` that is not done, and why."""

    number: int
    message: str


class Returned(Message, frozen=True, tag="returned"):
    """What was lent has been read, or is not wanted any more."""

    number: int


Note = Ask | Lent | Denied | Returned

_DECODER: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)


def decode_note(note: bytes) -> Note:
    """Return what was told. Raises ProtocolError."""
    if len(note) > MAX_NOTE_BYTES:
        raise ProtocolError(f"cannot take a note of {len(note)} bytes: the limit is {MAX_NOTE_BYTES}")
    try:
        return _DECODER.decode(note)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"cannot take a note: {error}") from error
