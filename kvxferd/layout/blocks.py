"""Block lists: the ids of a group's blocks that hold one request."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from kvxferd.errors import Code, EngineError
from kvxferd.ids import GroupName

if TYPE_CHECKING:
    from typing_extensions import Buffer


class PackedBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A request's blocks in one group, in token order.

    `ids` is little-endian int32, packed; block j holds the tokens from
    ``first_token + j * block_tokens`` on (times the shard count under context parallelism).
    In a state group the last id is the request's state. `state_at` is the token at which that
    state stands, -1 where the group has none.
    """

    ids: bytes
    first_token: int = 0
    state_at: int = -1

    def __len__(self) -> int:
        return len(self.ids) // 4


def check_continues(name: GroupName, end: int, added: PackedBlocks) -> None:
    """Raise EngineError (blocks-invalid) unless blocks that are added begin at token `end` of the request.

    There the group's earlier blocks end. A `first_token` of 0 is not a claim, and is right.
    """
    if added.first_token not in (0, end):
        raise EngineError(
            f"cannot add blocks of group {name!r} from token {added.first_token} on: those before end at "
            f"token {end}; add blocks in order, each once, with that first_token or 0",
            Code.BLOCKS_INVALID,
        )


def pack_ids(ids: Sequence[int] | memoryview | array.array[int]) -> bytes:
    """Return block ids as packed little-endian int32.

    An int32 buffer (numpy array, `array.array("i")`, memoryview) is copied in one step; a list
    is converted element by element. Raises ValueError for another item type and OverflowError
    for an id that does not fit in int32.
    """
    try:
        view = memoryview(ids)  # type: ignore[arg-type]
    except TypeError:
        return array.array("i", ids).tobytes()
    _check_int32(view)
    return view.tobytes()


def lend_ids(ids: Buffer) -> bytes:
    """Return an int32 buffer's bytes as packed ids, borrowed without a copy.

    The caller leaves the buffer unchanged while the ids are in use: a later write to it changes them.
    The result is a memoryview, typed as bytes because ids are only measured, sliced and encoded. Raises
    TypeError for an object without a buffer, and ValueError for another item type or a buffer that is
    not contiguous.
    """
    view = memoryview(ids)
    _check_int32(view)
    if view.ndim != 1 or not view.c_contiguous:
        raise ValueError("cannot lend block ids that do not lie side by side: give a copy")
    return cast(bytes, view.cast("B")) if view.nbytes else b""


def _check_int32(view: memoryview) -> None:
    if view.format not in ("i", "=i", "<i", "l") or view.itemsize != 4:
        raise ValueError(f"cannot take block ids of format {view.format!r}: give an int32 buffer")


def unpack_ids(ids: bytes) -> memoryview:
    """Return packed ids as an int32 memoryview, without a copy."""
    return memoryview(ids).cast("i")
