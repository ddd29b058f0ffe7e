"""The memory of the block ids that transfers, pulls and grants keep until they end."""

from __future__ import annotations

from collections.abc import Mapping

from kvxferd.core.limits.checks import RETRY_AFTER_S
from kvxferd.core.limits.fair_share import FairShare
from kvxferd.errors import BusyError, Code, EngineError
from kvxferd.ids import GroupName
from kvxferd.layout import PackedBlocks, num_id_bytes
from kvxferd.wire.common import RankIncarnations
from kvxferd.wire.limits import MAX_REQUEST_IDS_BYTES

# An id is 4 bytes: a request of 32,768 tokens at 16 tokens a block keeps 8 KiB, one of a million 256 KiB.
# 512 MiB are 44,000 of the former for a user who is alone, five engines with all the transfers that they may
# have, and 1,778 of the latter; for one who comes second 3,200 and 127. Without a limit of bytes 8,192
# transfers of 16 MiB were 128 GiB for each engine.
MAX_BLOCK_ID_BYTES = 512 << 20
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


class BlockIdMemory:
    """Counts the bytes by user. An engine, a session and a rank each belong to one user."""

    def __init__(self, limit: int = MAX_BLOCK_ID_BYTES) -> None:
        self._share = FairShare(limit)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all users."""
        return self._share.held

    def check(self, uid: int, num_bytes: int, what: str) -> None:
        """Raise BusyError where the user has no room for `num_bytes`. `what`: "pull transfer t"."""
        if not self._share.has_room(uid, num_bytes):
            raise BusyError(
                f"cannot {what}: the block ids of all requests take {self._share.held} bytes here, "
                f"{self._share.held_by(uid)} of them of uid {uid}, and {self._share.limit} is the limit; "
                f"try again in {RETRY_AFTER_S:g} s",
                RETRY_AFTER_S,
                "block_id_bytes",
            )

    def add(self, uid: int, num_bytes: int) -> None:
        """Count a request that is kept from now on."""
        self._share.add(uid, num_bytes)

    def remove(self, uid: int, num_bytes: int) -> None:
        """Stop counting a request that has ended."""
        self._share.release(uid, num_bytes)
