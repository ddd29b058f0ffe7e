"""A peer's connection by hand, past the peer socket: whatever a test or an attack wants."""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.utils import z85

from kvxferd.control.curve_keys import CurveKeyPair
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Message
from kvxferd.wire.endpoint import address_of, key_of
from kvxferd.wire.peer import PEER_VERSIONS, PeerHello

WAIT_S = 8.0


class PeerByHand:
    """A DEALER to a daemon's peer socket."""

    def __init__(self, endpoint: str, key: CurveKeyPair | None, greet: bool = True) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 100_000)
        self.socket.setsockopt(zmq.SNDTIMEO, 5_000)
        if key is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(key_of(endpoint)))
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(key.public))
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        self.socket.connect(address_of(endpoint))
        if greet:
            self.say(self.greeting())
            self.next()

    @staticmethod
    def greeting() -> PeerHello:
        return PeerHello(request=1, versions=PEER_VERSIONS, boot="by-hand", endpoint="tcp://127.0.0.1:1")

    def say(self, message: Message) -> None:
        self.socket.send(encode(message))

    def next(self, wait_s: float = WAIT_S) -> Message | None:
        if not self.socket.poll(int(wait_s * 1e3)):
            return None
        return PEER_MESSAGES.decode(self.socket.recv())

    def send_request(self, message: Any, wait_s: float = WAIT_S) -> Any:
        """Say it; return the answer to that request."""
        self.say(message)
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            reply = self.next(left)
            if reply is None or getattr(reply, "request", None) in (message.request, 0):
                return reply
        return None

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


def stranger_key() -> CurveKeyPair:
    """One that nobody admits."""
    public, secret = zmq.curve_keypair()
    return CurveKeyPair(z85.decode(public).hex(), z85.decode(secret))
