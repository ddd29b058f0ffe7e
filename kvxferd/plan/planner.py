"""Make a plan from two layouts: intersect layers, units and tokens, and prove that nothing is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvxferd.errors import Code, PlanError
from kvxferd.ids import GroupName, Rank
from kvxferd.layout import (
    CacheTensor,
    EngineSpec,
    Group,
    RankLayout,
    TokenShard,
    digest_of,
)
from kvxferd.plan.assignment import (
    Fragment,
    Gap,
    RankShare,
    assign_units,
    common_period_steps,
    preferred_rank,
)
from kvxferd.plan.differences import find_differences
from kvxferd.plan.plan import (
    BlockGeometry,
    Extent,
    GroupRead,
    Plan,
    StridePattern,
    Strides,
    block_geometry,
    strides_of,
)

# The longest common period of two interleavings, in gcd-sized steps; 64 ranks of 64 and 63 tokens take 4,032.
MAX_PERIOD_STEPS = 1 << 16

# Eighty layers of 16 components, cut into fifty extents each; two seconds of planning at the worst.
MAX_EXTENTS = 1 << 16

ComponentKey = tuple[int, str]  # layer, component
_GroupReadKey = tuple[Rank, GroupName, GroupName, int]  # remote rank, local group, remote group, granule
PatternKey = tuple[Strides, Strides, int]  # local, remote, number of units


class _HeldTensor(NamedTuple):
    """A cache tensor with the group that allocates its blocks."""

    tensor: CacheTensor
    group: Group


def make_plan(
    spec: EngineSpec, layout: RankLayout, remote_spec: EngineSpec, remote: Mapping[Rank, RankLayout]
) -> Plan:
    """Return what the rank `spec.rank` with `layout` reads from the engine whose ranks are `remote`.

    The plan writes every byte that the local rank holds exactly once. Raises PlanError with code
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
    return _Planner(spec, layout, remote_spec, remote).plan()


def plan_of(rank: Rank, reads: Iterable[GroupRead]) -> Plan:
    """Return some reads of `rank`, of which no two have equal ranks, groups and granules, as a plan."""
    built = tuple(
        sorted(reads, key=lambda read: (read.rank, read.local.group, read.remote.group, read.granule_tokens))
    )
    return Plan(rank, digest_of((rank, built)), built)


class _Planner:
    """Makes one plan for one rank: indexes the remote holders, and reuses assignments that layers share."""

    def __init__(
        self, spec: EngineSpec, layout: RankLayout, remote_spec: EngineSpec, remote: Mapping[Rank, RankLayout]
    ) -> None:
        self._spec = spec
        self._layout = layout
        self._engine = remote_spec.engine_id
        self._holders = _index_holders(remote)
        self._preferred = preferred_rank(spec.tp_rank, spec.tp_size, remote_spec.tp_size)
        self._num_ranges = 0
        self._assignments: dict[tuple[object, ...], tuple[list[Fragment], Gap | None]] = {}

    def plan(self) -> Plan:
        """Return the plan; raises PlanError (coverage-gap) for the first coordinate that no rank holds."""
        groups = {group.name: group for group in self._layout.groups}
        reads: dict[_GroupReadKey, dict[PatternKey, list[Extent]]] = {}
        sides: dict[_GroupReadKey, tuple[BlockGeometry, BlockGeometry]] = {}
        num_pieces = 0
        for tensor in self._layout.tensors:
            if tensor.num_units == 0 or tensor.content_bytes == 0:
                continue
            group = groups[tensor.group]
            fragments = self._fragments(tensor, group.token_shard)
            num_pieces += len(fragments)
            if num_pieces > MAX_EXTENTS:
                raise self._too_many_extents(tensor)
            for fragment, theirs in fragments:
                key = (fragment.rank, tensor.group, theirs.tensor.group, tensor.granule_tokens)
                if key not in sides:
                    sides[key] = (block_geometry(group), block_geometry(theirs.group))
                _add_extent(reads.setdefault(key, {}), tensor, theirs.tensor, fragment)
        return plan_of(
            self._spec.rank,
            [GroupRead(key[0], *sides[key], key[3], sorted_patterns(reads[key])) for key in reads],
        )

    def _fragments(self, tensor: CacheTensor, shard: TokenShard) -> list[tuple[Fragment, _HeldTensor]]:
        """Return the remote tensors that a local tensor's units are read from; raises PlanError for a gap."""
        holders = self._holders.get((tensor.layer, tensor.component), {})
        if not holders:
            raise self._component_missing(tensor)
        # Eighty layers share a handful of distributions: each is assigned once.
        shares = tuple(RankShare(r, h.tensor.units, h.group.token_shard) for r, h in holders.items())
        key = (tensor.units, shard, shares)
        if key not in self._assignments:
            _check_one_sharding(tensor, shard, shares)
            self._num_ranges += len(tensor.units) + sum(len(share.units) for share in shares)
            if self._num_ranges > MAX_EXTENTS:
                raise self._too_many_extents(tensor)
            self._assignments[key] = assign_units(tensor.units, shard, shares, self._preferred)
        fragments, gap = self._assignments[key]
        if gap is not None:
            raise self._coverage_gap(tensor, gap, shares)
        return [(fragment, holders[fragment.rank]) for fragment in fragments]

    def _too_many_extents(self, tensor: CacheTensor) -> PlanError:
        """Return the error for units that are split more finely than any engine splits them."""
        return PlanError(
            f"cannot read engine {self._engine!r}: up to layer {tensor.layer}'s component "
            f"{tensor.component!r} the units of both are in over {MAX_EXTENTS} pieces",
            Code.LAYOUT_INCOMPATIBLE,
        )

    def _component_missing(self, tensor: CacheTensor) -> PlanError:
        """Return the error for a layer, or a component of a layer, that no source rank has."""
        others = sorted(component for layer, component in self._holders if layer == tensor.layer)
        if not others:
            what = f"layer {tensor.layer} is held by no rank of engine {self._engine!r}"
        else:
            what = (
                f"component {tensor.component!r} of layer {tensor.layer} is held by no rank of engine "
                f"{self._engine!r}, which holds {', '.join(map(repr, others))} there"
            )
        return PlanError(f"cannot cover the cache: {what}", Code.COVERAGE_GAP)

    def _coverage_gap(self, tensor: CacheTensor, gap: Gap, shares: tuple[RankShare, ...]) -> PlanError:
        """Return the error for units, or tokens of units, that no source rank holds."""
        units = (
            f"unit {gap.first_unit}"
            if gap.end_unit == gap.first_unit + 1
            else f"unit range [{gap.first_unit}, {gap.end_unit})"
        )
        tokens = "" if gap.shard is None else f", {_format_shard_tokens(gap.shard)},"
        held = sorted({(units.start, units.stop) for h in shares for units in h.units})
        return PlanError(
            f"cannot cover the cache: {units} of layer {tensor.layer}'s component {tensor.component!r}"
            f"{tokens} is held by no rank of engine {self._engine!r}, whose ranks hold units "
            + ", ".join(f"[{start}, {stop})" for start, stop in held),
            Code.COVERAGE_GAP,
        )


def _index_holders(remote: Mapping[Rank, RankLayout]) -> dict[ComponentKey, dict[Rank, _HeldTensor]]:
    """Return every remote holder, by layer and component."""
    index: dict[ComponentKey, dict[Rank, _HeldTensor]] = {}
    for rank in sorted(remote):
        groups = {group.name: group for group in remote[rank].groups}
        for tensor in remote[rank].tensors:
            if tensor.num_units:
                held = _HeldTensor(tensor, groups[tensor.group])
                index.setdefault((tensor.layer, tensor.component), {})[rank] = held
    return index


def _add_extent(
    patterns: dict[PatternKey, list[Extent]], local: CacheTensor, remote: CacheTensor, fragment: Fragment
) -> None:
    """Add a fragment to the extents with the same strides on both sides."""
    extent = Extent(
        local.layer,
        local.component,
        fragment.first_unit,
        local.offset + fragment.local_index * local.unit_stride,
        remote.offset + fragment.remote_index * remote.unit_stride,
    )
    patterns.setdefault((strides_of(local), strides_of(remote), fragment.num_units), []).append(extent)


def sorted_patterns(patterns: dict[PatternKey, list[Extent]]) -> tuple[StridePattern, ...]:
    """Return the patterns of a group read, and the extents of each, in memory order."""
    built = [
        StridePattern(
            local, remote, units, tuple(sorted(extents, key=lambda p: (p.local_offset, p.remote_offset)))
        )
        for (local, remote, units), extents in patterns.items()
    ]
    return tuple(sorted(built, key=lambda s: (s.local.region, s.remote.region, s.extents[0].local_offset)))


def _check_one_sharding(tensor: CacheTensor, shard: TokenShard, shares: tuple[RankShare, ...]) -> None:
    """Raise PlanError where ranks interleave a component's tokens differently, or with too long a period."""
    kinds = sorted({(h.shard.count, h.shard.interleave) for h in shares})
    period = max(common_period_steps(shard, h.shard) for h in shares)
    if len(kinds) > 1 or period > MAX_PERIOD_STEPS:
        mine = (shard.count, shard.interleave)
        raise PlanError(
            f"cannot read layer {tensor.layer}'s component {tensor.component!r}: token_shard (count, "
            f"interleave) is {mine} here and {', '.join(map(str, kinds))} at the source"
            + (", which repeat together too rarely" if period > MAX_PERIOD_STEPS else ", on different ranks"),
            Code.LAYOUT_INCOMPATIBLE,
        )


def _format_shard_tokens(shard: TokenShard) -> str:
    start = shard.index * shard.interleave
    return f"token range [{start}, {start + shard.interleave}) of every {shard.count * shard.interleave}"
