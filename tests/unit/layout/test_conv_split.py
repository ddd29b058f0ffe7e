"""The convolution state's parts, pinned to the golden numbers (rows 8 and 9), and the plan that agrees."""

from __future__ import annotations

import pytest

from kvxferd.ids import GroupName
from kvxferd.layout import (
    ConvPart,
    Group,
    GroupKind,
    MambaConvSplitInfo,
    PackedBlocks,
    UnitRange,
    compute_physical_blocks_per_logical,
    derive_mamba_conv_split,
    pack_ids,
)
from kvxferd.layout.presets import MODELS, LayerKind, ModelFacts, StateComponent, deploy
from kvxferd.plan.plan import block_geometry
from kvxferd.plan.token_segments import kernel_blocks
from tests.support.attention_engines import plan_between

NEMOTRON = MODELS["nemotron-h-8b"]


def split(*columns: int) -> MambaConvSplitInfo:
    """Return parts of so many columns, of 3 rows of items of 2 bytes, column by column."""
    parts = tuple(ConvPart(f"part{n}", (UnitRange(0, size),)) for n, size in enumerate(columns))
    return MambaConvSplitInfo(parts, 3, 2, is_dim_first=True)


def moved(tp: int, rank: int, remote_tp: int, source: int) -> dict[str, tuple[int, int, int]]:
    """Return (local offset, remote offset, bytes) of layer 0's states, from the plan."""
    sink = deploy(NEMOTRON, tp=tp, num_blocks=1)
    remote = deploy(NEMOTRON, tp=remote_tp, num_blocks=1)
    plan = plan_between(sink, remote, (0, rank))
    return {
        piece.component: (piece.local_offset, piece.remote_offset, strip.num_units * strip.local.unit)
        for lane in plan.group_reads
        for strip in lane.patterns
        for piece in strip.extents
        if piece.layer == 0 and lane.rank.tp_rank == source
    }


def test_parts_of_a_rank() -> None:
    """GOLDEN row 8: x 2048, B 256 columns; ssm behind them."""
    assert derive_mamba_conv_split(2560, (32, 64, 128)) == (2048, 256)
    at_tp4 = split(2048, 256, 256)
    assert (at_tp4.conv_dim_local, at_tp4.num_bytes) == (2560, 15360)
    assert at_tp4.local_conv_offsets == [(0, 12288), (12288, 1536), (13824, 1536)]
    assert moved(4, 0, 4, 0) == {
        "conv.x": (0, 0, 12288),
        "conv.B": (12288, 12288, 1536),
        "conv.C": (13824, 13824, 1536),
        "ssm": (15360, 15360, 524288),
    }


def test_a_narrower_peer() -> None:
    """GOLDEN row 8: decode TP4 rank 3 from prefill TP1."""
    found = moved(4, 3, 1, 0)
    assert [found[name][1:] for name in ("conv.x", "conv.B", "conv.C", "ssm")] == [
        (36864, 12288),
        (53760, 1536),
        (59904, 1536),
        (61440 + 3 * 524288, 524288),
    ]
    assert 61440 + 3 * 524288 == 1634304


@pytest.mark.parametrize("source", range(4))
def test_a_wider_peer(source: int) -> None:
    """GOLDEN row 8: decode TP1 from prefill TP4 rank p: p's own offsets, into its share of ours."""
    found = moved(1, 0, 4, source)
    assert [found[name] for name in ("conv.x", "conv.B", "conv.C")] == [
        (source * 12288, 0, 12288),
        (49152 + source * 1536, 12288, 1536),
        (55296 + source * 1536, 13824, 1536),
    ]


def test_a_ratio_of_minus_two() -> None:
    """GOLDEN row 8: widths (20, 10) of ours are (10, 5) of either remote rank; nothing is negative."""
    states = tuple(
        StateComponent(f"conv.{name}", columns, 2, rows=3, is_convolution=True)
        for name, columns in (("x", 20), ("B", 10), ("C", 10))
    )
    model = ModelFacts("conv", 0, (LayerKind.STATE,), (), states)
    sink, source = deploy(model, tp=1, num_blocks=1), deploy(model, tp=2, num_blocks=1)
    assert split(10, 5, 5).local_conv_offsets == [(0, 60), (60, 30), (90, 30)]
    for rank in (0, 1):
        found = [
            (extent.remote_offset, pattern.num_units * pattern.local.unit)
            for read in plan_between(sink, source).group_reads
            for pattern in read.patterns
            for extent in pattern.extents
            if read.rank.tp_rank == rank
        ]
        assert sorted(found) == [(0, 60), (60, 30), (90, 30)]


@pytest.mark.parametrize(
    ("columns", "ssm_shape"),
    [(2000, (32, 64, 128)), (2049, (32, 64, 128)), (4095, (4096, 16))],  # Mamba1 has x alone
)
def test_shapes_that_do_not_split(columns: int, ssm_shape: tuple[int, ...]) -> None:
    """GOLDEN row 8: no B and C is legal; fewer columns than x, or an odd rest, is refused."""
    assert derive_mamba_conv_split(2048, (32, 64, 128)) == (2048, 0)
    with pytest.raises(ValueError, match=f"{columns} convolution columns"):
        derive_mamba_conv_split(columns, ssm_shape)


@pytest.mark.parametrize(
    ("sizes", "block_len", "want"),
    [
        ((36864, 2097152), 8192, 261),
        ((18432, 1048576), 4096, 261),
        ((9216, 524288), 4096, 131),
    ],
)
def test_kernel_blocks_per_logical_block(sizes: tuple[int, int], block_len: int, want: int) -> None:
    """GOLDEN row 9: rounded up."""
    assert compute_physical_blocks_per_logical(sizes, block_len) == want


@pytest.mark.parametrize(
    ("ids", "is_state", "ratio", "want"),
    [
        ([[0], [10]], [False, True], 10, [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [10]]),
        ([[0, 1], [10]], [False, True], 6, [list(range(12)), [10]]),
        ([[2, 5]], [False], 4, [[8, 9, 10, 11, 20, 21, 22, 23]]),
        ([[2, 5]], [False], 1, [[2, 5]]),  # however many ours are made of
    ],
)
def test_logical_ids_expand_by_the_remotes_ratio(
    ids: list[list[int]], is_state: list[bool], ratio: int, want: list[list[int]]
) -> None:
    """GOLDEN row 9: as the expansion of a plan turns ids into kernel blocks, each side by its own group."""
    groups = [
        Group(GroupName("state"), 16, kind=GroupKind.STATE)
        if is_one
        else Group(GroupName("full"), 16, 16 * ratio, physical_blocks_per_logical=ratio)
        for is_one in is_state
    ]
    expanded = [
        kernel_blocks(block_geometry(group), PackedBlocks(pack_ids(listed))).tolist()
        for group, listed in zip(groups, ids, strict=True)
    ]
    assert expanded == want
