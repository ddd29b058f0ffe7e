"""Layout properties and transfer regions: golden rows 10 and 11."""

from __future__ import annotations

import pytest
import torch

from kvxferd.ids import GroupName, Rank
from kvxferd.layout import (
    CacheProperties,
    NamedTensor,
    block_bytes,
    cache_properties,
    from_tensors,
    get_transfer_cache_regions,
)
from kvxferd.layout.presets import deploy
from tests.support.attention_engines import KV, layout_of, spec


def properties(blocks_first: bool = False, cross: bool = False, split: bool = False) -> CacheProperties:
    """Return the three of them."""
    return CacheProperties(blocks_first, cross, split)


@pytest.mark.parametrize(
    ("shape", "dims", "want"),
    [
        ((1, 2, 16, 1, 1), "block kv token head head_dim", properties(blocks_first=True)),
        ((2, 1, 16, 1, 1), "kv block token head head_dim", properties(split=True)),
        ((1, 16, 1), "block token head_dim", properties()),  # MLA
        # A tensor over all layers. Its own strides tell which lies in one page.
        ((1, 2, 2, 16, 1, 1), "block layer kv token head head_dim", properties(True, True)),
        ((1, 2, 16, 1), "block layer token head_dim", properties(cross=True)),  # MLA
    ],
)
def test_properties_of_an_engines_tensors(shape: tuple[int, ...], dims: str, want: CacheProperties) -> None:
    """GOLDEN row 10, of real tensors of those shapes."""
    heads = 1 if "head " in dims else 0
    more = {} if "kv" in dims else {"components": "latent"}
    parts = {"cache": {}} if "layer" in dims else {f"layers.{layer}": {"layers": layer} for layer in (0, 1)}
    named = {
        name: NamedTensor(tensor=torch.zeros(shape), dims=dims, **more, **of) for name, of in parts.items()
    }
    assert cache_properties(from_tensors(spec(heads=heads), named)) == want


def test_properties_of_a_hybrid() -> None:
    """GOLDEN row 10: blocks first, whatever its states are."""
    layout = deploy("nemotron-h-8b", tp=4, num_blocks=2)[Rank(0, 0)][1]
    assert cache_properties(layout) == properties(blocks_first=True)
    assert cache_properties(deploy("falcon-mamba-7b", num_blocks=2)[Rank(0, 0)][1]) == properties()


def test_regions_of_a_page() -> None:
    """GOLDEN row 11: base 4096, block 4096: two halves of a page of K and V; else the page is one region."""
    own = spec(layers=1)  # 4 heads of 2 numbers of 2 bytes
    halves = layout_of(own, layout="HND-blocks-first", block_tokens=128)
    assert get_transfer_cache_regions(halves, {KV: 4096}) == [(4096, 4096, 2048), (6144, 4096, 2048)]
    whole = layout_of(own, block_tokens=256)
    assert get_transfer_cache_regions(whole, {KV: 4096})[0] == (4096, 4096, 4096)


def test_bytes_of_a_block_id() -> None:
    """Of a group: all of its tensors, and all kernel blocks of the id."""
    layout = deploy("nemotron-h-8b", tp=4, num_blocks=2)[Rank(0, 0)][1]
    per_id = next(group.physical_blocks_per_logical for group in layout.groups if group.name == "full")
    assert per_id > 1
    page = next(tensor.block_stride for tensor in layout.tensors if tensor.component == "k")
    regions = get_transfer_cache_regions(layout, {KV: 4096})
    assert len(regions) == 4 * 2 + 24 * 4  # K and V; x, B, C and ssm
    assert sorted(r.base_addr for r in regions) == sorted(4096 + t.offset for t in layout.tensors)
    sizes = block_bytes(layout)
    assert sizes[GroupName("full")] == 4 * page * per_id  # four layers of K and V
    states = sum(size for name, size in sizes.items() if name != "full")
    assert states == 24 * (15360 + 524288)
