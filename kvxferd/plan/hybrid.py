"""Hybrids of attention and states as in-engine connectors describe them: which ranks are read for what.

Attention and states may come from different numbers of ranks: heads are replicated where there are
more ranks than heads, states hardly ever. Everything is derived from a plan, stage by stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvxferd.errors import Code, PlanError
from kvxferd.ids import Rank
from kvxferd.layout import CacheTensor, EngineSpec, GroupKind, RankLayout, UnitRange
from kvxferd.plan.info import EngineTransferInfo
from kvxferd.plan.plan import Extent, Plan, StridePattern
from kvxferd.plan.regions import cache_properties

Ids = TypeVar("Ids")
Descriptor = tuple[int, int]  # address, length in bytes


@dataclasses.dataclass(frozen=True)
class MambaEngineTransferInfo(EngineTransferInfo):
    """One stage of a remote engine that keeps states, as one local rank reads it."""

    remote_fa_source_ranks: tuple[int, ...] = ()  # tp_ranks read for attention
    remote_all_source_ranks: tuple[int, ...] = ()  # for attention or states
    remote_num_fa_reads: int = 0
    remote_num_mamba_reads: int = 0
    remote_fa_descriptor_bytes: int = 0  # of one descriptor of K (or V) in a block
    is_remote_replicated: bool = False  # strictly more remote ranks than KV heads
    remote_physical_heads: int = 0  # that a remote rank holds


def attention_descriptor_bytes(
    local_block_len: int, remote_block_len: int, *, is_blocks_first: bool, num_reads: int = 1
) -> int:
    """Return the bytes of one attention descriptor: the smaller side's block, or its K half.

    `num_reads` ranks of a wider remote together fill one local block. Raises PlanError
    (layout-incompatible) where their parts do not add up to it.
    """
    parts = 2 if is_blocks_first else 1
    mine, theirs = local_block_len // parts, remote_block_len // parts
    if num_reads > 1 and (mine % num_reads or mine // num_reads != theirs):
        raise PlanError(
            f"cannot fill {mine} bytes of a local block by {num_reads} reads: each brings {theirs} bytes, "
            f"and {mine // num_reads} are needed",
            Code.LAYOUT_INCOMPATIBLE,
        )
    return min(mine, theirs)


class HybridReads:
    """A view of one local rank's plan: what it reads of one stage of a remote engine with states."""

    def __init__(
        self, spec: EngineSpec, layout: RankLayout, plan: Plan, stage: Mapping[Rank, RankLayout]
    ) -> None:
        """Take the rank, its plan for the engine, and the layouts of one stage of that engine."""
        self._spec = spec
        self._layout = layout
        self._remote = {rank.tp_rank: held for rank, held in stage.items()}
        self._extents: dict[GroupKind, dict[int, list[tuple[StridePattern, Extent]]]] = {
            kind: {} for kind in GroupKind
        }
        for read in plan.group_reads:
            if read.rank in stage:
                extents = self._extents[read.local.kind].setdefault(read.rank.tp_rank, [])
                extents.extend((pattern, extent) for pattern in read.patterns for extent in pattern.extents)

    @property
    def fa_source_ranks(self) -> tuple[int, ...]:
        """Return the tp_ranks read for attention."""
        return tuple(sorted(self._extents[GroupKind.ATTENTION]))

    @property
    def state_source_ranks(self) -> tuple[int, ...]:
        """Return the tp_ranks read for states."""
        return tuple(sorted(self._extents[GroupKind.STATE]))

    @property
    def all_source_ranks(self) -> tuple[int, ...]:
        """Return the tp_ranks read for attention or states."""
        return tuple(sorted({*self.fa_source_ranks, *self.state_source_ranks}))

    def info(self, base: EngineTransferInfo) -> MambaEngineTransferInfo:
        """Return the stage's facts, extended by what this rank reads of it."""
        mine = _first_attention(self._layout)
        theirs = _first_attention(self._remote[min(self._remote)])
        descriptor_bytes = 0
        if mine is not None and theirs is not None:
            descriptor_bytes = attention_descriptor_bytes(
                mine.block_stride,
                theirs.block_stride,
                is_blocks_first=cache_properties(self._layout).is_kv_layout_blocks_first,
            )
        return MambaEngineTransferInfo(
            **dataclasses.asdict(base),
            remote_fa_source_ranks=self.fa_source_ranks,
            remote_all_source_ranks=self.all_source_ranks,
            remote_num_fa_reads=len(self.fa_source_ranks),
            remote_num_mamba_reads=len(self.state_source_ranks),
            remote_fa_descriptor_bytes=descriptor_bytes,
            is_remote_replicated=0 < self._spec.num_kv_heads < base.remote_tp_size,
            remote_physical_heads=0 if theirs is None else theirs.num_units,
        )

    def should_skip_fa(self, remote_rank: int) -> bool:
        """Whether no attention is read from a rank."""
        return remote_rank not in self.fa_source_ranks

    def fa_head_slot(self, remote_rank: int) -> int:
        """Return which part of a local attention block a rank's heads fill, counted in sources.

        A rank that is not read has the slot of the source that holds the same heads; 0 if none does.
        """
        sources = self.fa_source_ranks
        if remote_rank in sources:
            return sources.index(remote_rank)
        tensor = _first_attention(self._remote[remote_rank])
        held = () if tensor is None else tensor.units
        for slot, source in enumerate(sources):
            for pattern, extent in self._extents[GroupKind.ATTENTION][source]:
                read = UnitRange(extent.first_unit, extent.first_unit + pattern.num_units)
                if any(u.start < read.stop and read.start < u.stop for u in held):
                    return slot
        return 0

    def fa_rank_offset(self, remote_kv_block_len: int) -> int:
        """Return where this rank's heads begin in a remote block's K, in bytes.

        `remote_kv_block_len` is the number of bytes read of it. Returns 0 where the remote is wider,
        or there are no heads to choose from.
        """
        if self._is_mla or not self.fa_source_ranks or len(self._remote) > self._spec.tp_size:
            return 0
        source = self.fa_source_ranks[0]
        pattern, extent = self._extents[GroupKind.ATTENTION][source][0]
        return _extent_position(self._remote[source], extent) * remote_kv_block_len // pattern.num_units

    def needs_split_handles(self) -> bool:
        """Whether a local block is filled from several ranks."""
        return len(self.all_source_ranks) > 1 and not self._is_mla

    def compute_split_handle_data(
        self, attention: Sequence[Descriptor], states: Sequence[Descriptor]
    ) -> dict[int, list[Descriptor]]:
        """Return each source rank's part of this rank's descriptors, attention before states.

        Attention is divided by heads among the ranks read for it, states evenly among those read
        for them. Raises PlanError where a length does not divide.
        """
        split: dict[int, list[Descriptor]] = {}
        for rank in self.all_source_ranks:
            split[rank] = []
            if not self.should_skip_fa(rank):
                at, size, total = self._heads_of(rank)
                split[rank] += [_slice_descriptor(one, at, size, total) for one in attention]
            if rank in self.state_source_ranks:
                at, total = self.state_source_ranks.index(rank), len(self.state_source_ranks)
                split[rank] += [_slice_descriptor(one, at, 1, total) for one in states]
        return split

    def filter_block_ids_for_rank(
        self, remote_rank: int, local: Sequence[Ids], remote: Sequence[Ids], is_state_group: Sequence[bool]
    ) -> tuple[list[Ids | list[int]], list[Ids | list[int]]]:
        """Return both sides' ids by group; attention's are empty for a rank not read for attention."""
        if not self.should_skip_fa(remote_rank):
            return list(local), list(remote)
        return _states_only(local, is_state_group), _states_only(remote, is_state_group)

    @property
    def _is_mla(self) -> bool:
        return self._spec.num_kv_heads == 0

    def _heads_of(self, rank: int) -> tuple[int, int, int]:
        """Return the position and number of the local heads read from a rank, and how many there are."""
        pattern, extent = self._extents[GroupKind.ATTENTION][rank][0]
        tensor = _tensor(self._layout, extent)
        return _unit_position(tensor, extent.first_unit), pattern.num_units, tensor.num_units


def _states_only(ids: Sequence[Ids], is_state_group: Sequence[bool]) -> list[Ids | list[int]]:
    return [group if is_state else [] for group, is_state in zip(ids, is_state_group, strict=True)]


def _slice_descriptor(one: Descriptor, at: int, size: int, total: int) -> Descriptor:
    """Return `size` of `total` equal parts of a descriptor, beginning at part `at`."""
    address, length = one
    if length % total:
        raise PlanError(
            f"cannot divide a descriptor of {length} bytes into {total} equal parts", Code.LAYOUT_INCOMPATIBLE
        )
    return address + at * length // total, size * length // total


def _first_attention(layout: RankLayout) -> CacheTensor | None:
    kinds = {group.name: group.kind for group in layout.groups}
    held = [t for t in layout.tensors if kinds[t.group] is GroupKind.ATTENTION and t.num_units]
    return min(held, key=lambda t: (t.layer, t.offset), default=None)


def _tensor(layout: RankLayout, extent: Extent) -> CacheTensor:
    key = (extent.layer, extent.component)
    return next(tensor for tensor in layout.tensors if (tensor.layer, tensor.component) == key)


def _extent_position(layout: RankLayout, extent: Extent) -> int:
    """Return the position of an extent's first unit among the units that a rank holds."""
    return _unit_position(_tensor(layout, extent), extent.first_unit)


def _unit_position(tensor: CacheTensor, unit: int) -> int:
    before = 0
    for held in tensor.units:
        if held.start <= unit < held.stop:
            return before + unit - held.start
        before += held.stop - held.start
    raise AssertionError(f"unit {unit} is not held")  # a plan names only units that are
