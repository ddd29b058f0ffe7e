"""One encoder and one decoder per protocol, each for a closed union of messages."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvxferd.errors import Code, ProtocolError
from kvxferd.wire import mover, peer, worker
from kvxferd.wire.common import Message, Versions

M = TypeVar("M")

_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return the message as msgpack."""
    return _ENCODER.encode(message)


class Decoder(Generic[M]):
    """Decodes one closed union; anything else is a ProtocolError that says what was wrong."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def decode(self, payload: bytes) -> M:
        """Return the message. Raises ProtocolError(bad-frame)."""
        try:
            return self._decoder.decode(payload)
        # RecursionError: nested arrays as deep as the frame is long.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise ProtocolError(f"cannot decode a message of {len(payload)} bytes: {error}") from error


CLIENT_MESSAGES: Decoder[worker.ClientMessage] = Decoder(worker.ClientMessage)
NOTICES: Decoder[worker.Delivered] = Decoder(worker.Delivered)
DAEMON_MESSAGES: Decoder[worker.DaemonMessage] = Decoder(worker.DaemonMessage)
TO_MOVER: Decoder[mover.ToMover] = Decoder(mover.ToMover)
FROM_MOVER: Decoder[mover.FromMover] = Decoder(mover.FromMover)
PEER_MESSAGES: Decoder[peer.PeerMessage] = Decoder(peer.PeerMessage)


def negotiate(ours: Versions, theirs: Versions) -> int:
    """Return the newest version that both sides speak. Raises ProtocolError(bad-version)."""
    version = min(ours.newest, theirs.newest)
    if version < max(ours.oldest, theirs.oldest):
        raise ProtocolError(
            f"cannot speak with a side of protocol versions {theirs.oldest} to {theirs.newest}: "
            f"this one speaks {ours.oldest} to {ours.newest}; upgrade the older",
            Code.BAD_VERSION,
        )
    return version
