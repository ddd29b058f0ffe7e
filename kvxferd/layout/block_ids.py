"""Block lists: the ids of a group's blocks that hold one request, as engines give them and packed."""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


BlocksByGroup = dict[GroupName, PackedBlocks]


def num_id_bytes(blocks: Mapping[GroupName, PackedBlocks]) -> int:
    """Return the bytes of the block ids of all groups."""
    num_bytes = 0
    for packed in blocks.values():  # six times for a small pull, whose lists are one or two
        num_bytes += len(packed.ids)
    return num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockList:
    """A request's block ids in one group, in token order.

    Attributes:
        ids: an int32 buffer of shape (blocks,): a numpy array, `array.array("i")`, a memoryview. Or a
            list of integers, which is converted one element at a time and so is slow when long. Block
            j holds the tokens from ``first_token + j * block_tokens`` on. In a state group the last id
            is the request's state.
        first_token: the token at which the first block begins.
        state_at: in a state group, the token at which the state stands; it must equal `num_tokens`.
            -1 in every other group.
        borrowed: False: `publish` and `pull` copy `ids` before they return, and the engine may change
            it at once. True: an int32 buffer is not copied, so that the call takes as long for a
            million ids as for one. It must then stay unchanged as long as the blocks are the
            transfer's: until the pull's terminal event (`Quiesced`, after a Failed that is not
            `safe_to_reuse`), or until `Released`. A change before that may read into the wrong blocks.

    `publish` and `pull` raise EngineError (code `blocks-invalid`) for ids that are no int32 values or
    have more than one dimension, and for a `borrowed` list that is no buffer. The daemon refuses ids that
    the group does not have, with the same code: by `PublishRefused` or `Failed`.
    """

    ids: Buffer | Sequence[int]
    first_token: int = 0
    state_at: int = -1
    borrowed: bool = False


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


def append_ids(kept: PackedBlocks, added: Buffer) -> PackedBlocks:
    """Return `kept` with more ids behind its own, in the time that the added ones take.

    The first call copies the list into a bytearray, typed as bytes because ids are only measured, sliced and
    encoded; later ones make that longer, and return `kept` itself.
    """
    if isinstance(kept.ids, bytearray):
        kept.ids.extend(memoryview(added).cast("B"))
        return kept
    grown = bytearray(kept.ids)
    grown.extend(memoryview(added).cast("B"))
    return PackedBlocks(cast(bytes, grown), kept.first_token, kept.state_at)


def freeze_ids(kept: PackedBlocks) -> PackedBlocks:
    """Return a list that stays as it is, also where `append_ids` makes `kept` longer."""
    if isinstance(kept.ids, bytearray):
        return PackedBlocks(bytes(kept.ids), kept.first_token, kept.state_at)
    return kept


def pack_ids(ids: Buffer | Sequence[int]) -> bytes:
    """Return block ids as packed little-endian int32.

    An int32 buffer (numpy array, `array.array("i")`, memoryview) is copied in one step; a list
    is converted element by element. Raises ValueError for another item type or shape, OverflowError
    for an id that does not fit in int32, and TypeError for anything else, a set or an iterator too.
    """
    if isinstance(ids, list):
        return array.array("i", ids).tobytes()
    try:
        view = memoryview(ids)  # type: ignore[arg-type]
    except TypeError:
        if not isinstance(ids, Sequence):
            raise
        return array.array("i", ids).tobytes()
    _check_int32(view)
    return view.tobytes()


def borrow_ids(ids: Buffer) -> bytes:
    """Return an int32 buffer's bytes as packed ids, borrowed without a copy.

    The caller leaves the buffer unchanged while the ids are in use: a later write to it changes them.
    The result is a memoryview, typed as bytes because ids are only measured, sliced and encoded. Raises
    TypeError for an object without a buffer, and ValueError for another item type or a buffer that is
    not contiguous.
    """
    view = memoryview(ids)
    _check_int32(view)
    if not view.c_contiguous:
        raise ValueError("cannot borrow block ids that do not lie side by side: give a copy")
    return cast(bytes, view.cast("B")) if view.nbytes else b""


def _check_int32(view: memoryview) -> None:
    if view.format not in ("i", "=i", "<i", "l") or view.itemsize != 4:
        raise ValueError(f"cannot take block ids of format {view.format!r}: give an int32 buffer")
    if view.ndim != 1:
        raise ValueError(f"the ids have {view.ndim} dimensions, not one")


def unpack_ids(ids: bytes) -> memoryview:
    """Return packed ids as an int32 memoryview, without a copy."""
    return memoryview(ids).cast("i")


def unpack_blocks(packed: BlocksByGroup) -> dict[str, BlockList]:
    """Return the lists as the engine's type; `ids` is an int32 memoryview of the packed bytes."""
    return {
        str(name): BlockList(ids=unpack_ids(one.ids), first_token=one.first_token, state_at=one.state_at)
        for name, one in packed.items()
    }
