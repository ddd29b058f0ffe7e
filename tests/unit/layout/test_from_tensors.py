"""Layouts made from tensors: equal to the presets', sharded like them, and refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kvxferd.errors import Code, LayoutError
from kvxferd.layout import (
    EngineSpec,
    Group,
    GroupKind,
    NamedTensor,
    RankLayout,
    UnitRange,
    from_tensors,
    tensor_regions,
)

DIMS = "layer kv block token head head_dim"


@dataclass
class FakeTensor:
    """Has only what a layout needs of a tensor, strides in elements of 2 bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    address: int = 1 << 20
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        step = 1
        if not self.strides:
            for size in reversed(self.shape):
                self.strides = (step, *self.strides)
                step *= size

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return 2


def spec(num_layers: int = 2, heads: int = 4, tp_size: int = 1, tp_rank: int = 0, **more: int) -> EngineSpec:
    return EngineSpec(
        "e",
        "g",
        num_layers,
        num_kv_heads=heads,
        tp_size=tp_size,
        tp_rank=tp_rank,
        **more,  # type: ignore[arg-type]
    )


def strided(*strides: int) -> FakeTensor:
    return FakeTensor((2, 2, 8, 16, 4, 64), strides)


def layout(tensor: Any, dims: Any = DIMS, of: EngineSpec | None = None, **more: Any) -> RankLayout:
    return from_tensors(
        spec() if of is None else of, {"cache": NamedTensor(tensor=tensor, dims=dims, **more)}
    )


def refusal(*args: Any, **more: Any) -> str:
    with pytest.raises(LayoutError) as refused:
        layout(*args, **more)
    assert refused.value.code is Code.LAYOUT_INVALID
    return refused.value.message


@pytest.mark.parametrize(("heads", "tp_size", "tp_rank", "held"), [
    (4, 2, 1, (2, 4)),  # divided
    (2, 4, 3, (1, 2)),  # fewer heads than ranks: copies
    (5, 2, 0, (0, 3)),  # not even: the first has one more
])  # fmt: skip
def test_heads_are_the_ranks_own(heads: int, tp_size: int, tp_rank: int, held: tuple[int, int]) -> None:
    of = spec(heads=heads, tp_size=tp_size, tp_rank=tp_rank)
    got = layout(FakeTensor((2, 2, 8, 16, held[1] - held[0], 64)), of=of)
    assert {one.units for one in got.tensors} == {(UnitRange(*held),)}


def test_latents_have_one_unit_and_states_no_tokens() -> None:
    latent = layout(FakeTensor((2, 8, 16, 576)), "layer block token head_dim", components="latent")
    assert {(one.units, one.chunk_bytes) for one in latent.tensors} == {((UnitRange(0, 1),), 1152)}
    state = from_tensors(
        spec(num_layers=1, tp_size=2, tp_rank=1),
        {
            "ssm": NamedTensor(
                tensor=FakeTensor((8, 12, 64, 16)),
                dims="block head head_dim head_dim",
                components="ssm",
                units=UnitRange(12, 24),
            )
        },
        [Group("state", 8, kind=GroupKind.STATE)],
    )
    (ssm,) = state.tensors
    assert (ssm.chunk_bytes, ssm.unit_stride, ssm.block_stride, ssm.token_stride) == (2048, 2048, 24576, 0)


def test_a_scale_for_each_block_is_an_item_of_the_whole_block() -> None:
    tensors = {
        "k": NamedTensor(tensor=FakeTensor((8, 16, 4, 64)), dims="block token head head_dim", components="k"),
        "scale": NamedTensor(
            tensor=FakeTensor((8, 4), address=1 << 30), dims="block head", components="k.scale"
        ),
    }
    got = from_tensors(spec(num_layers=1), tensors, [Group("full", 8, 16)])
    assert {one.component: (one.granule_tokens, one.content_bytes) for one in got.tensors} == {
        "k": (1, 128), "k.scale": (16, 2),
    }  # fmt: skip


def test_kernel_blocks_inside_an_id() -> None:
    named = NamedTensor(tensor=FakeTensor((24, 16, 4, 64)), dims="block token head head_dim", components="k")
    group = Group("full", 8, 48, physical_blocks_per_logical=3)
    assert from_tensors(spec(num_layers=1), {"k": named}, [group]).groups == (group,)
    with pytest.raises(LayoutError, match=r"tensor 'k', dimension 'block': it has 24 blocks, .* 8 of 2 each"):
        from_tensors(spec(num_layers=1), {"k": named}, [Group("full", 8, 32, physical_blocks_per_logical=2)])


@pytest.mark.parametrize(("tensor", "dims", "more", "words"), [
    (FakeTensor((2, 2, 8, 16, 4)), DIMS, {}, ("5 dimensions", "6 are named")),
    (FakeTensor((2, 2, 8, 16, 4, 64)), "layer kv page token head head_dim", {}, ("'page'", "block, token")),
    (FakeTensor((2, 2, 8, 16, 4, 64)), "layer kv block block head head_dim", {}, ("'block'", "named twice")),
    (FakeTensor((2, 2, 16, 4, 64)), "layer kv token head head_dim", {}, ("no dimension is named block",)),
    (FakeTensor((2, 2, 0, 16, 4, 64), (1, 1, 1, 1, 1, 1)), DIMS, {}, ("'block'", "is empty")),
    (FakeTensor((2, 3, 8, 16, 4, 64)), DIMS, {}, ("'kv'", "3 components", "2 are named", "components=")),
    (FakeTensor((3, 2, 8, 16, 4, 64)), DIMS, {}, ("'layer'", "3 layers", "has 2", "layers=")),
    (FakeTensor((2, 2, 8, 16, 4, 64)), DIMS, {"layers": [0]}, ("'layer'", "2 layers", "1 are given")),
    (FakeTensor((2, 2, 8, 16, 3, 64)), DIMS, {}, ("'head'", "3 heads", "4", "units=")),
    (FakeTensor((2, 2, 8, 16, 4, 64)), DIMS, {"units": UnitRange(0, 3)}, ("'head'", "units= lists 3")),
    (FakeTensor((2, 8, 16, 4, 64)), "layer block token head head_dim", {}, ("components='k'",)),
    (FakeTensor((2, 2, 8, 16, 4, 64)), DIMS, {"group": "state"}, ("'state' is not described",)),
    (FakeTensor((2, 2, 8, 16, 4, 64)), DIMS, {"layers": [1, 1]}, ("layer 1's component 'k'", "already")),
    (FakeTensor((2, 2, 8, 16, 4, 64)), DIMS, {"layers": [1, 2]}, ("layers [1, 3)",)),
    # Memory that is not each element's own
    (strided(65536, 32768, 4096, 256, 0, 1), DIMS, {}, ("'head'", "expanded", "contiguous()")),
    (strided(65536, 32768, 4096, -256, 64, 1), DIMS, {}, ("'token'", "flipped")),
    (strided(65536, 32768, 4096, 255, 64, 1), DIMS, {}, ("'cache'", "overlaps itself")),
    (strided(16384, 32768, 4096, 256, 64, 1), DIMS, {}, ("'cache'", "overlaps")),
    (strided(1 << 60, 32768, 4096, 256, 64, 1), DIMS, {}, ("region 'cache'", "its size is")),
    # Content that is in too many pieces for one stride
    (
        FakeTensor((2, 2, 8, 16, 4, 4, 4), (1 << 20, 1 << 19, 1 << 16, 1 << 12, 1 << 10, 100, 10)),
        "layer kv block token head head_dim head_dim",
        {},
        ("'head_dim'", "200, 20 bytes apart"),
    ),
])  # fmt: skip
def test_refusals_name_tensor_and_dimension(tensor: Any, dims: str, more: dict[str, Any], words: Any) -> None:
    message = refusal(tensor, dims, **more)
    assert message.startswith("cannot ")
    for word in words:
        assert word in message


def test_two_tensors_over_the_same_bytes_are_refused_by_their_names() -> None:
    """Even where each is a storage of its own, as two views of one buffer may be."""

    def half(address: int, layer: int) -> NamedTensor:
        return NamedTensor(tensor=FakeTensor((2, 8, 16, 4, 64), address=address), dims=DIMS[6:], layers=layer)

    size = 2 * 8 * 16 * 4 * 64 * 2
    beside = {"a": half(1 << 20, 0), "b": half((1 << 20) + size, 1)}
    assert [r.region for r in from_tensors(spec(), beside).regions] == ["a", "b"]
    with pytest.raises(LayoutError, match=r"tensor '[ab]' and '[ab]'.*overlaps"):
        from_tensors(spec(), {"a": half((1 << 20) + 512, 0), "b": half(1 << 20, 1)})


def test_groups_that_do_not_agree_and_groups_that_are_not_named() -> None:
    tensors = {
        "a": NamedTensor(tensor=FakeTensor((2, 8, 16, 4, 64)), dims=DIMS[6:], layers=0),
        "b": NamedTensor(tensor=FakeTensor((2, 8, 32, 4, 64), address=1 << 30), dims=DIMS[6:], layers=1),
    }
    with pytest.raises(LayoutError, match="'a' has 8 of 16 tokens, 'b' has 8 of 32 tokens"):
        from_tensors(spec(), tensors)
    groups = [Group("full", 8, 16), Group("long", 8, 32)]
    with pytest.raises(LayoutError, match=r"'a'.*no group is named.*'full', 'long'"):
        from_tensors(spec(), tensors, groups)


def test_no_tensors_and_no_named_tensor() -> None:
    with pytest.raises(LayoutError, match="without tensors"):
        from_tensors(spec(), {})
    with pytest.raises(LayoutError, match="by its name"):
        from_tensors(spec(), [FakeTensor((2, 2))])  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"Expected `int`, got `str` - at `\$.num_layers`"):
        from_tensors(spec(num_layers="2"), {"cache": FakeTensor((2, 2))})  # type: ignore[dict-item]
    with pytest.raises(LayoutError, match="it is a FakeTensor; give a NamedTensor"):
        from_tensors(spec(), {"cache": FakeTensor((2, 2))})  # type: ignore[dict-item]


def test_real_tensors() -> None:
    """Expanded, overlapping, sparse and memoryless ones; and a view into a larger allocation."""
    torch = pytest.importorskip("torch")
    whole = torch.zeros(2, 2, 8, 16, 4, 64, dtype=torch.bfloat16)
    assert layout(whole).tensors[0].dtype == "bfloat16"
    (region,) = tensor_regions({"cache": whole[1], "v": whole[:, 1]})
    assert region.region == "cache"
    assert region.end == whole.data_ptr() + whole.nbytes
    assert "expanded" in refusal(whole[:, :, :1].expand(2, 2, 8, 16, 4, 64))
    assert "overlap" in refusal(whole.as_strided((2, 2, 8, 16, 4, 64), (1024, 512, 64, 4, 1, 1)))
    assert "no memory" in refusal(torch.empty(2, 2, 8, 16, 4, 64, device="meta"))
    assert "no plain storage" in refusal(torch.zeros(2, 2, 8, 16, 4, 64).to_sparse())
