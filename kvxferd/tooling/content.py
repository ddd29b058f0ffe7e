"""The content of a KV cache by coordinate: written, and checked, without the planner.

Each item (layer, component, unit, token) of a request has bytes that are a hash of these five. They are
reached through strided views of the memory, made here from the layout's numbers alone. Nothing of
`kvxferd.plan` is used, so that an error there cannot hide itself. A granule's item has the granule's first
token, a state the token at which it stands.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from kvxferd.layout import CacheTensor, Group, GroupKind, RankLayout

Bytes = npt.NDArray[np.uint8]
BlockIds = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 8
# A request may have gigabytes: a piece and its temporary arrays stay small.
_PIECE_BYTES = 8 << 20


class RequestBlocks(NamedTuple):
    """The blocks of one request in one rank's memory: int32 ids by group, in token order."""

    request: int  # two requests have different bytes
    ids: Mapping[str, BlockIds]
    num_tokens: int
    first_token: int = 0  # at which the first block of each attention group begins


class ContentCheck(NamedTuple):
    """The result of a check."""

    checked_items: int  # one item: one layer, component, unit and token
    wrong_items: int
    first_wrong: str  # its coordinate; "" if there is none


def write(memory: Bytes, layout: RankLayout, held: RequestBlocks, start: int = 0, ends_of: int = 0) -> None:
    """Write the request's tokens from `start` on. `memory`: the layout's one region.

    `ends_of`: write only the first and the last token of every so many, which are whole blocks; and states,
    which are not divided by tokens.
    """
    for piece in _pieces(memory, layout, held, start, ends_of):
        piece.view[piece.ids] = piece.content(held.request)


def check(
    memory: Bytes, layout: RankLayout, held: RequestBlocks, start: int = 0, ends_of: int = 0
) -> ContentCheck:
    """Compare every byte that the rank holds of what `write` writes with the same arguments."""
    checked = wrong = 0
    first = ""
    for piece in _pieces(memory, layout, held, start, ends_of):
        found, right = _in_words(piece.view[piece.ids]), _in_words(piece.content(held.request))
        bad = (found != right).any(axis=(3, 4))
        checked += bad.size
        wrong += int(np.count_nonzero(bad))
        if not first and bad.any():
            first = piece.describe(*(int(index) for index in np.argwhere(bad)[0]))
    return ContentCheck(checked, wrong, first)


def count_changed_outside(
    before: Bytes, memory: Bytes, layout: RankLayout, ids: Mapping[str, BlockIds]
) -> int:
    """Return how many bytes outside these blocks differ. `before` gets the blocks' bytes of `memory`."""
    for tensor, group in _tensors(layout):
        chosen = _physical_ids(group, ids[group.name])
        _view(before, tensor, group)[chosen] = _view(memory, tensor, group)[chosen]
    return int(np.count_nonzero(before != memory))


def block_views(memory: Bytes, layout: RankLayout) -> Iterator[Bytes]:
    """Yield for each tensor its bytes as [block, unit, item, chunk, byte], a view that can be written."""
    for tensor, group in _tensors(layout):
        yield _view(memory, tensor, group)


def background(size: int) -> Bytes:
    """Return the content of memory to which nothing was written, which is not all zeros."""
    words = _mix(np.arange(-(-size // _WORD), dtype=np.uint64))
    return words.view(np.uint8)[:size].copy()


def region_bytes(layout: RankLayout) -> int:
    """Return the size of the layout's one region."""
    (region,) = layout.regions
    return region.size_bytes


class _TensorItems(NamedTuple):
    """Some items of one tensor: `view`[`ids`] is [block, unit, item, chunk, byte]."""

    tensor: CacheTensor
    view: Bytes
    ids: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]  # [block, item]: the token of each

    def content(self, request: int) -> Bytes:
        """Return the right bytes: a hash of the coordinate, and of the byte's place in the item."""
        tensor = self.tensor
        component = zlib.crc32(tensor.component.encode())
        seed = _mix(np.uint64((request << 48 ^ tensor.layer << 32 ^ component) & _MASK))
        units = _mix(seed + np.array(_units(tensor), dtype=np.uint64))
        items = _mix(units[None, :, None] + self.tokens.astype(np.uint64)[:, None, :])
        words = _mix(np.arange(-(-tensor.content_bytes // _WORD), dtype=np.uint64))
        content = (items[..., None] ^ words).view(np.uint8)[..., : tensor.content_bytes]
        return content.reshape(*items.shape, tensor.num_chunks, tensor.chunk_bytes)

    def describe(self, block: int, unit: int, item: int) -> str:
        tensor, token = self.tensor, int(self.tokens[block, item])
        return f"layer {tensor.layer}, {tensor.component}, unit {_units(tensor)[unit]}, token {token}"


def _pieces(
    memory: Bytes, layout: RankLayout, held: RequestBlocks, start: int, ends_of: int
) -> Iterator[_TensorItems]:
    for tensor, group in _tensors(layout):
        view, ids = _view(memory, tensor, group), _physical_ids(group, held.ids[group.name])
        if group.kind is GroupKind.STATE:
            yield _TensorItems(tensor, view, ids[-1:], np.array([[held.num_tokens]]))
            continue
        granule, per_block = tensor.granule_tokens, view.shape[2]
        if ends_of:
            step = ends_of // (granule * per_block)
            tokens = np.arange(held.first_token, held.num_tokens, ends_of)[:, None]
            lasts = ids[step - 1 :: step]  # fewer where the request ends before its last stretch
            yield _TensorItems(tensor, view[:, :, :1], ids[::step], tokens)
            yield _TensorItems(tensor, view[:, :, -1:], lasts, tokens[: len(lasts)] + ends_of - granule)
            continue
        first = max(0, start - held.first_token) // granule
        stop = -(-(held.num_tokens - held.first_token) // granule)
        most = max(1, _PIECE_BYTES // (per_block * tensor.num_units * tensor.content_bytes))
        for blocks, items in _segments(first, stop, per_block, most):
            places = np.add.outer(np.arange(blocks.start, blocks.stop) * per_block, np.arange(per_block))
            tokens = held.first_token + places[:, items] * granule
            yield _TensorItems(tensor, view[:, :, items], ids[blocks], tokens)


def _segments(first: int, stop: int, per_block: int, most_blocks: int) -> Iterator[tuple[slice, slice]]:
    """Yield items [first, stop) as ranges of blocks, each with one range of items in all of them."""
    while first < stop:
        block, item = divmod(first, per_block)
        whole = (stop - first) // per_block
        if item or not whole:
            end = min(per_block, item + stop - first)
            yield slice(block, block + 1), slice(item, end)
            first += end - item
        else:
            count = min(whole, most_blocks)
            yield slice(block, block + count), slice(0, per_block)
            first += count * per_block


def _tensors(layout: RankLayout) -> Iterator[tuple[CacheTensor, Group]]:
    groups = {group.name: group for group in layout.groups}
    for tensor in layout.tensors:
        yield tensor, groups[tensor.group]


def _view(memory: Bytes, tensor: CacheTensor, group: Group) -> Bytes:
    """Return a tensor's bytes as [block, unit, item, chunk, byte]. Raises ValueError if they do not fit."""
    per_block = 1
    if group.kind is not GroupKind.STATE:
        if group.token_shard.count > 1:
            raise ValueError(
                f"cannot place the tokens of group {group.name}: a rank holds some of each block"
            )
        per_block = group.block_tokens // group.physical_blocks_per_logical // tensor.granule_tokens
    shape = (
        group.num_blocks * group.physical_blocks_per_logical,
        *(tensor.num_units, per_block, tensor.num_chunks, tensor.chunk_bytes),
    )
    strides = (tensor.block_stride, tensor.unit_stride, tensor.token_stride, tensor.chunk_stride, 1)
    end = tensor.offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    if end > memory.size:
        raise ValueError(f"cannot reach layer {tensor.layer}, {tensor.component}: it ends at byte {end}")
    return as_strided(memory[tensor.offset :], shape, strides)


def _in_words(content: Bytes) -> Bytes | U64:
    """Return the same bytes as whole words where they are: fewer to compare."""
    return content if content.shape[-1] % _WORD else np.ascontiguousarray(content).view(np.uint64)


def _physical_ids(group: Group, ids: BlockIds) -> npt.NDArray[np.int64]:
    count = group.physical_blocks_per_logical
    return np.add.outer(ids.astype(np.int64) * count, np.arange(count)).ravel()


def _units(tensor: CacheTensor) -> list[int]:
    return [unit for held in tensor.units for unit in range(held.start, held.stop)]


def _mix(values: U64 | np.uint64) -> U64:
    """Return the finaliser of splitmix64: one changed bit changes half of the result's bits."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(values, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(_GOLDEN)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
