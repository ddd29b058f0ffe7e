"""One encoder and one decoder per protocol, each for a closed union of messages."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvxferd.errors import Code, KvxferdError, ProtocolError
from kvxferd.wire import mover, peer, worker
from kvxferd.wire.common import Message, Versions
from kvxferd.wire.limits import MAX_HELLO_BYTES

M = TypeVar("M")

_ENCODER = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Return the message, or a part of one, as msgpack."""
    return _ENCODER.encode(message)


class Decoder(Generic[M]):
    """Decodes one closed union; anything else is a ProtocolError that names the fault."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def decode(self, payload: bytes) -> M:
        """Return the message. Raises ProtocolError(bad-frame)."""
        try:
            return self._decoder.decode(payload)
        # RecursionError: arrays that are nested as deep as the frame is long.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise ProtocolError(f"cannot decode a message of {len(payload)} bytes: {error}") from error


CLIENT_MESSAGES: Decoder[worker.ClientMessage] = Decoder(worker.ClientMessage)
MOVER_DELIVERIES: Decoder[worker.TicketDelivered] = Decoder(worker.TicketDelivered)
DAEMON_MESSAGES: Decoder[worker.DaemonMessage] = Decoder(worker.DaemonMessage)
TO_MOVER: Decoder[mover.ToMover] = Decoder(mover.ToMover)
FROM_MOVER: Decoder[mover.FromMover] = Decoder(mover.FromMover)
PEER_MESSAGES: Decoder[peer.PeerMessage] = Decoder(peer.PeerMessage)


class _HelloVersions(Message, frozen=True, forbid_unknown_fields=False, tag="Hello"):
    """The fields of any version's hello that this version reads."""

    versions: Versions


class _PeerHelloVersions(Message, frozen=True, forbid_unknown_fields=False, tag="PeerHello"):
    """The fields of any version's `PeerHello` that this version reads."""

    request: int
    versions: Versions


_HELLO = Decoder[_HelloVersions](_HelloVersions)
_PEER_HELLO = Decoder[_PeerHelloVersions](_PeerHelloVersions)


def decode_first_frame(payload: bytes) -> worker.ClientMessage:
    """Return a session's first message.

    The versions are decoded before the rest, because a later version's hello may have other fields.
    Raises ProtocolError, with the code bad-version where the sides have none in common.
    """
    if len(payload) > MAX_HELLO_BYTES:
        raise ProtocolError(
            f"cannot take a first frame of {len(payload)} bytes: hello has at most {MAX_HELLO_BYTES}",
            Code.FRAME_TOO_LARGE,
        )
    try:
        versions = _HELLO.decode(payload).versions
    except ProtocolError:
        pass  # no hello
    else:
        negotiate_version(worker.WORKER_VERSIONS, versions)
    return CLIENT_MESSAGES.decode(payload)


def refusal_of_undecodable(payload: bytes, error: KvxferdError) -> peer.PeerRefused:
    """Return the reply to a peer's message that could not be decoded.

    A `PeerHello` of a later version may have other fields; the reply to it names the versions of this side.
    """
    request = 0
    try:
        hello = _PEER_HELLO.decode(payload)
        request = hello.request
        negotiate_version(peer.PEER_VERSIONS, hello.versions)
    except ProtocolError as cause:
        error = cause if cause.code is Code.BAD_VERSION else error
    return peer.refusal_of(request, error)


def negotiate_version(ours: Versions, theirs: Versions) -> int:
    """Return the newest version that both sides support. Raises ProtocolError(bad-version)."""
    version = min(ours.newest, theirs.newest)
    if version < max(ours.oldest, theirs.oldest):
        raise ProtocolError(
            f"cannot speak with a side of protocol version {theirs}: this one speaks {ours}; "
            "upgrade the older",
            Code.BAD_VERSION,
        )
    return version
