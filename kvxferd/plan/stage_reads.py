"""What one local rank reads of one stage of a remote engine, tensor-parallel rank by rank.

Where the remote's layouts are known it comes from the plan. Of an engine that is known by its
`EngineTransferInfo` alone, the planner's own assignment of units is made for the ranks that such an
engine has: this rank's layout tells how many units each component of the model has.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvxferd.ids import Rank
from kvxferd.layout import (
    CacheTensor,
    EngineSpec,
    Group,
    GroupKind,
    RankLayout,
    TokenShard,
    UnitRange,
)
from kvxferd.layout.presets import shard_units
from kvxferd.plan.assignment import Fragment, RankShare, assign_units, preferred_rank
from kvxferd.plan.info import EngineTransferInfo
from kvxferd.plan.plan import Extent, GroupRead, Plan

UnitsOfRank = Callable[[int], tuple[UnitRange, ...]]


class AttentionRead(NamedTuple):
    """What is read of one remote rank of the first attention tensor that it is read for."""

    tensor: CacheTensor  # this rank's
    fragments: tuple[Fragment, ...]  # in the order of this rank's units


class StageReads(NamedTuple):
    """What one local rank reads of one stage."""

    num_ranks: int  # of the stage
    attention: dict[int, AttentionRead]  # by tp_rank, the lowest first
    states: tuple[int, ...]  # the tp_ranks read for states, the lowest first
    units_of: UnitsOfRank  # the units of the stage's first attention tensor that a tp_rank holds

    @property
    def sources(self) -> list[int]:
        """Return the tp_ranks that are read, ascending."""
        return sorted({*self.attention, *self.states})


def planned_reads(layout: RankLayout, plan: Plan, stage: Mapping[Rank, RankLayout]) -> StageReads:
    """Return the reads of a stage whose layouts are known; `layout` is this rank's."""
    extents: dict[int, dict[tuple[int, str], list[tuple[Extent, int]]]] = {}
    states = set()
    for read in group_reads_of(plan, min(stage).pp_rank):
        if read.local.kind is GroupKind.STATE:
            states.add(read.rank.tp_rank)
            continue
        of_rank = extents.setdefault(read.rank.tp_rank, {})
        for pattern in read.patterns:
            for extent in pattern.extents:
                key = (extent.layer, extent.component)
                of_rank.setdefault(key, []).append((extent, pattern.num_units))
    local, remote = _by_component(layout), {rank.tp_rank: (rank, held) for rank, held in stage.items()}
    attention = {}
    for tp_rank, of_rank in sorted(extents.items()):
        tensor = min((local[key] for key in of_rank), key=_memory_order)
        key = (tensor.layer, tensor.component)
        rank, held = remote[tp_rank]
        theirs = _by_component(held)[key]
        fragments = [
            Fragment(
                rank,
                extent.first_unit,
                num_units,
                _position(tensor, extent.local_offset),
                _position(theirs, extent.remote_offset),
            )
            for extent, num_units in of_rank[key]
        ]
        attention[tp_rank] = AttentionRead(tensor, tuple(sorted(fragments, key=lambda f: f.local_index)))
    return StageReads(len(stage), attention, tuple(sorted(states)), _units_in(remote, attention))


def assigned_reads(spec: EngineSpec, layout: RankLayout, info: EngineTransferInfo) -> StageReads:
    """Return the reads of a stage of which only `info` is known; `spec` and `layout` are this rank's.

    Heads are divided as `spec.num_kv_heads` gives it, states evenly, as every known engine does. Of
    `info`, layers [0, 0) are taken for the whole model. Token shards of the remote are not known.
    """
    assignment = _Assignment(spec, info)
    attention: dict[int, list[tuple[CacheTensor, Fragment]]] = {}
    states: set[int] = set()
    units_of: UnitsOfRank | None = None
    for tensor, group in _tensors_read(layout, info):
        total = assignment.total_units(tensor, group)
        fragments = assignment.fragments(tensor, group, total)
        if group.kind is GroupKind.STATE:
            states.update(fragment.rank.tp_rank for fragment in fragments)
            continue
        units_of = units_of or assignment.units_of(tensor, total)
        for fragment in fragments:
            attention.setdefault(fragment.rank.tp_rank, []).append((tensor, fragment))
    reads = {
        tp_rank: AttentionRead(found[0][0], tuple(f for tensor, f in found if tensor is found[0][0]))
        for tp_rank, found in sorted(attention.items())
    }
    return StageReads(info.remote_tp_size, reads, tuple(sorted(states)), units_of or _no_units)


class _Assignment:
    """The planner's assignment to the ranks of an engine of which only sizes are known."""

    def __init__(self, spec: EngineSpec, info: EngineTransferInfo) -> None:
        self._spec = spec
        self._info = info
        self._preferred = preferred_rank(spec.tp_rank, spec.tp_size, info.remote_tp_size)
        self._kept: dict[tuple[object, ...], list[Fragment]] = {}  # eighty layers share a few

    def total_units(self, tensor: CacheTensor, group: Group) -> int | None:
        """Return how many units a component has in the whole model; None: each rank holds what this one does.

        A rank's units alone do not always tell: rank 0 of a component of which neighbours hold copies (B and
        C of few groups) looks like one of a component that is divided. Either way it is read from ranks that
        are read for the rest of the layer's states.
        """
        spec, heads = self._spec, self._spec.num_kv_heads
        is_attention = group.kind is GroupKind.ATTENTION
        if is_attention and heads == 0:
            return None
        # Ranks of context parallelism that share tokens hold the same heads.
        shared = group.token_shard.count if spec.tp_size % group.token_shard.count == 0 else 1
        positions = [(spec.tp_size // n, spec.tp_rank // n) for n in (1, shared)]
        if is_attention and any(shard_units(heads, *position) == tensor.units for position in positions):
            return heads
        totals = [_divided_total(tensor.units, *position) for position in positions]
        return next((total for total in totals if total is not None), None)

    def units_of(self, tensor: CacheTensor, total: int | None) -> UnitsOfRank:
        """Return the function from a remote tp_rank to the units that it holds."""
        wide = self._info.remote_tp_size

        def units_of(tp_rank: int) -> tuple[UnitRange, ...]:
            if not 0 <= tp_rank < wide:
                return ()
            return tensor.units if total is None else shard_units(total, wide, tp_rank)

        return units_of

    def fragments(self, tensor: CacheTensor, group: Group, total: int | None) -> list[Fragment]:
        """Return where this rank's units of a tensor are read."""
        key = (tensor.units, group.token_shard, total)
        if key not in self._kept:
            units_of = self.units_of(tensor, total)
            shares = tuple(
                RankShare(Rank(self._info.remote_pp_rank, tp), units_of(tp), TokenShard())
                for tp in range(self._info.remote_tp_size)
            )
            self._kept[key], _ = assign_units(tensor.units, group.token_shard, shares, self._preferred)
        return self._kept[key]


def _divided_total(units: tuple[UnitRange, ...], tp_size: int, tp_rank: int) -> int | None:
    """Return the total that, divided over the ranks with the larger shares first, gives a rank `units`.

    None: there is none. Of several it is the one that divides evenly.
    """
    if len(units) != 1:
        return None
    start, width = units[0].start, units[0].stop - units[0].start
    rest = start - tp_rank * width
    return tp_size * width + rest if 0 <= rest <= tp_rank else None


def _tensors_read(layout: RankLayout, info: EngineTransferInfo) -> Iterator[tuple[CacheTensor, Group]]:
    """Yield this rank's tensors in the layers of `info`, in memory order."""
    groups = {group.name: group for group in layout.groups}
    is_whole = info.start_layer == info.end_layer == 0
    for tensor in sorted(layout.tensors, key=_memory_order):
        is_inside = is_whole or info.start_layer <= tensor.layer < info.end_layer
        if is_inside and tensor.num_units and tensor.content_bytes:
            yield tensor, groups[tensor.group]


def group_reads_of(plan: Plan, pp_rank: int) -> Sequence[GroupRead]:
    """Return the group reads of one stage; a plan has them in order of rank."""
    start, end = (
        bisect.bisect_left(plan.group_reads, stage, key=lambda read: read.rank.pp_rank)
        for stage in (pp_rank, pp_rank + 1)
    )
    return plan.group_reads[start:end]


def _units_in(
    remote: Mapping[int, tuple[Rank, RankLayout]], attention: Mapping[int, AttentionRead]
) -> UnitsOfRank:
    """Return the function from a remote tp_rank to its units of the first attention tensor that is read.

    It does not keep the layouts: a registry keeps it after the manifest is forgotten.
    """
    if not attention:
        return _no_units
    first = min((read.tensor for read in attention.values()), key=_memory_order)
    units = {
        tp_rank: tensor.units
        for tp_rank, (_, layout) in remote.items()
        for tensor in layout.tensors
        if tensor.layer == first.layer and tensor.component == first.component
    }
    return lambda tp_rank: units.get(tp_rank, ())


def _no_units(tp_rank: int) -> tuple[UnitRange, ...]:
    return ()


def _memory_order(tensor: CacheTensor) -> tuple[int, int]:
    return tensor.layer, tensor.offset


def _by_component(layout: RankLayout) -> dict[tuple[int, str], CacheTensor]:
    return {(tensor.layer, tensor.component): tensor for tensor in layout.tensors}


def _position(tensor: CacheTensor, offset: int) -> int:
    """Return the position, among a tensor's units, of the one that lies at `offset` of block 0."""
    return (offset - tensor.offset) // tensor.unit_stride if tensor.unit_stride else 0
