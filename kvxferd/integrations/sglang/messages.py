"""What decode ranks send to the first rank of a prefill engine, over SGLang's own ZMQ sockets.

`PULLING`: a rank has begun to pull the room, so its cache may be computed and published. `ABORT`, in SGLang's
own form: the room is not wanted any more. Anyone who reaches the port can send them, as with SGLang's
backends; what is not one of them is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PULLING, ABORT = b"KVXFERD_PULLING", b"ABORT"


class Pulling(NamedTuple):
    """A decode rank has begun to pull."""

    room: int


class Aborted(NamedTuple):
    """A decode rank has given up."""

    room: int


def encode_pulling(room: int) -> list[bytes]:
    """Return the frames of `Pulling`."""
    return [PULLING, str(room).encode()]


def decode(frames: Sequence[bytes]) -> Pulling | Aborted | None:
    """Return the message; None where it is none of these."""
    if len(frames) < 2 or not frames[1].isdigit() or len(frames[1]) > 20:
        return None
    room = int(frames[1])
    kinds: dict[bytes, type[Pulling | Aborted]] = {PULLING: Pulling, ABORT: Aborted}
    kind = kinds.get(frames[0])
    return None if kind is None else kind(room)
