"""Digests of structs: equal structs have equal digests, on every node."""

from __future__ import annotations

import hashlib

import msgspec

from kvxferd.ids import Digest

_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def digest_of(value: object) -> Digest:
    """Return blake2b-128 of the value's canonical msgpack encoding, in hex."""
    return Digest(hashlib.blake2b(_ENCODER.encode(value), digest_size=16).hexdigest())
