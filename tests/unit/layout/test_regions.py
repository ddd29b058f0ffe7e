"""Layout properties and transfer regions: golden rows 10 and 11."""

from __future__ import annotations

import pytest

from kvxferd.ids import Rank
from kvxferd.layout import GroupKind
from kvxferd.layout.presets import LayerKind, deploy, find_model
from kvxferd.plan import (
    CacheProperties,
    TransferRegion,
    cache_properties,
    cache_properties_of_shapes,
    expand_region,
    get_transfer_cache_regions,
)
from tests.support.attention_engines import KV, layout_of, spec


def properties(blocks_first: bool = False, cross: bool = False, split: bool = False) -> CacheProperties:
    """Return the three of them."""
    return CacheProperties(blocks_first, cross, split)


@pytest.mark.parametrize(
    ("test_shape", "tensor_shape", "kinds", "want"),
    [
        ((1, 2, 16, 1, 1), None, {}, properties(blocks_first=True)),
        ((2, 1, 16, 1, 1), None, {}, properties(split=True)),
        ((1, 16, 1), None, {"is_mla": True}, properties()),
        ((2, 1, 16, 1, 1), (80, 2, 9, 16, 8, 64), {}, properties(cross=True)),
        ((1, 2, 16, 1, 1), (9, 80, 2, 16, 8, 64), {}, properties(blocks_first=True, cross=True)),
        ((2, 1, 16, 1, 1), (80, 2, 9, 16, 8, 64), {"is_hybrid": True}, properties(True, True)),
        ((), (9, 80, 2, 16, 8, 64), {"is_hybrid": True}, properties(blocks_first=True)),  # never raises
    ],
)
def test_properties_of_shapes(
    test_shape: tuple[int, ...],
    tensor_shape: tuple[int, ...] | None,
    kinds: dict[str, bool],
    want: CacheProperties,
) -> None:
    """GOLDEN row 10."""
    assert cache_properties_of_shapes(test_shape, tensor_shape, **kinds) == want


@pytest.mark.parametrize(
    ("layout", "want"),
    [
        ("HND", properties(split=True)),
        ("NHD", properties(split=True)),
        ("HND-blocks-first", properties(blocks_first=True)),
        ("NHD-packed", properties(blocks_first=True)),
        ("HND-cross-layer", properties(blocks_first=True, cross=True)),
    ],
)
def test_properties_of_strides(layout: str, want: CacheProperties) -> None:
    """The same, read off a layout."""
    own = spec()
    assert cache_properties(layout_of(own, layout=layout)) == want


def test_expanding_a_region() -> None:
    """GOLDEN row 11: base 4096, block 4096."""
    assert expand_region(4096, 4096, is_blocks_first=True) == [(4096, 4096, 2048), (6144, 4096, 2048)]
    assert expand_region(4096, 4096, is_blocks_first=False) == [(4096, 4096, 4096)]


@pytest.mark.parametrize(
    ("layout", "want"),
    [
        # 1 layer, 4 heads of 4 bytes, blocks of 4 tokens: 64 bytes of K in a block, 16 blocks
        ("HND", [TransferRegion(4096, 64, 64), TransferRegion(4096 + 1024, 64, 64)]),
        ("HND-blocks-first", [TransferRegion(4096, 128, 64), TransferRegion(4096 + 64, 128, 64)]),
    ],
)
def test_regions_of_a_cache(layout: str, want: list[TransferRegion]) -> None:
    """GOLDEN row 11, from strides."""
    own = spec(layers=1)
    assert get_transfer_cache_regions(layout_of(own, layout=layout), {KV: 4096}) == want


@pytest.mark.parametrize(
    ("model", "tp", "want"),
    [
        ("nemotron-h-8b", 4, 104),  # 4 attention layers of K and V, 24 states of x, B, C and ssm
        ("qwen3-next", 2, 168),  # 12 of K and V, 36 of Q, K, V and ssm
        ("falcon-mamba-7b", 2, 128),  # 64 of x and ssm
        ("llama-3-8b", 2, 64),
        ("deepseek-v3.2", 2, 183),  # a latent, an indexer's key and its scale
    ],
)
@pytest.mark.parametrize("is_row_major", [False, True])
def test_regions_have_states_too(model: str, tp: int, want: int, is_row_major: bool) -> None:
    """A region for each tensor of every layer; together they have all bytes of a request's state."""
    arrangement = "HND+SD" if is_row_major else "HND"
    layout = deploy(model, tp=tp, num_blocks=2, layout=arrangement)[Rank(0, 0)][1]
    regions = get_transfer_cache_regions(layout, {KV: 4096})
    assert len(regions) == want
    kinds = {group.name: group.kind for group in layout.groups}
    ordered = sorted(layout.tensors, key=lambda t: (t.layer, t.offset))
    facts = find_model(model)
    per_state = sum(state.num_units * state.unit_bytes for state in facts.states) // tp
    found = [
        region.kv_block_len
        for region, tensor in zip(regions, ordered, strict=True)
        if kinds[tensor.group] is GroupKind.STATE
    ]
    assert sum(found) == per_state * facts.kinds.count(LayerKind.STATE)
    assert [region.base_addr for region in regions] == [4096 + tensor.offset for tensor in ordered]
