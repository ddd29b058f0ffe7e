"""From a model's facts and a deployment to the layout of every rank."""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.ids import EngineId, Generation, GroupName, Rank, RegionId
from kvxferd.layout.engine import EngineSpec
from kvxferd.layout.presets.attention import axis_strides
from kvxferd.layout.presets.facts import LayerKind, ModelFacts, StateComponent, TokenComponent
from kvxferd.layout.presets.sharding import shard_units, stage_layers
from kvxferd.layout.tensors import CacheTensor, Group, GroupKind, RankLayout, RegionSpec, UnitRange

_KV = RegionId("kv")


class _Choices(NamedTuple):
    """What a deployment chooses, alike on every rank."""

    block_tokens: int  # of a kernel block
    num_blocks: int
    arrangement: str  # a name of LAYOUT_NAMES
    is_row_major: bool  # convolution states row by row over all channels (SD)


def model_spec(
    model: ModelFacts, *, tp: int = 1, pp: int = 1, rank: tuple[int, int] = (0, 0), engine_id: str = ""
) -> EngineSpec:
    """Return one rank's spec for a model; `rank` is (pp_rank, tp_rank)."""
    return EngineSpec(
        EngineId(engine_id or model.name),
        Generation("preset"),
        model.num_layers,
        pp_size=pp,
        tp_size=tp,
        pp_rank=rank[0],
        tp_rank=rank[1],
        num_kv_heads=model.num_kv_heads,
        fingerprint=model.name,
    )


def model_ranks(
    model: ModelFacts,
    *,
    tp: int = 1,
    pp: int = 1,
    block_tokens: int = 16,
    num_blocks: int = 1024,
    layout: str = "HND",
    engine_id: str = "",
) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
    """Return spec and layout of every rank of a deployment; see `model_layout`."""
    ranks = {}
    for rank in model_spec(model, tp=tp, pp=pp).ranks():
        spec = model_spec(model, tp=tp, pp=pp, rank=rank, engine_id=engine_id)
        ranks[rank] = (
            spec,
            model_layout(model, spec, block_tokens=block_tokens, num_blocks=num_blocks, layout=layout),
        )
    return ranks


def model_layout(
    model: ModelFacts,
    spec: EngineSpec,
    *,
    block_tokens: int = 16,
    num_blocks: int = 1024,
    layout: str = "HND",
) -> RankLayout:
    """Return the layout of the rank `spec.rank`.

    `layout` is a name of LAYOUT_NAMES; "+SD" behind it keeps convolution states row by row. All of
    the rank's cache is one region, sized exactly. Groups are "full", "sliding" and, of states,
    "state.0" and so on. In a hybrid of attention and states both kinds share pages, as engines
    keep them: `num_blocks` pages each hold either a logical block of attention or one state, and a
    logical block is as many kernel blocks of `block_tokens` as a state needs room.
    """
    arrangement, _, conv = layout.partition("+")
    if conv not in ("", "DS", "SD"):
        raise ValueError(f"cannot build layout {layout!r}: behind the + goes DS or SD")
    choices = _Choices(block_tokens, num_blocks, arrangement, conv == "SD")
    first, last = stage_layers(spec.num_layers, spec.pp_size, spec.pp_rank)
    build = _hybrid if LayerKind.STATE in model.kinds else _apart
    groups, tensors, used = build(model, spec, choices, range(first, last))
    regions = (RegionSpec(_KV, used),) if used else ()
    return RankLayout(first, last, tuple(groups), tuple(tensors), regions)


_Built = tuple[list[Group], list[CacheTensor], int]


def _apart(model: ModelFacts, spec: EngineSpec, choices: _Choices, stage: range) -> _Built:
    """Every group in arrays of its own, one after the other."""
    groups: list[Group] = []
    tensors: list[CacheTensor] = []
    used = 0
    for kind in (LayerKind.FULL, LayerKind.SLIDING):
        if kind not in model.kinds:
            continue
        # Every stage has every group: block lists are the engine's.
        groups.append(_token_group(model, kind, choices, 1))
        layers = [layer for layer in stage if model.kinds[layer] is kind]
        for array in model.token_arrays if layers else ():
            placed = _Array(array, spec, choices, groups[-1], len(layers))
            tensors.extend(placed.tensors(layers, used))
            used += placed.strides.total
    return groups, tensors, used


def _hybrid(model: ModelFacts, spec: EngineSpec, choices: _Choices, stage: range) -> _Built:
    """Attention and states in common pages: slots of pages, at most one layer of each group in a slot."""
    if LayerKind.SLIDING in model.kinds:
        raise ValueError(f"cannot build {model.name!r}: no preset has states beside a sliding window")
    attention, *state_groups = _layer_groups(model)
    own = [[layer for layer in group if layer in stage] for group in (attention, *state_groups)]
    slots = max(map(len, own))
    page_bytes = sum(_state_bytes(state, spec.tp_size, spec.tp_rank) for state in model.states)
    groups: list[Group] = []
    tensors: list[CacheTensor] = []
    if attention:
        choices = choices._replace(arrangement=_page_wise(choices.arrangement))
        per_logical = blocks_per_logical(model, spec.tp_size, choices.block_tokens)
        groups.append(_token_group(model, LayerKind.FULL, choices, per_logical))
        (array,) = model.token_arrays
        placed = _Array(array, spec, choices, groups[0], slots)
        page_bytes = placed.strides.block * per_logical
        tensors.extend(placed.tensors(own[0], 0))
    for number, layers in enumerate(own[1:]):
        group = Group(GroupName(f"state.{number}"), choices.num_blocks, kind=GroupKind.STATE)
        groups.append(group)
        for slot, layer in enumerate(layers):
            at = slot * choices.num_blocks * page_bytes
            tensors.extend(_state_tensors(model, spec, choices, group, layer, at, page_bytes))
    return groups, tensors, slots * choices.num_blocks * page_bytes


def _layer_groups(model: ModelFacts) -> list[list[int]]:
    """Return the whole model's attention layers, then its state layers in as many groups as are needed."""
    attention = [layer for layer, kind in enumerate(model.kinds) if kind is LayerKind.FULL]
    states = [layer for layer, kind in enumerate(model.kinds) if kind is LayerKind.STATE]
    size = len(attention) or len(states)
    return [attention, *(states[start : start + size] for start in range(0, len(states), size))]


def blocks_per_logical(model: ModelFacts, tp_size: int, block_tokens: int) -> int:
    """Return how many kernel blocks of attention a hybrid's logical block takes to have room for a state.

    The most that any rank needs: block ids mean the same tokens on every rank of an engine.
    """
    (array,) = model.token_arrays
    most = 1
    for tp_rank in range(tp_size):
        heads = _width(shard_units(array[0].num_heads, tp_size, tp_rank))
        block_bytes = len(array) * block_tokens * heads * array[0].head_bytes
        state_bytes = sum(_state_bytes(state, tp_size, tp_rank) for state in model.states)
        most = max(most, -(-state_bytes // block_bytes))
    return most


def _page_wise(arrangement: str) -> str:
    """Return the arrangement in which K and V of a block lie together, as shared pages require."""
    if arrangement in ("HND", "NHD"):
        return f"{arrangement}-blocks-first"
    if arrangement.endswith("-cross-layer"):
        raise ValueError("cannot build a hybrid with cross-layer blocks: its layers' pages are of two kinds")
    return arrangement


def _token_group(model: ModelFacts, kind: LayerKind, choices: _Choices, per_logical: int) -> Group:
    return Group(
        GroupName(kind.value),
        choices.num_blocks,
        choices.block_tokens * per_logical,
        sliding_window=model.sliding_window if kind is LayerKind.SLIDING else None,
        physical_blocks_per_logical=per_logical,
    )


class _Array:
    """Components of one shape in one group: where each layer's tensors lie from the array's start on."""

    def __init__(
        self,
        array: tuple[TokenComponent, ...],
        spec: EngineSpec,
        choices: _Choices,
        group: Group,
        num_layers: int,
    ) -> None:
        first = array[0]
        self.components = array
        self.group = group
        self.units = (
            (UnitRange(0, first.num_heads),)
            if first.is_replicated
            else shard_units(first.num_heads, spec.tp_size, spec.tp_rank)
        )
        extents = {
            "l": num_layers,
            "c": len(array),
            "b": group.num_blocks * group.physical_blocks_per_logical,
            "n": _width(self.units),
            "t": choices.block_tokens // first.granule_tokens,
        }
        self.strides = axis_strides(choices.arrangement, extents, first.head_bytes)

    def tensors(self, layers: list[int], start: int) -> list[CacheTensor]:
        """Return the tensors of these layers for an array that begins at byte `start`."""
        return [
            CacheTensor(
                layer=layer,
                component=component.name,
                group=self.group.name,
                region=_KV,
                offset=start + index * self.strides.layer + position * self.strides.component,
                block_stride=self.strides.block,
                token_stride=self.strides.token,
                unit_stride=self.strides.unit,
                units=self.units,
                chunk_bytes=component.head_bytes,
                granule_tokens=component.granule_tokens,
                itemsize=component.itemsize,
                dtype=component.dtype,
            )
            for index, layer in enumerate(layers)
            for position, component in enumerate(self.components)
        ]


def _state_tensors(
    model: ModelFacts,
    spec: EngineSpec,
    choices: _Choices,
    group: Group,
    layer: int,
    start: int,
    page_bytes: int,
) -> list[CacheTensor]:
    """Return one layer's states, one behind the other in each page."""
    tensors = []
    shares = {state.name: shard_units(state.num_units, spec.tp_size, spec.tp_rank) for state in model.states}
    row_bytes = sum(_width(shares[s.name]) * s.row_bytes for s in model.states if s.is_convolution)
    inside = column = 0
    for state in model.states:
        width = _width(shares[state.name])
        by_rows = choices.is_row_major and state.is_convolution
        tensors.append(
            CacheTensor(
                layer=layer,
                component=state.name,
                group=group.name,
                region=_KV,
                offset=start + (column if by_rows else inside),
                block_stride=page_bytes,
                token_stride=0,
                unit_stride=state.row_bytes if by_rows else state.unit_bytes,
                units=shares[state.name],
                chunk_bytes=state.row_bytes if by_rows else state.unit_bytes,
                num_chunks=state.rows if by_rows else 1,
                chunk_stride=row_bytes if by_rows else 0,
                itemsize=state.itemsize,
                dtype=state.dtype,
            )
        )
        inside += width * state.unit_bytes
        column += width * state.row_bytes
    return tensors


def _state_bytes(state: StateComponent, tp_size: int, tp_rank: int) -> int:
    return _width(shard_units(state.num_units, tp_size, tp_rank)) * state.unit_bytes


def _width(units: tuple[UnitRange, ...]) -> int:
    return sum(held.stop - held.start for held in units)
