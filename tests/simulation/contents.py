"""The bytes of requests in a rank's memory: written, and checked, from the layout alone.

Each byte is a hash of the request's number and of its coordinate: layer, component, unit, token, and place in
the item. Nothing of `kvxferd.plan` is used, so that an error there cannot hide itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.ma  # as `np.unique` would, maybe where no descriptor is left
import numpy.typing as npt

from kvxferd.client import BlockList
from kvxferd.ids import RegionId
from kvxferd.layout import CacheTensor, Group, GroupKind, PackedBlocks, RankLayout, pack_ids
from tests.simulation.shapes import span_of
from tests.support.brute_force import items

Bytes = npt.NDArray[np.uint8]
Memories = Mapping[RegionId, Bytes]  # a rank's, by region
Lists = Mapping[str, BlockList]  # a group that the rank lacks is ignored: a publish is for all stages

_TOKEN_FACTOR, _FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_BLOCK_0 = PackedBlocks(pack_ids([0]))


class Wrong(NamedTuple):
    """The bytes that a pull should have delivered and did not."""

    count: int
    first: str  # coordinate and block; "" if there is none


class _Spots(NamedTuple):
    """What the blocks of one group hold in one region: a column for each byte of a block.

    Tokens are counted from the block's first. A state is an item of one token, the last before it stands.
    """

    group: Group
    region: RegionId
    at: npt.NDArray[np.int64]  # (blocks, columns): offsets in the region
    token: npt.NDArray[np.int64]  # (columns,): the first of the byte's item
    end: npt.NDArray[np.int64]  # (columns,): one past its last
    seed: npt.NDArray[np.uint64]  # (columns,): hash of what else is in the coordinate
    owner: npt.NDArray[np.str_]  # (columns,): the same, for people


class _Listed(NamedTuple):
    """What a request's blocks hold in one region; arrays of shape (blocks, columns)."""

    spots: _Spots
    ids: list[int]
    at: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]

    def names(self, request: int) -> npt.NDArray[np.uint64]:
        """Return a name for each byte, the same on every rank."""
        mixed = self.token.astype(np.uint64) * _TOKEN_FACTOR + np.uint64(request << 32)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _FACTOR ^ self.spots.seed
        return mixed * _FACTOR

    def content(self, request: int) -> Bytes:
        """Return the right bytes."""
        return (self.names(request) >> np.uint64(56)).astype(np.uint8)

    def describe(self, row: int, column: int) -> str:
        """Return where a byte belongs."""
        block, token = self.ids[row], self.token[row, column]
        return f"{self.spots.owner[column]}, token {token}, block {block} of {self.spots.group.name}"


class Contents:
    """What one rank's memory holds. One is made for each layout, because that takes a millisecond."""

    def __init__(self, layout: RankLayout) -> None:
        self._spots = {group.name: list(_spots(layout, group)) for group in layout.groups}

    def write(
        self, memories: Memories, lists: Lists, request: int, start: int = 0, end: int | None = None
    ) -> None:
        """Write the items whose last token is in [start, end), or all from `start` on.

        So an item of several tokens is written once, when it is complete.
        """
        for one in self._listed(lists):
            chosen = (one.end > start) & (one.end <= (np.inf if end is None else end))
            memories[one.spots.region][one.at[chosen]] = one.content(request)[chosen]

    def check(self, memories: Memories, lists: Lists, request: int, num_tokens: int) -> Wrong:
        """Compare what a pull into these blocks must have delivered.

        That is the tokens from each list's first to `num_tokens`, of a sliding window the last ones, and the
        states. The rest of the blocks may be anything.
        """
        count, first = 0, ""
        for one in self._listed(lists):
            window = one.spots.group.sliding_window
            begin = 0 if window is None else num_tokens - window
            required = (one.end > begin) & (one.token < num_tokens)
            wrong = required & (memories[one.spots.region][one.at] != one.content(request))
            if num_wrong := int(np.count_nonzero(wrong)):
                count += num_wrong
                first = first or one.describe(*np.argwhere(wrong)[0].tolist())
        return Wrong(count, first)

    def block_bytes(self, memories: Memories, group: str, block: int) -> bytes:
        """Return all bytes that a block has."""
        return b"".join(memories[spots.region][spots.at[block]].tobytes() for spots in self._spots[group])

    def overwrite(self, memories: Memories, group: str, blocks: Sequence[int], value: int) -> None:
        """Set all bytes of some blocks."""
        for spots in self._spots[group]:
            memories[spots.region][spots.at[list(blocks)]] = value

    def bytes_of(self, lists: Lists) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Return the name of each byte of the listed blocks, and its place; regions are apart."""
        regions = sorted({spots.region for of_group in self._spots.values() for spots in of_group})
        names, places = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for one in self._listed(lists):
            names.append(one.names(0).ravel())
            places.append((one.at + (regions.index(one.spots.region) << 32)).ravel())
        return np.concatenate(names), np.concatenate(places)

    def _listed(self, lists: Lists) -> Iterator[_Listed]:
        for name, of_group in self._spots.items():
            listed = lists.get(name)
            if listed is None or not len(listed.ids):
                continue
            for spots in of_group:
                is_state = spots.group.kind is GroupKind.STATE
                ids = list(listed.ids)[-1:] if is_state else list(listed.ids)
                first = listed.state_at if is_state else listed.first_token
                begins = first + span_of(spots.group) * np.arange(len(ids))[:, None]
                yield _Listed(spots, ids, spots.at[ids], begins + spots.token, begins + spots.end)


def _spots(layout: RankLayout, group: Group) -> Iterator[_Spots]:
    """Yield what a group's blocks hold in each region."""
    for region in sorted({tensor.region for tensor in layout.tensors if tensor.group == group.name}):
        parts = [_columns(t, group) for t in layout.tensors if (t.group, t.region) == (group.name, region)]
        yield _Spots(
            group, region, *(np.concatenate(columns, axis=-1) for columns in zip(*parts, strict=True))
        )


def _columns(tensor: CacheTensor, group: Group) -> tuple[npt.NDArray[Any], ...]:
    """Return a tensor's part of `_Spots`, from `at` on."""
    held = np.array(list(items(group, tensor, _BLOCK_0)))
    units = np.array([unit for r in tensor.units for unit in range(r.start, r.stop)])
    places = np.arange(tensor.content_bytes)
    blocks = np.arange(group.num_blocks) * group.physical_blocks_per_logical * tensor.block_stride
    starts = tensor.offset + held[:, 1] * tensor.block_stride + held[:, 2] * tensor.token_stride
    in_item = places // tensor.chunk_bytes * tensor.chunk_stride + places % tensor.chunk_bytes
    in_block = np.add.outer(np.add.outer(starts, np.arange(len(units)) * tensor.unit_stride), in_item)
    token = np.repeat(held[:, 0], len(units) * len(places))
    what = f"layer {tensor.layer}, {tensor.component}"
    seed = (zlib.crc32(what.encode()) << 24) + np.add.outer(units << 16, places).ravel()
    owner = [f"{what}, unit {unit}, byte {place}" for unit in units for place in places]
    return (
        blocks[:, None] + in_block.ravel(),
        token,
        token + tensor.granule_tokens,
        np.tile(seed.astype(np.uint64) * _FACTOR, len(held)),
        np.tile(owner, len(held)),
    )


def least_reads(
    sink: Contents, sources: Iterable[Contents], mine: Lists, theirs: Lists
) -> tuple[int, int, int]:
    """Return what one rank reads of a request: every item for which both sides have listed a block.

    That is how many bytes, how many ranges at least that are contiguous on both sides, and of how many ranks.
    `mine` are its lists, `theirs` those that the source has published. `sources` are all its ranks: of those
    that hold a byte the first one is read.
    """
    wanted, local = sink.bytes_of(mine)
    held, places = zip(*(source.bytes_of(theirs) for source in sources), strict=True)
    remote = np.concatenate([one + (number << 48) for number, one in enumerate(places)])
    names, first = np.unique(np.concatenate(held), return_index=True)
    order = np.argsort(local)
    order = order[np.isin(wanted[order], names)]
    local, at = local[order], remote[first[np.searchsorted(names, wanted[order])]]
    num_breaks = np.count_nonzero((np.diff(local) != 1) | (np.diff(at) != 1))
    return len(order), int(num_breaks) + min(1, len(order)), len(np.unique(at >> 48))
