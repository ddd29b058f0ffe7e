"""Layouts made from tensors: each element lies where torch's own indexing finds it."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.layout import EngineSpec, NamedTensor, RankLayout, UnitRange, from_tensors, tensor_regions

torch = pytest.importorskip("torch")

LAYERS, COMPONENTS = (3, 5, 2), ("k", "v", "latent")
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
# Shapes of the content: none, one dimension, or two that a vectorised cache keeps apart.
CONTENTS = ((), ("head_dim",), ("head_dim", "head_dim"))


class Cache(NamedTuple):
    """A tensor, and which index along which dimension is which coordinate."""

    tensor: torch.Tensor
    dims: list[str]


@st.composite
def caches(draw: st.DrawFn) -> Cache:
    """Return a tensor of random sizes, whose dimensions are in random order, in memory and in the shape."""
    optional = [name for name in ("layer", "kv", "token", "head") if draw(st.booleans())]
    content = draw(st.sampled_from(CONTENTS))
    names = draw(st.permutations([*optional, "block"]))
    sizes = {name: draw(st.integers(1, 3)) for name in names}
    at = draw(st.integers(0, len(names)))
    labels = [*names[:at], *content, *names[at:]]
    if len(content) == 2 and draw(st.booleans()):  # apart: [hd / x, block, x]
        labels.remove("head_dim")
        labels.append("head_dim")
    shape = [sizes.get(name) or draw(st.integers(1, 4)) for name in labels]
    order = list(range(len(labels)))
    if len(content) < 2:
        order = list(draw(st.permutations(order)))  # how the dimensions nest in memory
    padding = [
        draw(st.integers(0, 2)) if labels[axis] != "head_dim" or len(content) < 2 else 0 for axis in order
    ]
    skipped = [draw(st.integers(0, pad)) for pad in padding]
    whole = torch.zeros(
        [shape[axis] + pad for axis, pad in zip(order, padding, strict=True)],
        dtype=draw(st.sampled_from(DTYPES)),
    )
    for position, axis in enumerate(order):
        whole = whole.narrow(position, skipped[position], shape[axis])
    return Cache(whole.permute([order.index(axis) for axis in range(len(labels))]), labels)


def layout_of(cache: Cache, num_heads: int) -> RankLayout:
    named = NamedTensor(
        tensor=cache.tensor,
        dims=cache.dims,
        layers=LAYERS[: cache.tensor.shape[cache.dims.index("layer")]] if "layer" in cache.dims else 4,
        components=COMPONENTS[: cache.tensor.shape[cache.dims.index("kv")]] if "kv" in cache.dims else "k",
        units=UnitRange(7, 7 + num_heads),
        group="full",
    )
    block_tokens = cache.tensor.shape[cache.dims.index("token")] if "token" in cache.dims else 5
    from kvxferd.layout import Group

    groups = [Group("full", cache.tensor.shape[cache.dims.index("block")], block_tokens)]
    return from_tensors(EngineSpec("e", "g", num_layers=9), {"cache": named}, groups)


@given(caches())
def test_every_element_lies_where_torch_finds_it(cache: Cache) -> None:
    tensor, dims = cache
    num_heads = tensor.shape[dims.index("head")] if "head" in dims else 1
    layout = layout_of(cache, num_heads)
    (region,) = tensor_regions({"cache": tensor})
    storage = tensor.untyped_storage()
    assert region.address == storage.data_ptr()
    assert region.end == storage.data_ptr() + storage.nbytes()
    by_key = {(one.layer, one.component): one for one in layout.tensors}
    seen = set()
    for index in itertools.product(*map(range, tensor.shape)):
        at = dict.fromkeys(("layer", "kv", "block", "token", "head"), 0)
        content = 0
        for name, position, size in zip(dims, index, tensor.shape, strict=True):
            if name == "head_dim":
                content = content * size + position  # row-major, in the order in which they are named
            else:
                at[name] = position
        one = by_key[LAYERS[at["layer"]] if "layer" in dims else 4, COMPONENTS[at["kv"]]]
        chunk, byte = divmod(content * tensor.element_size(), one.chunk_bytes)
        offset = (
            one.offset
            + at["block"] * one.block_stride
            + at["token"] * one.token_stride
            + at["head"] * one.unit_stride
            + chunk * one.chunk_stride
            + byte
        )
        assert region.address + offset == tensor[index].data_ptr()
        seen.add((one.layer, one.component))
        assert one.units == (UnitRange(7, 7 + num_heads),)
    assert seen == by_key.keys()
    num_content = tensor.numel() // (
        len(by_key)
        * num_heads
        * layout.groups[0].num_blocks
        * (layout.groups[0].block_tokens if "token" in dims else 1)
    )
    assert {one.content_bytes for one in layout.tensors} == {num_content * tensor.element_size()}
