"""How vLLM's CPU attention packs a block. It depends on the instruction set, and the tensor's shape hides it.

A head's page in a block is two halves, keys and then values, each of block_tokens x head_size
elements (csrc/cpu/cpu_attn_*.hpp of vLLM 0.32, `reshape_and_cache`):

| isa | keys | values |
|---|---|---|
| vec, vec16 | [head_size][token] | [token][head_size] |
| amx | [16 tokens][head_size / 2][token][2 elements] | [head_size / 16][token pair][16 elements][2 tokens] |

Both hold for fp8 as for wider elements. The first is plain content in an unusual order, and can be read
from any other cache. In the second, neighbouring tokens' values are interleaved, so pairs of tokens, and
groups of sixteen, move together. The packings of other instruction sets are not supported: a half
moves as a whole, and only to the same instruction set and block size.
"""

from __future__ import annotations

from typing import NamedTuple

_COLUMN_MAJOR = ("vec", "vec16")
_AMX_GROUP_TOKENS = 16  # rows of an AMX tile
_AMX_TILE_ELEMENTS = 16
_AMX_PAIR = 2


class ContentPacking(NamedTuple):
    """The strides and chunks of one head's content in a kernel block."""

    granule_tokens: int
    item_stride: int  # bytes from one granule to the next
    chunk_bytes: int
    num_chunks: int
    chunk_stride: int
    encoding: str


def key_packing(isa: str, block_tokens: int, head_size: int, itemsize: int) -> ContentPacking:
    """Return the packing of one head's keys. Raises ValueError for a size that the packing cannot have."""
    if isa in _COLUMN_MAJOR:
        return ContentPacking(1, itemsize, itemsize, head_size, block_tokens * itemsize, "")
    if isa == "amx":
        _require_multiple(block_tokens, _AMX_GROUP_TOKENS, "block of", "tokens")
        group = _AMX_GROUP_TOKENS * head_size * itemsize
        return ContentPacking(_AMX_GROUP_TOKENS, group, group, 1, 0, "cpu-attn.amx")
    return _opaque_packing(isa, block_tokens, head_size, itemsize)


def value_packing(isa: str, block_tokens: int, head_size: int, itemsize: int) -> ContentPacking:
    """Return the packing of one head's values. Raises ValueError for a size that the packing cannot have."""
    if isa in _COLUMN_MAJOR:
        return ContentPacking(1, head_size * itemsize, head_size * itemsize, 1, 0, "")
    if isa == "amx":
        _require_multiple(block_tokens, _AMX_PAIR, "block of", "tokens")
        _require_multiple(head_size, _AMX_TILE_ELEMENTS, "head of", "elements")
        pair = _AMX_PAIR * _AMX_TILE_ELEMENTS * itemsize
        tiles = head_size // _AMX_TILE_ELEMENTS
        stride = block_tokens // _AMX_PAIR * pair
        return ContentPacking(_AMX_PAIR, pair, pair, tiles, stride, "cpu-attn.amx")
    return _opaque_packing(isa, block_tokens, head_size, itemsize)


def _opaque_packing(isa: str, block_tokens: int, head_size: int, itemsize: int) -> ContentPacking:
    half = block_tokens * head_size * itemsize
    return ContentPacking(block_tokens, half, half, 1, 0, f"cpu-attn.{isa}")


def _require_multiple(value: int, unit: int, before: str, after: str) -> None:
    if value % unit:
        raise ValueError(f"a {before} {value} {after} is no whole number of {unit}")
