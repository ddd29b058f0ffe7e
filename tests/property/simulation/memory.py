"""Memory as bytes: what ranks hold, fence pages, and content that tells where it belongs."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from functools import lru_cache

from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import attention_layout
from kvxferd.wire.limits import FENCE_WORD_BYTES

NUM_SLOTS = 16  # of a fence page
BLOCK_TOKENS = 4
NUM_BLOCKS = 12
NUM_HEADS = 2
UNIT_BYTES = 4  # of one head of one token: the transfer's number and the coordinate, two bytes each
POISON = 0xDD

Place = tuple[int, int, bytes]  # offset in a block's tensor, unused bytes stride; see `_templates`


class Buffer:
    """Memory that processes share. `owners`: by block, who may write it now; None where nobody checks."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self.name = name
        self.bytes = bytearray(size_bytes)
        # Where it really is: a scatter writes there without asking the transport.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.is_freed = False  # its engine has given it back


class FencePage:
    """A fence page, whoever has made it."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.buffer = Buffer(name, NUM_SLOTS * FENCE_WORD_BYTES)
        self.live_slots: set[int] = set()  # whose words prove reads
        self._rng = rng

    def write(self, slot: int, word: bytes) -> None:
        """Put `word` in `slot`."""
        start = slot * FENCE_WORD_BYTES
        self.buffer.bytes[start : start + FENCE_WORD_BYTES] = word
        self.live_slots.add(slot)

    def read(self, slot: int) -> bytes:
        """Return the word in `slot`."""
        start = slot * FENCE_WORD_BYTES
        return bytes(self.buffer.bytes[start : start + FENCE_WORD_BYTES])

    def overwrite(self, slot: int) -> None:
        """Make the word in `slot` another one."""
        self.write(slot, self._rng.randbytes(FENCE_WORD_BYTES))
        self.live_slots.discard(slot)

    def close(self) -> None:
        """Nothing is mapped."""


@lru_cache(maxsize=256)
def layout_of(spec: EngineSpec, order: str) -> RankLayout:
    """Return the layout of a rank with tiny blocks."""
    return attention_layout(
        spec=spec,
        num_kv_heads=NUM_HEADS,
        head_dim=UNIT_BYTES // 2,
        block_tokens=BLOCK_TOKENS,
        num_blocks=NUM_BLOCKS,
        layout=order,
    )


class RankContent:
    """Where each coordinate of a request lies in a rank's memory."""

    def __init__(self, layout: RankLayout) -> None:
        self.size_bytes = layout.regions[0].size_bytes
        self._tensors = [
            (
                tensor.offset,
                tensor.block_stride,
                tensor.token_stride,
                tensor.unit_stride,
                [
                    ((tensor.layer * 2 + (tensor.component == "v")) * NUM_HEADS + unit) << 8
                    for r in tensor.units
                    for unit in range(r.start, r.stop)
                ],
            )
            for tensor in layout.tensors
        ]
        self.block_of = [-1] * (self.size_bytes // UNIT_BYTES)
        self._spots: list[list[tuple[int, int]]] = []  # by block: offset and coordinate but for the token
        for block in range(NUM_BLOCKS):
            spots = list(self._spots_of(block))
            self._spots.append(spots)
            for offset, _, _ in spots:
                self.block_of[offset // UNIT_BYTES] = block

    def _spots_of(self, block: int) -> Iterator[tuple[int, int, int]]:
        """Yield the offset, the coordinate and the token in the block of each unit."""
        for offset, block_stride, token_stride, unit_stride, coordinates in self._tensors:
            for token in range(BLOCK_TOKENS):
                for index, coordinate in enumerate(coordinates):
                    at = offset + block * block_stride + token * token_stride + index * unit_stride
                    yield at, coordinate, token

    def fill(self, memory: bytearray, ids: list[int], num_tokens: int, number: int) -> None:
        """Write the content of transfer `number`: a function of it and of global coordinates alone."""
        high = number.to_bytes(2, "little")
        for index, block in enumerate(ids):
            first = index * BLOCK_TOKENS
            for offset, coordinate, token in self._spots[block]:
                if first + token < num_tokens:
                    memory[offset : offset + 4] = high + (coordinate + first + token).to_bytes(2, "little")

    def num_wrong(self, memory: bytearray, ids: list[int], num_tokens: int, number: int) -> int:
        """Return how many bytes do not hold that content."""
        high = number.to_bytes(2, "little")
        wrong = 0
        for index, block in enumerate(ids):
            first = index * BLOCK_TOKENS
            for offset, coordinate, token in self._spots[block]:
                if first + token < num_tokens:
                    wanted = high + (coordinate + first + token).to_bytes(2, "little")
                    found = memory[offset : offset + 4]
                    if found != wanted:
                        wrong += sum(a != b for a, b in zip(found, wanted, strict=True))
        return wrong

    def holds(self, memory: bytearray, block: int, value: int) -> bool:
        """Return whether a block holds what `overwrite` writes."""
        junk = bytes([value]) * UNIT_BYTES
        return all(memory[offset : offset + UNIT_BYTES] == junk for offset, _, _ in self._spots[block])

    def overwrite(self, memory: bytearray, ids: list[int], value: int) -> None:
        """Write something else into blocks, as an engine does that uses them again."""
        junk = bytes([value]) * UNIT_BYTES
        for block in ids:
            for offset, _, _ in self._spots[block]:
                memory[offset : offset + UNIT_BYTES] = junk


@lru_cache(maxsize=256)
def content_of(spec: EngineSpec, order: str) -> RankContent:
    """Return where the content of a rank of that layout lies. Only its place in the engine matters."""
    return RankContent(layout_of(spec, order))
