"""The content of the demo's cache, and the check that it arrived, computed without the planner.

Each byte is a hash of its global coordinate (request, layer, component, head, token, byte), and
its address is computed here from the layout's strides, one tensor at a time. Nothing of
`kvxferd.plan` is used, so that an error there cannot hide itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.layout import CacheTensor, RankLayout

U64 = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

_COMPONENTS = {"k": 1, "v": 2}
_GOLDEN = 0x9E3779B97F4A7C15


class RequestBlocks(NamedTuple):
    """The blocks of one request in one rank's memory."""

    request: int
    block_ids: npt.NDArray[np.int32]
    num_tokens: int


class ContentCheck(NamedTuple):
    """The result of a check."""

    checked_items: int  # one item: one layer, component, head and token
    wrong_items: int
    first_wrong: str  # its coordinate; "" if there is none


def write(memory: Bytes, layout: RankLayout, held: RequestBlocks, first_token: int = 0) -> None:
    """Fill the request's blocks with their content, from a token on."""
    for tensor, where, want in _items(layout, held):
        memory[_addresses(tensor, where[:, first_token:])] = want[:, first_token:]


def check(memory: Bytes, layout: RankLayout, held: RequestBlocks) -> ContentCheck:
    """Compare every byte that the rank holds of the request."""
    checked = wrong = 0
    first = ""
    for tensor, where, want in _items(layout, held):
        bad = (memory[_addresses(tensor, where)] != want).any(axis=2)
        checked += bad.size
        wrong += int(bad.sum())
        if bad.any() and not first:
            index, token = (int(i) for i in np.argwhere(bad)[0])
            first = f"layer {tensor.layer}, {tensor.component}, head {_heads(tensor)[index]}, token {token}"
    return ContentCheck(checked, wrong, first)


def block_mask(layout: RankLayout, block_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return for each byte of the region whether it belongs to one of the blocks."""
    mask = np.zeros(region_bytes(layout), dtype=np.bool_)
    block_tokens = layout.groups[0].block_tokens
    for tensor in layout.tensors:
        where = _starts(tensor, block_ids, block_tokens, block_tokens * len(block_ids))
        mask[_addresses(tensor, where)] = True
    return mask


def background(size: int) -> Bytes:
    """Return the content of a decode rank's memory before the first pull, which is not all zeros."""
    words = _splitmix64(np.arange(-(-size // 8), dtype=np.uint64))
    return words.view(np.uint8)[:size].copy()


def region_bytes(layout: RankLayout) -> int:
    """Return the size of the layout's one region."""
    (region,) = layout.regions
    return region.size_bytes


def _items(layout: RankLayout, held: RequestBlocks) -> Iterator[tuple[CacheTensor, U64, Bytes]]:
    """Yield each tensor with the offsets of its items [head, token] and their content [head, token, byte]."""
    block_tokens = layout.groups[0].block_tokens
    for tensor in layout.tensors:
        yield (
            tensor,
            _starts(tensor, held.block_ids, block_tokens, held.num_tokens),
            _content(tensor, held.request, held.num_tokens),
        )


def _starts(tensor: CacheTensor, block_ids: npt.NDArray[np.int32], block_tokens: int, num_tokens: int) -> U64:
    tokens = np.arange(num_tokens, dtype=np.int64)
    blocks = block_ids.astype(np.int64)[tokens // block_tokens]
    along = blocks * tensor.block_stride + tokens % block_tokens * tensor.token_stride
    units = np.arange(tensor.num_units, dtype=np.int64) * tensor.unit_stride
    starts: U64 = np.add.outer(units + tensor.offset, along).astype(np.uint64)
    return starts


def _addresses(tensor: CacheTensor, starts: U64) -> U64:
    along: U64 = np.arange(tensor.content_bytes, dtype=np.uint64)
    return starts[:, :, None] + along


def _content(tensor: CacheTensor, request: int, num_tokens: int) -> Bytes:
    """Return the bytes of [head, token]: a hash of the coordinate and of the byte's index."""
    seed = np.uint64((request << 32 | tensor.layer << 8 | _COMPONENTS[tensor.component]) & (2**64 - 1))
    heads = np.array(_heads(tensor), dtype=np.uint64)
    tokens = np.arange(num_tokens, dtype=np.uint64)
    items = _splitmix64(_splitmix64(_splitmix64(seed) + heads)[:, None] + tokens[None, :])
    words = np.arange(-(-tensor.content_bytes // 8), dtype=np.uint64)
    return _splitmix64(items[:, :, None] + words).view(np.uint8)[:, :, : tensor.content_bytes]


def _heads(tensor: CacheTensor) -> list[int]:
    return [head for units in tensor.units for head in range(units.start, units.stop)]


def _splitmix64(values: U64 | np.uint64) -> U64:
    """Return the finaliser of splitmix64: one changed bit changes half of the result's bits."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(values, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(_GOLDEN)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
