"""What a decode engine needs of a prefill engine to read it, and how both name a request's transfer.

A router sends host, port and room, and nothing else. So both engines make the same reference of the room: the
prefill engine's bootstrap server tells its readers the engine's address and a secret of this start, and the
nonce of a room is a digest of both. Whoever reaches the bootstrap server can read the engine's transfers, as
with SGLang's own backends.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from kvxferd.client import TransferRef, make_ref

# A request that is computed again gets another room, for which the same data-parallel rank is chosen: rooms
# that differ by a multiple of this have equal remainders for up to 16 replicas.
_STEP = 720_720  # the least common multiple of 1 to 16
_MAX_ROOM = 1 << 62


class SourceIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prefill engine, as its bootstrap server shows it."""

    endpoint: str  # of its daemon
    engine_id: str
    generation: str
    secret: str

    def reference(self, room: int) -> TransferRef:
        """Return the reference of a room's transfer."""
        return make_ref(self.endpoint, self.engine_id, self.generation, transfer_id(room), self.nonce(room))

    def nonce(self, room: int) -> str:
        """Return the nonce of a room's transfer, which nobody without the secret can guess."""
        return hmac.new(self.secret.encode(), str(room).encode(), hashlib.sha256).hexdigest()


def transfer_id(room: int) -> str:
    """Return the id under which a room's cache is published."""
    return f"room-{room}"


def room_of(transfer: str) -> int | None:
    """Return the room of a transfer id; None where it is not one of this backend's."""
    room = transfer.removeprefix("room-")
    return int(room) if room != transfer and room.lstrip("-").isdecimal() else None


def next_room(room: int) -> int:
    """Return the room by which a request goes on that is computed again: a transfer id is used once.

    Every rank of the decode engine computes the same one, and sends it to the prefill engine.
    """
    digest = hashlib.blake2s(str(room).encode(), digest_size=5).digest()
    steps = int.from_bytes(digest, "big") + 1
    return room % _STEP + _STEP * (steps % (_MAX_ROOM // _STEP))
