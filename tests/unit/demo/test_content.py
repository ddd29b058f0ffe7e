"""The demo's own check of content: it must find what is wrong, so it is checked against plain loops."""

import numpy as np
import pytest

from kvxferd.demo import content
from kvxferd.demo.shape import DemoShape, EngineShape, Role
from kvxferd.ids import Rank
from kvxferd.layout import RankLayout

SHAPE = DemoShape(
    prefill=EngineShape(tp=2, pp=2, block_tokens=4, layout="HND"),
    decode=EngineShape(tp=1, pp=1, block_tokens=8, layout="NHD"),
    heads=4,
    head_dim=3,  # six bytes: no whole word of the hash
    layers=3,
    requests=2,
    tokens=13,
)


def held_memory(
    role: Role, rank: Rank, request: int = 0
) -> tuple[RankLayout, content.RequestBlocks, content.Bytes]:
    """A rank's memory with one request written into a background."""
    layout = SHAPE.rank_layout(role, rank)
    held = content.RequestBlocks(request, SHAPE.block_ids(role, request), SHAPE.tokens)
    memory = content.background(content.region_bytes(layout))
    content.write(memory, layout, held)
    return layout, held, memory


def by_coordinate(
    layout: RankLayout, held: content.RequestBlocks, memory: content.Bytes
) -> dict[tuple[int, str, int, int], bytes]:
    """Every item of a request, found by the layout's formula, one at a time."""
    block_tokens = layout.groups[0].block_tokens
    items = {}
    for tensor in layout.tensors:
        heads = [head for units in tensor.units for head in range(units.start, units.stop)]
        for index, head in enumerate(heads):
            for token in range(held.num_tokens):
                block = int(held.block_ids[token // block_tokens])
                start = (
                    tensor.offset
                    + block * tensor.block_stride
                    + token % block_tokens * tensor.token_stride
                    + index * tensor.unit_stride
                )
                items[tensor.layer, tensor.component, head, token] = memory[
                    start : start + tensor.content_bytes
                ].tobytes()
    return items


def test_an_item_is_the_same_wherever_it_lies() -> None:
    whole = by_coordinate(*held_memory("decode", Rank(0, 0)))
    parts = {}
    for rank in SHAPE.ranks("prefill"):
        parts.update(by_coordinate(*held_memory("prefill", rank)))
    assert parts == whole
    assert len(whole) == SHAPE.layers * 2 * SHAPE.heads * SHAPE.tokens


def test_no_two_items_are_alike() -> None:
    items = list(by_coordinate(*held_memory("decode", Rank(0, 0))).values())
    items += by_coordinate(*held_memory("decode", Rank(0, 0), request=1)).values()
    assert len(set(items)) == len(items)


def test_what_was_written_is_right() -> None:
    layout, held, memory = held_memory("decode", Rank(0, 0))
    found = content.check(memory, layout, held)
    assert found == content.ContentCheck(SHAPE.layers * 2 * SHAPE.heads * SHAPE.tokens, 0, "")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_wrong_byte_is_one_wrong_item_wherever_it_is(role: Role) -> None:
    layout, held, memory = held_memory(role, Rank(0, 0))
    mask = content.block_mask(layout, held.block_ids)
    required = np.zeros(memory.size, dtype=np.bool_)
    zeros = np.zeros_like(memory)
    content.write(zeros, layout, held)
    required[zeros != 0] = True
    assert not (required & ~mask).any()
    for place in np.flatnonzero(required)[::97]:
        memory[place] ^= 1
        assert content.check(memory, layout, held).wrong_items == 1
        memory[place] ^= 1


def test_the_wrong_item_is_named() -> None:
    layout, held, memory = held_memory("decode", Rank(0, 0))
    tensor = next(t for t in layout.tensors if (t.layer, t.component) == (1, "v"))
    block_tokens = layout.groups[0].block_tokens
    block = int(held.block_ids[9 // block_tokens])
    memory[
        tensor.offset
        + block * tensor.block_stride
        + 9 % block_tokens * tensor.token_stride
        + 2 * tensor.unit_stride
    ] ^= 1
    assert content.check(memory, layout, held).first_wrong == "layer 1, v, head 2, token 9"


def test_another_requests_bytes_are_wrong() -> None:
    layout, held, memory = held_memory("decode", Rank(0, 0))
    found = content.check(memory, layout, held._replace(request=1))
    assert found.wrong_items == found.checked_items


def test_the_mask_is_the_pulled_blocks_and_nothing_else() -> None:
    layout = SHAPE.rank_layout("decode", Rank(0, 0))
    ids = SHAPE.block_ids("decode", 0)
    others = np.setdiff1d(np.arange(SHAPE.pool_blocks("decode"), dtype=np.int32), ids)
    mine, theirs = content.block_mask(layout, ids), content.block_mask(layout, others)
    assert not (mine & theirs).any()
    assert (mine | theirs).all()


def test_blocks_are_scattered_and_the_same_for_every_rank() -> None:
    shape = DemoShape(
        prefill=SHAPE.prefill, decode=SHAPE.decode, heads=4, head_dim=3, layers=3, requests=2, tokens=400
    )
    ids = shape.block_ids("prefill", 0)
    assert len(set(ids.tolist())) == len(ids) == 100
    assert np.count_nonzero(np.diff(ids) == 1) < 5
    assert (ids == shape.block_ids("prefill", 0)).all()
    assert (ids != shape.block_ids("prefill", 1)).any()
