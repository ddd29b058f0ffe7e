"""From two layouts to a plan: intersect layers, units and tokens, and prove that nothing is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvxferd.errors import Code, PlanError
from kvxferd.ids import GroupName, Rank
from kvxferd.layout import (
    CacheTensor,
    EngineSpec,
    Group,
    GroupKind,
    RankLayout,
    TokenShard,
    digest_of,
)
from kvxferd.plan.differences import find_differences
from kvxferd.plan.holders import Fragment, Gap, Holding, assign_units, preferred_rank
from kvxferd.plan.structs import BlockSide, Lane, Piece, Plan, Strides, Strip

Place = tuple[int, str]  # layer, component
_LaneKey = tuple[Rank, GroupName, GroupName, int]  # remote rank, local group, remote group, granule
_StripKey = tuple[Strides, Strides, int]  # local, remote, number of units


class _Held(NamedTuple):
    """A cache tensor with the group that allocates its blocks."""

    tensor: CacheTensor
    group: Group


def make_plan(
    spec: EngineSpec, layout: RankLayout, remote_spec: EngineSpec, remote: Mapping[Rank, RankLayout]
) -> Plan:
    """Return what the rank `spec.rank` with `layout` reads from the engine whose ranks are `remote`.

    Every coordinate that the local rank holds is written exactly once. Raises PlanError with code
    layout-incompatible, listing every field that differs with both values, or coverage-gap, naming
    the first layer, component, units and tokens that no remote rank holds.
    """
    differences = find_differences(spec, layout, remote_spec, remote)
    if differences:
        raise PlanError(
            f"cannot read engine {remote_spec.engine_id!r} from rank {spec.rank}: "
            + "; ".join(map(str, differences)),
            Code.LAYOUT_INCOMPATIBLE,
        )
    return _Planning(spec, layout, remote_spec, remote).plan()


class _Planning:
    """One planning of one rank: the index of holders, and what has been worked out so far."""

    def __init__(
        self, spec: EngineSpec, layout: RankLayout, remote_spec: EngineSpec, remote: Mapping[Rank, RankLayout]
    ) -> None:
        self._spec = spec
        self._layout = layout
        self._engine = remote_spec.engine_id
        self._holders = _index(remote)
        self._preferred = preferred_rank(spec.tp_rank, spec.tp_size, remote_spec.tp_size)
        self._assignments: dict[tuple[object, ...], tuple[list[Fragment], Gap | None]] = {}

    def plan(self) -> Plan:
        """Return the plan; raises PlanError (coverage-gap) for the first coordinate nobody holds."""
        groups = {group.name: group for group in self._layout.groups}
        lanes: dict[_LaneKey, dict[_StripKey, list[Piece]]] = {}
        sides: dict[_LaneKey, tuple[BlockSide, BlockSide]] = {}
        for tensor in self._layout.tensors:
            if tensor.num_units == 0 or tensor.content_bytes == 0:
                continue
            group = groups[tensor.group]
            for fragment, theirs in self._fragments(tensor, group.token_shard):
                key = (fragment.rank, tensor.group, theirs.tensor.group, tensor.granule_tokens)
                if key not in sides:
                    sides[key] = (_side(group), _side(theirs.group))
                _file(lanes.setdefault(key, {}), tensor, theirs.tensor, fragment)
        built = tuple(Lane(key[0], *sides[key], key[3], _strips(lanes[key])) for key in sorted(lanes))
        return Plan(self._spec.rank, digest_of((self._spec.rank, built)), built)

    def _fragments(self, tensor: CacheTensor, shard: TokenShard) -> list[tuple[Fragment, _Held]]:
        """Return from whom the units of one local tensor are read; raises PlanError for a gap."""
        holders = self._holders.get((tensor.layer, tensor.component), {})
        if not holders:
            raise self._nobody_holds(tensor)
        # Eighty layers share a handful of distributions: each is worked out once.
        holdings = tuple(Holding(r, h.tensor.units, h.group.token_shard) for r, h in holders.items())
        key = (tensor.units, shard, holdings)
        if key not in self._assignments:
            _require_one_sharding(tensor, holdings)
            self._assignments[key] = assign_units(tensor.units, shard, holdings, self._preferred)
        fragments, gap = self._assignments[key]
        if gap is not None:
            raise self._gap(tensor, gap, holdings)
        return [(fragment, holders[fragment.rank]) for fragment in fragments]

    def _tokens_of(shard: TokenShard) -> str:
    start = shard.index * shard.interleave
    return f"token range [{start}, {start + shard.interleave}) of every {shard.count * shard.interleave}"
