"""The check of content must find what is wrong, so it is checked against plain loops over the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxferd.layout import GroupKind, RankLayout
from kvxferd.layout.presets import (
    LayerKind,
    ModelFacts,
    StateComponent,
    TokenComponent,
    deploy,
    key_and_value,
)
from kvxferd.tooling import content
from kvxferd.tooling.content import Bytes, RequestBlocks

NUM_TOKENS = 37

PLAIN = ModelFacts("plain", 4, (LayerKind.FULL,) * 2, key_and_value(4, 24))
ODD = ModelFacts("odd", 4, (LayerKind.FULL,) * 2, key_and_value(4, 3))  # six bytes: no whole word of the hash
LATENT = ModelFacts(
    *("latent", 0, (LayerKind.FULL,) * 2),
    token_arrays=(
        (TokenComponent("latent", 1, 40, is_replicated=True),),
        (TokenComponent("scale", 1, 8, is_replicated=True, granule_tokens=4),),
    ),
)
HYBRID = ModelFacts(
    *("hybrid", 2, (LayerKind.STATE, LayerKind.FULL) * 2),
    token_arrays=key_and_value(2, 4),
    states=(
        StateComponent("conv.x", 2, 8, rows=3, is_convolution=True),
        StateComponent("ssm", 2, 96),
    ),
)
# Every axis that a layout may have: chunks, states, granules, kernel blocks, several units, padding.
CASES: dict[str, tuple[ModelFacts, dict[str, Any]]] = {
    "heads first": (PLAIN, {"tp": 2}),
    "tokens first, packed": (PLAIN, {"layout": "NHD-packed"}),
    "cross-layer, padded": (PLAIN, {"layout": "HND-cross-layer", "page_bytes": 1 << 15}),
    "vectorised": (PLAIN, {"layout": "vectorised"}),
    "odd": (ODD, {"layout": "NHD"}),
    "latent": (LATENT, {}),
    "states": (HYBRID, {"layout": "HND+SD", "num_blocks": 8}),
}


def layout_of(case: str) -> RankLayout:
    """The last rank's layout."""
    model, options = CASES[case]
    return list(deploy(model, **({"block_tokens": 16, "num_blocks": 6} | options)).values())[-1][1]


def request_of(layout: RankLayout, request: int = 0) -> RequestBlocks:
    """Blocks that overlap no other group's: in a hybrid all groups' ids are pages of one pool."""
    ids, free = {}, iter([4, 1, 3, 5, 0, 2])
    for group in layout.groups:
        is_state = group.kind is GroupKind.STATE
        count = 1 if is_state else -(-NUM_TOKENS // group.block_tokens)
        ids[group.name] = np.array([next(free) for _ in range(count)], np.int32)
    return RequestBlocks(request, ids, NUM_TOKENS)


def by_coordinate(
    layout: RankLayout, held: RequestBlocks, memory: Bytes
) -> dict[tuple[int, str, int, int], bytes]:
    """Every item of a request, found by the formula of `kvxferd.layout.tensors`, one at a time."""
    groups = {group.name: group for group in layout.groups}
    items = {}
    for tensor in layout.tensors:
        group = groups[tensor.group]
        is_state = group.kind is GroupKind.STATE
        tokens = [held.num_tokens] if is_state else range(0, held.num_tokens, tensor.granule_tokens)
        kernel_tokens = 1 if is_state else group.block_tokens // group.physical_blocks_per_logical
        units = [unit for units in tensor.units for unit in range(units.start, units.stop)]
        for index, unit in enumerate(units):
            for token in tokens:
                kernel, inside = (0, 0) if is_state else divmod(token, kernel_tokens)
                logical, part = divmod(kernel, group.physical_blocks_per_logical)
                number = held.ids[group.name][-1 if is_state else logical]
                block = int(number) * group.physical_blocks_per_logical + part
                start = (
                    tensor.offset
                    + block * tensor.block_stride
                    + inside // tensor.granule_tokens * tensor.token_stride
                    + index * tensor.unit_stride
                )
                items[tensor.layer, tensor.component, unit, token] = b"".join(
                    memory[start + n * tensor.chunk_stride :][: tensor.chunk_bytes].tobytes()
                    for n in range(tensor.num_chunks)
                )
    return items


def written(case: str, request: int = 0) -> tuple[RankLayout, RequestBlocks, Bytes]:
    """A rank's memory with one request written into a background."""
    layout = layout_of(case)
    held = request_of(layout, request)
    memory = content.background(content.region_bytes(layout))
    content.write(memory, layout, held)
    return layout, held, memory


@pytest.mark.parametrize("case", CASES)
def test_one_wrong_byte_is_one_wrong_item_wherever_it_is(case: str) -> None:
    layout, held, memory = written(case)
    zeros = np.zeros_like(memory)
    content.write(zeros, layout, held)
    places = np.flatnonzero(zeros)
    for place in places[:: max(1, places.size // 25)]:
        memory[place] ^= 1
        assert content.check(memory, layout, held).wrong_items == 1
        memory[place] ^= 1


def test_the_wrong_item_is_named() -> None:
    layout, held, memory = written("heads first")
    tensor = next(t for t in layout.tensors if (t.layer, t.component) == (1, "v"))
    block = int(held.ids["full"][1])
    memory[tensor.offset + block * tensor.block_stride + 5 * tensor.token_stride + tensor.unit_stride] ^= 1
    unit = tensor.units[0].start + 1
    assert content.check(memory, layout, held).first_wrong == f"layer 1, v, unit {unit}, token 21"


@pytest.mark.parametrize("start", [0, 1, 15, 16, 31, 36])
def test_a_start_leaves_earlier_tokens_alone(start: int) -> None:
    layout, held, memory = written("heads first")
    items = by_coordinate(layout, held, memory)
    content.write(memory, layout, held._replace(request=1), start)
    other = by_coordinate(layout, held._replace(request=1), memory)
    assert {key for key in items if items[key] != other[key]} == {key for key in items if key[3] >= start}
    assert content.check(memory, layout, held._replace(request=1), start).wrong_items == 0


@pytest.mark.parametrize("case", ["heads first", "vectorised", "latent", "cross-layer, padded", "states"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_ends_are_the_first_and_the_last_token_of_every_so_many(case: str, blocks: int) -> None:
    layout = layout_of(case)
    block_tokens = next(g.block_tokens for g in layout.groups if g.kind is not GroupKind.STATE)
    ends_of, num_tokens = blocks * block_tokens, 2 * block_tokens
    held = request_of(layout)._replace(num_tokens=num_tokens)
    held = held._replace(ids={name: ids[:2] for name, ids in held.ids.items()})
    memory = content.background(content.region_bytes(layout))
    content.write(memory, layout, held)
    before, items = memory.copy(), by_coordinate(layout, held, memory)
    other = held._replace(request=1)
    content.write(memory, layout, other, ends_of=ends_of)
    changed = {key[3] for key, item in by_coordinate(layout, held, memory).items() if item != items[key]}
    granules = {tensor.granule_tokens for tensor in layout.tensors}
    firsts = range(0, num_tokens, ends_of)
    states = {num_tokens} if any(group.kind is GroupKind.STATE for group in layout.groups) else set()
    assert changed == {first + at for first in firsts for g in granules for at in (0, ends_of - g)} | states
    assert content.check(memory, layout, other, ends_of=ends_of).wrong_items == 0
    found = content.check(before, layout, other, ends_of=ends_of)
    assert found.wrong_items == found.checked_items > 0


@pytest.mark.parametrize("case", ["heads first", "cross-layer, padded", "states"])
def test_bytes_outside_the_blocks_are_counted_and_those_inside_are_not(case: str) -> None:
    layout, held, memory = written(case)
    before = memory.copy()
    content.write(memory, layout, held._replace(request=1))
    outside = np.setdiff1d(np.arange(memory.size), _places(layout, held))
    assert content.count_changed_outside(before.copy(), memory, layout, held.ids) == 0
    changed = outside[:: outside.size // 7]
    memory[changed] ^= 1
    assert content.count_changed_outside(before.copy(), memory, layout, held.ids) == len(changed)


def _places(layout: RankLayout, held: RequestBlocks) -> np.ndarray:
    """Every byte of the request's blocks, those of tokens that it does not have included."""
    numbers = np.zeros(content.region_bytes(layout), np.uint8)
    for view, tensor in zip(content.block_views(numbers, layout), layout.tensors, strict=True):
        group = next(group for group in layout.groups if group.name == tensor.group)
        count = group.physical_blocks_per_logical
        for number in held.ids[group.name]:
            view[number * count : (number + 1) * count] = 1
    return np.flatnonzero(numbers)
