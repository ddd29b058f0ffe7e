"""Block lists: as engines give them, and as the session keeps them (a copy, unless `borrowed`)."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxferd.client.refs import MAX_INT, check_name
from kvxferd.errors import Code, EngineError
from kvxferd.ids import GroupName
from kvxferd.layout import PackedBlocks, lend_ids, pack_ids, unpack_ids
from kvxferd.wire.block_id_parts import BlocksByGroup, num_id_bytes
from kvxferd.wire.limits import MAX_REQUEST_IDS_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer


MAX_GROUPS = 256  # today's hybrid models have fewer than ten; a name of each still fits a frame


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


def pack_blocks(
    blocks: Mapping[str, BlockList], known_groups: Collection[str] | None, what: str
) -> BlocksByGroup:
    """Return `blocks` ready for the wire, copied unless they are borrowed.

    `known_groups` are the groups of the rank's layout, None where there is no layout (a scheduler).
    Raises EngineError(blocks-invalid).
    """
    packed: BlocksByGroup = {}
    if len(blocks) > MAX_GROUPS:
        raise EngineError(f"cannot {what}: {len(blocks)} groups, at most {MAX_GROUPS} go")
    for name, listed in blocks.items():
        if known_groups is not None and name not in known_groups:
            raise EngineError(
                f"cannot {what}: the layout has no group {name!r}, only "
                f"{', '.join(map(repr, sorted(known_groups)))}"
            )
        plain = check_name(name, "a group name", Code.BLOCKS_INVALID)
        packed[GroupName(plain)] = _pack_one(plain, listed, what)
    if (total := num_id_bytes(packed)) > MAX_REQUEST_IDS_BYTES:
        raise EngineError(f"cannot {what}: {total} bytes of block ids, at most {MAX_REQUEST_IDS_BYTES} go")
    return packed


def _pack_one(name: str, listed: BlockList, what: str) -> PackedBlocks:
    try:
        first_token = as_int(listed.first_token, "first_token", -MAX_INT, what)
        state_at = as_int(listed.state_at, "state_at", -MAX_INT, what)
        if listed.borrowed:
            packed = lend_ids(listed.ids)  # type: ignore[arg-type]
            return PackedBlocks(ids=packed, first_token=first_token, state_at=state_at)
        ids: memoryview | Sequence[int] = listed.ids  # type: ignore[assignment]
        if not isinstance(ids, (list, tuple)):
            ids = memoryview(ids)  # type: ignore[arg-type]
            if ids.ndim != 1:
                raise ValueError(f"the ids have {ids.ndim} dimensions, not one")
        return PackedBlocks(ids=pack_ids(ids), first_token=first_token, state_at=state_at)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"cannot {what}: blocks of group {name!r}: {error}", Code.BLOCKS_INVALID) from error


def unpack_blocks(packed: BlocksByGroup) -> dict[str, BlockList]:
    """Return the lists as the engine's type; `ids` is an int32 memoryview of the packed bytes."""
    return {
        str(name): BlockList(ids=unpack_ids(one.ids), first_token=one.first_token, state_at=one.state_at)
        for name, one in packed.items()
    }


def as_int(value: object, name: str, least: int, what: str) -> int:
    """Return an integer (numpy's too) as Python's. Raises EngineError(blocks-invalid)."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise EngineError(f"cannot {what}: {name} must be an integer, not {value!r}") from error
    if not least <= number <= MAX_INT:
        shown = number if abs(number) <= MAX_INT else "too large"  # Python prints no number of any length
        raise EngineError(f"cannot {what}: {name} is {shown}, must be at least {least}, at most {MAX_INT}")
    return number
