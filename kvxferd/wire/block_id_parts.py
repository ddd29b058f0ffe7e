"""Block lists longer than a frame: sent in parts, put together under a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from kvxferd.errors import BusyError, Code, ProtocolError
from kvxferd.ids import GroupName
from kvxferd.layout import BlocksByGroup, PackedBlocks, num_id_bytes
from kvxferd.wire.common import BlockIds
from kvxferd.wire.limits import (
    IDS_PART_BYTES,
    MAX_GROUPS_PER_REQUEST,
    MAX_NAME_CHARS,
    MAX_OPEN_ASSEMBLIES,
    MAX_REQUEST_IDS_BYTES,
)

BUSY_RETRY_S = 1.0


def split_block_ids(
    blocks: Mapping[GroupName, PackedBlocks], stream: int
) -> tuple[list[BlockIds], BlocksByGroup]:
    """Return the parts to send first, and the blocks that the request itself carries.

    Lists that fit in one part together are sent in the request: nearly always all of them.
    """
    if num_id_bytes(blocks) <= IDS_PART_BYTES:
        return [], dict(blocks)
    parts = [part for name, packed in blocks.items() for part in _parts_of_group(name, packed.ids, stream)]
    return parts, {name: msgspec.structs.replace(packed, ids=b"") for name, packed in blocks.items()}


def _parts_of_group(group: GroupName, ids: bytes, stream: int) -> Iterator[BlockIds]:
    for start in range(0, len(ids), IDS_PART_BYTES):
        yield BlockIds(stream=stream, group=group, offset=start, ids=ids[start : start + IDS_PART_BYTES])


ReserveBytes = Callable[[int], bool]


def _reserve_any(num_bytes: int) -> bool:
    return True


class BlockIdAssembly:
    """Collects `BlockIds` parts of one connection until the request that names them arrives.

    `reserve` is called with the number of bytes to reserve, and with a negative number to release them.
    Where it returns False the request's ids are dropped, and the request is refused when it comes.
    """

    def __init__(self, reserve: ReserveBytes = _reserve_any) -> None:
        self._streams: dict[int, dict[GroupName, bytearray]] = {}
        self._dropped: dict[int, None] = {}
        self._reserve = reserve
        self.num_bytes = 0

    def clear(self) -> None:
        """Drop every part. Its session may be kept for a while after its end."""
        self._streams.clear()
        self._dropped.clear()
        self._release(self.num_bytes)

    def _release(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._reserve(-num_bytes)

    def _drop(self, stream: int) -> None:
        groups = self._streams.pop(stream)
        self._release(sum(map(len, groups.values())))
        self._dropped[stream] = None
        if len(self._dropped) > MAX_OPEN_ASSEMBLIES:
            del self._dropped[next(iter(self._dropped))]

    def add(self, part: BlockIds) -> None:
        """Keep a part. Raises ProtocolError where it exceeds a limit or does not fit what came before."""
        if part.stream in self._dropped:
            return
        if part.stream not in self._streams and len(self._streams) >= MAX_OPEN_ASSEMBLIES:
            raise ProtocolError(f"cannot collect ids of more than {MAX_OPEN_ASSEMBLIES} requests at once")
        groups = self._streams.setdefault(part.stream, {})
        if part.offset == 0 and part.group in groups:
            self._release(len(groups[part.group]))
            groups[part.group].clear()  # sent again: the earlier bytes no longer count
        if part.group not in groups and (
            len(groups) >= MAX_GROUPS_PER_REQUEST or len(part.group) > MAX_NAME_CHARS
        ):
            raise ProtocolError(
                f"cannot collect ids of more than {MAX_GROUPS_PER_REQUEST} groups for one request"
            )
        if sum(map(len, groups.values())) + len(part.ids) > MAX_REQUEST_IDS_BYTES:
            raise ProtocolError(
                f"cannot collect more than {MAX_REQUEST_IDS_BYTES} bytes of block ids for one request",
                Code.FRAME_TOO_LARGE,
            )
        front = groups.setdefault(part.group, bytearray())
        if part.offset != len(front):
            raise ProtocolError(
                f"cannot place ids of group {part.group} at byte {part.offset}: "
                f"{len(front)} bytes came before"
            )
        if not self._reserve(len(part.ids)):
            self._drop(part.stream)
            return
        self.num_bytes += len(part.ids)
        front.extend(part.ids)

    def complete(self, blocks: BlocksByGroup, stream: int) -> BlocksByGroup:
        """Return the request's blocks with the parts of `stream` put in front.

        Raises BusyError where there was no room for them, ProtocolError where they do not belong.
        """
        if stream in self._dropped:
            del self._dropped[stream]
            raise BusyError(
                "cannot take so many block ids: what is arriving for this user has all the room that it "
                f"may; try again in {BUSY_RETRY_S:g} s",
                BUSY_RETRY_S,
                "arriving_id_bytes",
            )
        fronts = self._streams.pop(stream, None)
        if fronts is None:
            return blocks  # nearly always: requests of thousands of blocks fit a frame
        self._release(sum(map(len, fronts.values())))
        if unnamed := fronts.keys() - blocks.keys():
            raise ProtocolError(f"cannot place ids of groups {sorted(unnamed)}: the request names none such")
        return {
            name: msgspec.structs.replace(packed, ids=bytes(fronts[name]) + packed.ids)
            if name in fronts
            else packed
            for name, packed in blocks.items()
        }
