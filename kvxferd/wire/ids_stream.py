"""Block lists longer than a frame: sent in parts, put together under a limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from kvxferd.errors import Code, ProtocolError
from kvxferd.ids import GroupName
from kvxferd.layout import PackedBlocks
from kvxferd.wire.common import BlockIds
from kvxferd.wire.limits import (
    IDS_PART_BYTES,
    MAX_GROUPS_PER_REQUEST,
    MAX_NAME_CHARS,
    MAX_OPEN_ASSEMBLIES,
    MAX_REQUEST_IDS_BYTES,
)

Blocks = dict[GroupName, PackedBlocks]


def split_ids(blocks: Mapping[GroupName, PackedBlocks], stream: int) -> tuple[list[BlockIds], Blocks]:
    """Return the parts to send first and the blocks that the request itself carries.

    All lists that fit in one part together travel in the request, which is nearly every request.
    """
    if sum(len(b.ids) for b in blocks.values()) <= IDS_PART_BYTES:
        return [], dict(blocks)
    parts = [part for name, packed in blocks.items() for part in _parts(name, packed.ids, stream)]
    return parts, {name: msgspec.structs.replace(packed, ids=b"") for name, packed in blocks.items()}


def _parts(group: GroupName, ids: bytes, stream: int) -> Iterator[BlockIds]:
    for start in range(0, len(ids), IDS_PART_BYTES):
        yield BlockIds(stream=stream, group=group, offset=start, ids=ids[start : start + IDS_PART_BYTES])


class IdsAssembly:
    """Collects `BlockIds` parts of one connection until the request that names them arrives."""

    def __init__(self) -> None:
        self._streams: dict[int, dict[GroupName, bytearray]] = {}

    def add(self, part: BlockIds) -> None:
        """Keep a part. Raises ProtocolError where a limit is passed."""
        if part.stream not in self._streams and len(self._streams) >= MAX_OPEN_ASSEMBLIES:
            raise ProtocolError(f"cannot collect ids of more than {MAX_OPEN_ASSEMBLIES} requests at once")
        groups = self._streams.setdefault(part.stream, {})
        if part.offset == 0 and part.group in groups:
            groups[part.group].clear()  # sent anew: the first time counts no more
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
        front.extend(part.ids)

    def complete(self, blocks: Blocks, stream: int) -> Blocks:
        """Return the request's blocks with the parts of `stream` put in front."""
        fronts = self._streams.pop(stream, {})
        if unnamed := fronts.keys() - blocks.keys():
            raise ProtocolError(f"cannot place ids of groups {sorted(unnamed)}: the request names none such")
        return {
            name: msgspec.structs.replace(packed, ids=bytes(fronts[name]) + packed.ids)
            if name in fronts
            else packed
            for name, packed in blocks.items()
        }
