"""What is sent to the first rank of a prefill engine, over SGLang's own ZMQ sockets.

Of a decode rank: it has begun to pull the room, so that its cache may be computed and published; or, in
SGLang's own form, the room is not wanted any more. Whoever reaches the port can send these, as with SGLang's
backends. Of another pipeline stage's first rank: the pages of the room that it has written, with a key that
only the ranks of the engine have. What is none of these is dropped.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

PULLING, ABORT, STAGE = b"KVXFERD_PULLING", b"ABORT", b"KVXFERD_STAGE"


class Pulling(NamedTuple):
    """A decode rank has begun to pull."""

    room: int


class Aborted(NamedTuple):
    """A decode rank has given up."""

    room: int


class ListedPages(NamedTuple):
    """A group's block ids, as packed int32, and what `BlockList` has beside them."""

    ids: bytes
    first_token: int
    state_at: int


class StagePages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A stage has written so many of the request's tokens in these pages; `ready_tokens` None: all."""

    room: int
    stage: int
    num_tokens: int
    ready_tokens: int | None
    pages: dict[str, ListedPages]


_DECODER = msgspec.msgpack.Decoder(StagePages)


def encode_pulling(room: int) -> list[bytes]:
    """Return the frames of `Pulling`."""
    return [PULLING, str(room).encode()]


def encode_stage(pages: StagePages, key: str) -> list[bytes]:
    """Return the frames of a stage's pages."""
    return [STAGE, key.encode(), msgspec.msgpack.encode(pages)]


def decode(frames: Sequence[bytes], key: str) -> Pulling | Aborted | StagePages | None:
    """Return the message; None where it is none of these. `key`: of the engine's own ranks."""
    match frames:
        case [kind, room, *_] if kind in (PULLING, ABORT) and room.isdigit() and len(room) <= 20:
            return Pulling(int(room)) if kind == PULLING else Aborted(int(room))
        case [kind, its_key, content] if kind == STAGE and hmac.compare_digest(its_key, key.encode()):
            try:
                return _DECODER.decode(content)
            except msgspec.MsgspecError:
                return None
    return None
