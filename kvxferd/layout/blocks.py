"""Which blocks of a group hold a request."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec

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


def pack_ids(ids: Sequence[int] | memoryview | array.array[int]) -> bytes:
    """Return block ids as packed little-endian int32.

    An int32 buffer (numpy array, `array.array("i")`, memoryview) is copied in one step; a list
    works too, one element at a time. Raises ValueError for another item type and OverflowError
    for an id that int32 cannot hold.
    """
    try:
        view = memoryview(ids)  # type: ignore[arg-type]
    except TypeError:
        return array.array("i", ids).tobytes()
    _check_int32(view)
    return view.tobytes()


def lend_ids(ids: Buffer) -> bytes:
    """Return an int32 buffer's own bytes, without a copy: what is done to it later is done to them.

    Typed as what everything that takes ids does with them: measured, cut and encoded. Raises TypeError
    for what is no buffer, and ValueError for another item type or one whose bytes do not lie together.
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
    """Return packed ids as an int32 view, without a copy."""
    return memoryview(ids).cast("i")
