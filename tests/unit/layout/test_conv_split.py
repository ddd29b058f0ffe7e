"""The convolution state's parts, pinned to the golden numbers (rows 8 and 9), and the plan that agrees."""

from __future__ import annotations

import pytest

from kvxferd.ids import GroupName, Rank, RegionId
from kvxferd.layout import PackedBlocks, pack_ids
from kvxferd.layout.presets import MODELS, blocks_per_logical, deploy
from kvxferd.plan import (
    Expander,
    MambaConvSplitInfo,
    compute_physical_blocks_per_logical,
    derive_mamba_conv_split,
    logical_to_remote_block_ids,
    make_plan,
)

NEMOTRON = MODELS["nemotron-h-8b"]
# One rank of four: 2,560 columns of 3 rows, 32 heads of 64 by 128.
AT_TP4 = derive_mamba_conv_split((2560, 3), (32, 64, 128))


def moved(tp: int, rank: int, remote_tp: int, source: int) -> dict[str, tuple[int, int, int]]:
    """Return (local offset, remote offset, bytes) of layer 0's states, from the plan."""
    sink = deploy(NEMOTRON, tp=tp, num_blocks=1)
    remote = deploy(NEMOTRON, tp=remote_tp, num_blocks=1)
    plan = make_plan(*sink[Rank(0, rank)], remote[Rank(0, 0)][0], {r: h[1] for r, h in remote.items()})
    return {
        piece.component: (piece.local_offset, piece.remote_offset, strip.num_units * strip.local.unit)
        for lane in plan.group_reads
        for strip in lane.patterns
        for piece in strip.extents
        if piece.layer == 0 and lane.rank.tp_rank == source
    }


def test_parts_of_a_rank() -> None:
    """GOLDEN row 8: x 2048, B 256 columns; ssm behind them."""
    assert (AT_TP4.x_local, AT_TP4.b_local, AT_TP4.conv_dim_local) == (2048, 256, 2560)
    assert (AT_TP4.x_bytes, AT_TP4.b_bytes) == (12288, 1536)
    assert AT_TP4.local_conv_offsets == [(0, 12288), (12288, 1536), (13824, 1536)]
    assert AT_TP4.ssm_sizes == (15360, 524288)
    assert moved(4, 0, 4, 0) == {
        "conv.x": (0, 0, 12288),
        "conv.B": (12288, 12288, 1536),
        "conv.C": (13824, 13824, 1536),
        "ssm": (15360, 15360, 524288),
    }


def test_a_narrower_peer() -> None:
    """GOLDEN row 8: decode TP4 rank 3 from prefill TP1."""
    assert AT_TP4.remote_conv_offsets(3, 4) == [(36864, 12288), (53760, 1536), (59904, 1536)]
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
    whole = derive_mamba_conv_split((10240, 3), (128, 64, 128))
    assert whole.remote_conv_offsets(0, -4) == AT_TP4.local_conv_offsets
    found = moved(1, 0, 4, source)
    assert [found[name] for name in ("conv.x", "conv.B", "conv.C")] == [
        (source * 12288, 0, 12288),
        (49152 + source * 1536, 12288, 1536),
        (55296 + source * 1536, 13824, 1536),
    ]


def test_a_ratio_of_minus_two() -> None:
    """GOLDEN row 8: a positive formula for a negative ratio."""
    info = MambaConvSplitInfo(3, 20, 10, 2, (0, 0))
    assert info.remote_conv_offsets(0, -2) == [(0, 60), (60, 30), (90, 30)]
    with pytest.raises(ValueError, match="20 and 10 columns by 3"):
        info.remote_conv_offsets(0, -3)
    with pytest.raises(ValueError, match="share 2 of 2"):
        info.remote_conv_offsets(2, 2)


def test_shapes_that_do_not_split() -> None:
    """GOLDEN row 8: no B and C is legal; fewer columns than x, or an odd rest, is refused."""
    plain = derive_mamba_conv_split((2048, 3), (32, 64, 128))
    assert (plain.x_local, plain.b_local, plain.conv_dim_local) == (2048, 0, 2048)
    for columns in (2000, 2049):
        with pytest.raises(ValueError, match=f"{columns} convolution columns"):
            derive_mamba_conv_split((columns, 3), (32, 64, 128))


def test_gated_delta_nets_have_the_value_last() -> None:
    """Q, K, V: Qwen3-Next on one rank."""
    info = derive_mamba_conv_split((8192, 3), (32, 128, 128), ssm_dtype_size=4, is_gdn=True)
    assert (info.x_local, info.b_local, info.conv_dim_local) == (4096, 2048, 8192)
    assert info.local_conv_offsets == [(0, 12288), (12288, 12288), (24576, 24576)]
    assert info.remote_conv_offsets(1, 2) == [(12288, 12288), (36864, 12288), (73728, 24576)]
    assert info.remote_conv_offsets(0, -2) == [(0, 6144), (6144, 6144), (12288, 12288)]
    assert info.ssm_sizes == (49152, 2097152)


def test_mamba1_has_x_alone() -> None:
    """Falcon-Mamba on two ranks: a channel of state for each column of the convolution."""
    info = derive_mamba_conv_split((4096, 3), (4096, 16))
    assert (info.x_local, info.b_local) == (4096, 0)
    assert info.ssm_sizes == (24576, 131072)
    with pytest.raises(ValueError, match="4095 convolution columns"):
        derive_mamba_conv_split((4095, 3), (4096, 16))


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


def test_presets_agree_on_kernel_blocks() -> None:
    """The preset's logical block has room for a state, whatever the TP."""
    for tp in (1, 2, 4, 8):
        split = derive_mamba_conv_split((10240 // tp, 3), (128 // tp, 64, 128))
        block_len = 2 * 16 * (8 // tp) * 256
        assert blocks_per_logical(NEMOTRON, tp, 16) == compute_physical_blocks_per_logical(
            split.ssm_sizes, block_len
        )


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
    """GOLDEN row 9."""
    assert logical_to_remote_block_ids(ids, is_state, ratio) == want


@pytest.mark.parametrize(
    ("tp", "remote_tp", "want"),
    [
        (4, 4, 1),  # the same page on both sides: all parts are one stretch
        (4, 1, 4),  # x, B, C and ssm, each a share of a larger part
        (1, 4, 4 * 4),  # four of each rank
    ],
)
def test_runs_of_a_state(tp: int, remote_tp: int, want: int) -> None:
    """Layer 0 of one request: as few runs as the two pages allow, at the page of its block."""
    sink = deploy(NEMOTRON, tp=tp, num_blocks=4)
    remote = deploy(NEMOTRON, tp=remote_tp, num_blocks=4)
    spec, layout = sink[Rank(0, 0)]
    plan = make_plan(spec, layout, remote[Rank(0, 0)][0], {r: h[1] for r, h in remote.items()})
    empty = {group.name: PackedBlocks(b"") for group in layout.groups}
    lists = empty | {GroupName("state.0"): PackedBlocks(pack_ids([2]), state_at=9)}
    at = {RegionId("kv"): 0}
    found = Expander(plan).expand(lists, lists, 9, at, dict.fromkeys(plan.sources, at))
    first = next(t for t in layout.tensors if t.layer == 0)
    page = first.block_stride
    start = first.offset + 2 * page
    inside = [run for runs in found.values() for run in runs.local.tolist() if start <= run < start + page]
    assert len(inside) == want
