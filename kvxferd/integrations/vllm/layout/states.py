"""Recurrent states: cache tensors from the page that vLLM makes for a layer.

A page holds the parts one behind the other: the convolution's last inputs, then the recurrent
state. vLLM reports the convolution's shape as (columns, rows), DS, or (rows, columns), SD. Its columns are
x alone (Mamba1, short convolutions), x, B and C (Mamba2) or Q, K and V (gated delta nets), and
each of these parts is divided over the ranks by itself.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from kvxferd.ids import GroupName, RegionId
from kvxferd.integrations.vllm.layout.facts import (
    LayerFacts,
    LayerKey,
    StateFacts,
    WorkerFacts,
    layer_error,
    unit_range_of_rank,
)
from kvxferd.integrations.vllm.layout.opaque import opaque_encoding, opaque_units
from kvxferd.integrations.vllm.layout.support import MIXERS
from kvxferd.layout import (
    CacheTensor,
    ConvPart,
    MambaConvSplitInfo,
    UnitRange,
    derive_mamba_conv_split,
)
from kvxferd.layout.tensor_views import TensorView


class _PagePart(NamedTuple):
    """One of the parts of a page."""

    region: RegionId
    offset: int  # from the region's start to the part in block 0
    block_stride: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int


def state_tensors(
    layer: LayerFacts,
    state: StateFacts,
    key: LayerKey,
    views: tuple[TensorView, ...],
    group: GroupName,
    worker: WorkerFacts,
) -> list[CacheTensor]:
    """Return one layer's cache tensors. Raises LayoutError, naming the layer it cannot describe.

    `views` is the layer's page, [blocks, ..., bytes], or one tensor [blocks, *shape] for each part. The
    states of a mixer that is not known here are opaque pages.
    """
    pages = _page_parts(layer, state, views)
    if state.mixer not in MIXERS or MIXERS[state.mixer][0] != len(state.shapes):
        return [
            _opaque_tensor(layer, state, key, number, page, group, worker)
            for number, page in enumerate(pages)
        ]
    tp_size, tp_rank = (1, 0) if state.is_replicated else (worker.tp_size, worker.tp_rank)
    try:
        parts, recurrent = _divide_units(state, tp_size, tp_rank)
    except ValueError as error:
        raise layer_error(layer.name, f"its states cannot be divided into units: {error}") from error
    tensors: list[CacheTensor] = []
    if parts:
        page = pages[0]
        named = tuple(part._replace(component=key.component(f"conv.{part.component}")) for part in parts)
        rows = page.shape[1] if state.is_conv_dim_first else page.shape[0]
        split = MambaConvSplitInfo(named, rows, page.itemsize, state.is_conv_dim_first)
        tensors += split.tensors(key.layer, group, page.region, page.offset, page.block_stride, page.dtype)
    if recurrent is not None:
        tensors.append(_recurrent_tensor(key, pages[-1], recurrent, group))
    return tensors


def _page_parts(layer: LayerFacts, state: StateFacts, views: tuple[TensorView, ...]) -> list[_PagePart]:
    """Return each part's offset and strides, after checks of sizes and contiguity. Raises LayoutError."""
    sizes = state.part_bytes
    if len(views) == 1 and views[0].shape[1:] != state.shapes[0]:
        (view,) = views
        inner = 1 if len(view.shape) == 1 else prod(view.shape[1:])
        if not view.is_last_axis_contiguous or inner != view.shape[-1] or view.content_bytes < sum(sizes):
            raise layer_error(
                layer.name, f"a page of shape {view.shape} cannot hold its states of {sum(sizes)} bytes"
            )
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        origins = [(view.region, view.offset + start, view.strides[0]) for start in starts]
    else:
        if len(views) != len(sizes):
            raise layer_error(layer.name, f"it has {len(views)} tensors for {len(sizes)} states")
        for view, shape, size in zip(views, state.shapes, sizes, strict=True):
            if (
                view.shape[1:] != shape
                or not _is_contiguous(view)
                or prod(view.shape[1:]) * view.itemsize != size
            ):
                raise layer_error(layer.name, f"a tensor of shape {view.shape} is no dense state of {shape}")
        origins = [(view.region, view.offset, view.strides[0]) for view in views]
    return [
        _PagePart(*origin, shape, dtype, itemsize)
        for origin, shape, (dtype, itemsize) in zip(origins, state.shapes, state.dtypes, strict=True)
    ]


def _is_contiguous(view: TensorView) -> bool:
    """Whether all axes but the block axis are contiguous."""
    step = view.itemsize
    for size, stride in zip(reversed(view.shape[1:]), reversed(view.strides[1:]), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _divide_units(state: StateFacts, tp_size: int, tp_rank: int) -> tuple[list[ConvPart], UnitRange | None]:
    """Return the parts of the convolution's columns, and the units of the recurrent state if there is one.

    Raises ValueError for shapes that the mixer cannot have.
    """
    shapes = state.shapes
    heads = shapes[-1][0]

    def even(local: int) -> UnitRange:
        return unit_range_of_rank(local, local * tp_size, tp_size, tp_rank)

    match state.mixer:
        case "mamba1":
            columns = _num_columns(state)
            if heads != columns:
                raise ValueError(f"{heads} channels of state and {columns} of convolution")
            return [_columns("x", even(columns), 1)], even(heads)
        case "short_conv":
            return [_columns("x", even(_num_columns(state)), 1)], None
        case "linear":
            return [], even(heads)
        case "mamba2":
            _, head_size, state_size = shapes[1]
            _, rest = derive_mamba_conv_split(_num_columns(state), shapes[1])
            groups = _held_groups(_units_of(rest, state_size), state, tp_size, tp_rank)
            return [
                _columns("x", even(heads), head_size),
                _columns("B", groups, state_size),
                _columns("C", groups, state_size),
            ], even(heads)
        case "gdn_attn":
            _, value_size, key_size = shapes[1]
            _, rest = derive_mamba_conv_split(_num_columns(state), shapes[1])
            keys = _units_of(rest, key_size)
            return [
                _columns("Q", even(keys), key_size),
                _columns("K", even(keys), key_size),
                _columns("V", even(heads), value_size),
            ], even(heads)
    raise AssertionError(f"{state.mixer} is in the table, and not divided")


def _num_columns(state: StateFacts) -> int:
    """Return the convolution's columns, whichever axis they are."""
    return state.shapes[0][0] if state.is_conv_dim_first else state.shapes[0][1]


def _columns(name: str, units: UnitRange, width: int) -> ConvPart:
    """Return the columns of a part, `width` to each head or group; a column is the unit of the tensors."""
    return ConvPart(name, (UnitRange(units.start * width, units.stop * width),))


def _units_of(columns: int, width: int) -> int:
    """Return how many units of `width` some columns are."""
    if columns % width:
        raise ValueError(f"{columns} columns of a part are no whole number of {width}")
    return columns // width


def _held_groups(local: int, state: StateFacts, tp_size: int, tp_rank: int) -> UnitRange:
    """Return which of the model's groups of B and C a rank holds: vLLM copies a single one to each rank."""
    if local == 0:
        return UnitRange(0, 0)
    if tp_size > 1 and state.num_groups is None:
        raise ValueError(f"how many groups the model has is not known, and a rank of {tp_size} holds {local}")
    total = local if state.num_groups is None else state.num_groups
    return unit_range_of_rank(local, total, tp_size, tp_rank)


def _recurrent_tensor(key: LayerKey, page: _PagePart, units: UnitRange, group: GroupName) -> CacheTensor:
    """Return the tensor of the recurrent state: one contiguous chunk for each head or channel."""
    content = prod(page.shape[1:]) * page.itemsize
    return CacheTensor(
        layer=key.layer,
        component=key.component("ssm"),
        group=group,
        region=page.region,
        offset=page.offset,
        block_stride=page.block_stride,
        token_stride=0,
        unit_stride=content,
        units=(units,),
        chunk_bytes=content,
        itemsize=page.itemsize,
        dtype=page.dtype,
    )


def _opaque_tensor(
    layer: LayerFacts,
    state: StateFacts,
    key: LayerKey,
    number: int,
    page: _PagePart,
    group: GroupName,
    worker: WorkerFacts,
) -> CacheTensor:
    """Return the tensor of one of the states of a mixer that is not known here."""
    shape = " x ".join(map(str, page.shape))
    order = "DS" if state.is_conv_dim_first else "SD"
    return CacheTensor(
        layer=key.layer,
        component=key.component(f"page.{number}"),
        group=group,
        region=page.region,
        offset=page.offset,
        block_stride=page.block_stride,
        token_stride=0,
        unit_stride=0,
        units=opaque_units(worker),
        chunk_bytes=prod(page.shape) * page.itemsize,
        itemsize=page.itemsize,
        dtype=page.dtype,
        encoding=opaque_encoding(f"{state.mixer}, {order}, state {number} of {shape}", layer, worker),
    )
