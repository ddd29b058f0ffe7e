"""Block ids outside a group's blocks: found many at a time, without numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from kvxferd.ids import GroupName
from kvxferd.layout import unpack_ids
from kvxferd.wire.block_id_parts import BlocksByGroup

# One slice takes some 20 to 50 us, for which nothing else in this process runs.
SLICE_BYTES = 16 << 10
# Lists of so many bytes together are checked by the engine's thread, in 10 to 25 us; longer ones by the I/O
# thread.
SHORT_BYTES = 8 << 10


def find_out_of_range(
    blocks: BlocksByGroup, num_blocks: Mapping[GroupName, int]
) -> Iterator[tuple[GroupName, int] | None]:
    """Yield the first id that its group does not have, and stop; before it None for each slice of good ids.

    Groups that are not in `num_blocks` are not checked.
    """
    for name, listed in blocks.items():
        if (limit := num_blocks.get(name)) is None:
            continue
        for start in range(0, len(listed.ids), SLICE_BYTES):
            ids = bytes(listed.ids[start : start + SLICE_BYTES])
            if not _all_in_range(ids, limit):
                yield name, next(one for one in unpack_ids(ids) if not 0 <= one < limit)
                return
            yield None


def out_of_range_message(what: str, group: GroupName, block: int, num_blocks: int) -> str:
    """Return the sentence for an id that its group does not have."""
    return f"cannot {what}: block {block} of group {group!r}: its ids are 0 to {num_blocks - 1}"


def _all_in_range(ids: bytes, num_blocks: int) -> bool:
    """Whether all of these packed int32 are 0 to num_blocks - 1.

    The ids are lanes of one large integer. No id has its top bit set, or it is negative. With the top bit
    of each lane set, `num_blocks - 1` less the id then keeps that bit where the id is in range, and never
    borrows from the next lane.
    """
    tops, limits = _lanes(len(ids) // 4, num_blocks)
    value = int.from_bytes(ids, "little")
    return not value & tops and (limits - value) & tops == tops


@lru_cache(maxsize=32)
def _lanes(count: int, num_blocks: int) -> tuple[int, int]:
    """Return the top bit of each lane, and with it the largest id in each."""
    ones = int.from_bytes(b"\1\0\0\0" * count, "little")
    tops = ones << 31
    return tops, tops + ones * (num_blocks - 1)
