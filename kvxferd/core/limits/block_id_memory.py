"""What transfers, pulls and grants are counted for, as long as they keep their block ids."""

from __future__ import annotations

from collections.abc import Mapping

from kvxferd.errors import Code, EngineError
from kvxferd.ids import GroupName
from kvxferd.layout import PackedBlocks, num_id_bytes
from kvxferd.wire.common import RankIncarnations
from kvxferd.wire.limits import MAX_REQUEST_IDS_BYTES

# What a transfer or a pull is counted for without its ids (timers, indexes, names), and a group. Measured,
# with ids of 32 characters: a transfer of one group takes 2.1 KB, a pull with its hold 3.4 KB where it is
# counted for 4.6, a group 0.1 (`tests/unit/core/limits/test_block_id_memory.py`).
ENTRY_BYTES, GROUP_BYTES = 2048, 256
# An entry of a transfer's mapping from ranks to incarnations, and a character of an incarnation at its
# widest. Of 64 ranks with names of 16 characters that is 8 KiB; transfers that name the same share it.
RANK_BYTES, CHAR_BYTES = 64, 4


def request_bytes(blocks: Mapping[GroupName, PackedBlocks]) -> int:
    """Return the bytes that a request with these lists takes while it is kept."""
    return ENTRY_BYTES + sum(GROUP_BYTES + len(packed.ids) for packed in blocks.values())


def check_num_ids(blocks: Mapping[GroupName, PackedBlocks], what: str) -> None:
    """Raise EngineError where a request lists more ids than a request may. `what`: "pull transfer t"."""
    if (num_bytes := num_id_bytes(blocks)) > MAX_REQUEST_IDS_BYTES:
        raise EngineError(
            f"cannot {what}: its block ids take {num_bytes} bytes, and {MAX_REQUEST_IDS_BYTES} is the limit; "
            "use larger blocks, or split the request",
            Code.BLOCKS_INVALID,
        )


def incarnation_bytes(num_ranks: int, named: RankIncarnations) -> int:
    """Return the bytes that a transfer of `num_ranks` ranks takes for its mapping of ranks to incarnations.

    A publisher may give any name to an absent rank: 4,096 names of 250 characters, others in each publish,
    were 1.4 MB a transfer.
    """
    return RANK_BYTES * num_ranks + sum(CHAR_BYTES * len(incarnation) for _, incarnation in named)
