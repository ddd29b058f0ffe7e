"""Hybrids of attention and states as in-engine connectors describe them: which ranks are read for what.

Attention and states may come from different numbers of ranks: heads are replicated where there are
more ranks than heads, states hardly ever. Everything is derived from what is read, stage by stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvxferd.errors import Code, PlanError
from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, Group, RankLayout
from kvxferd.layout.tensors import num_units
from kvxferd.plan.info import EngineTransferInfo
from kvxferd.plan.plan import Plan
from kvxferd.plan.stage_reads import AttentionRead, StageReads, assigned_reads, planned_reads

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
    (layout-incompatible) where their parts do not add up to it. That holds for blocks of equal tokens,
    without padding, of which every rank holds as many heads; other layouts are read too, and their plan
    proves by coordinate that nothing is missing.
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
    """What one local rank reads of one stage of a remote engine: a view, for stages with states."""

    def __init__(
        self, spec: EngineSpec, layout: RankLayout, plan: Plan, stage: Mapping[Rank, RankLayout]
    ) -> None:
        """Take the rank, its plan for the engine, and the layouts of one stage of that engine."""
        self._set(spec, layout, planned_reads(layout, plan, stage))

    @classmethod
    def by_facts(cls, spec: EngineSpec, layout: RankLayout, info: EngineTransferInfo) -> HybridReads:
        """Return the reads of a stage of which only `info` is known."""
        made = cls.__new__(cls)
        made._set(spec, layout, assigned_reads(spec, layout, info))
        return made

    def _set(self, spec: EngineSpec, layout: RankLayout, reads: StageReads) -> None:
        self._spec = spec
        self._groups = {group.name: group for group in layout.groups}
        self._reads = reads

    @property
    def num_parts(self) -> int:
        """Return the number of ranks, of their ranges of units, and of the fragments read of them."""
        ranks = range(self._reads.num_ranks)
        return (
            len(ranks)
            + sum(len(self._reads.units_of(rank)) for rank in ranks)
            + sum(len(read.fragments) for read in self._reads.attention.values())
        )

    @property
    def fa_source_ranks(self) -> tuple[int, ...]:
        """Return the tp_ranks read for attention."""
        return tuple(self._reads.attention)

    @property
    def state_source_ranks(self) -> tuple[int, ...]:
        """Return the tp_ranks read for states."""
        return self._reads.states

    @property
    def all_source_ranks(self) -> tuple[int, ...]:
        """Return the tp_ranks read for attention or states."""
        return tuple(self._reads.sources)

    def info(self, base: EngineTransferInfo) -> MambaEngineTransferInfo:
        """Return the stage's facts, extended by what this rank reads of it."""
        return MambaEngineTransferInfo(
            **{field.name: getattr(base, field.name) for field in dataclasses.fields(EngineTransferInfo)},
            remote_fa_source_ranks=self.fa_source_ranks,
            remote_all_source_ranks=self.all_source_ranks,
            remote_num_fa_reads=len(self.fa_source_ranks),
            remote_num_mamba_reads=len(self.state_source_ranks),
            remote_fa_descriptor_bytes=self._descriptor_bytes(base.remote_block_size),
            is_remote_replicated=0 < self._spec.num_kv_heads < base.remote_tp_size,
            remote_physical_heads=num_units(self._reads.units_of(0)),
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
        held = self._reads.units_of(remote_rank)
        for slot, read in enumerate(self._reads.attention.values()):
            for fragment in read.fragments:
                end = fragment.first_unit + fragment.num_units
                if any(units.start < end and fragment.first_unit < units.stop for units in held):
                    return slot
        return 0

    def fa_rank_offset(self, remote_kv_block_len: int) -> int:
        """Return where this rank's heads begin in a remote block's K, in bytes.

        `remote_kv_block_len` is the number of bytes read of it. Returns 0 where the remote is wider,
        or there are no heads to choose from.
        """
        if self._is_mla or not self._reads.attention or self._reads.num_ranks > self._spec.tp_size:
            return 0
        fragment = self._first_read.fragments[0]
        return fragment.remote_index * remote_kv_block_len // fragment.num_units

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

    @property
    def _first_read(self) -> AttentionRead:
        return self._reads.attention[self.fa_source_ranks[0]]

    def _descriptor_bytes(self, remote_block_size: int) -> int:
        """Return the bytes of K (or V) that one descriptor has: the heads of one read, of the smaller block.

        That is `attention_descriptor_bytes` of dense blocks of equal tokens. Pages that are padded, or hold
        all layers, and blocks of other sizes have no bytes that could be compared.
        """
        if not self._reads.attention:
            return 0
        read = self._first_read
        tokens = _kernel_block_tokens(self._groups[read.tensor.group])
        tokens = min(tokens, remote_block_size or tokens)
        heads = sum(fragment.num_units for fragment in read.fragments)
        return heads * (tokens // read.tensor.granule_tokens) * read.tensor.content_bytes

    def _heads_of(self, rank: int) -> tuple[int, int, int]:
        """Return the position and number of the local heads read from a rank, and how many there are."""
        read = self._reads.attention[rank]
        fragment = read.fragments[0]
        return fragment.local_index, fragment.num_units, read.tensor.num_units


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


def _kernel_block_tokens(group: Group) -> int:
    return group.block_tokens // group.physical_blocks_per_logical
