"""The names of in-engine connectors for who reads whom: views of a plan, not a second planner.

The ratios are arithmetic that planning never uses. What is read comes from a plan; for an engine of
which only `EngineTransferInfo` is known, it comes from the planner's choice among the ranks that such
an engine has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvxferd.errors import Code, EngineError
from kvxferd.ids import EngineId, Generation, Rank, RegionId
from kvxferd.layout import EngineSpec, GroupKind, RankLayout, TokenShard, UnitRange
from kvxferd.layout.presets import shard_units
from kvxferd.plan.assignment import RankShare, assign_units, preferred_rank
from kvxferd.plan.hybrid import Descriptor, HybridReads, Ids, MambaEngineTransferInfo
from kvxferd.plan.info import EngineTransferInfo, stage_info, stage_infos
from kvxferd.plan.plan import Plan
from kvxferd.plan.planner import make_plan
from kvxferd.plan.regions import TransferRegion, cache_properties, get_transfer_cache_regions

UNKNOWN_GENERATION = Generation("")  # of facts built by hand


class _PlannedEngine(NamedTuple):
    """An engine whose layouts are known, with the plan that reads it."""

    plan: Plan
    stages: dict[int, HybridReads]  # those that keep states, by pp_rank


class TransferTopology:
    """One local rank's identity and layout, and every remote engine registered with it."""

    def __init__(self, spec: EngineSpec, layout: RankLayout) -> None:
        self.spec = spec
        self.layout = layout
        self._groups = {group.name: group for group in layout.groups}
        self._attention = [t for t in layout.tensors if self._groups[t.group].kind is GroupKind.ATTENTION]
        self._infos: dict[tuple[EngineId, int], EngineTransferInfo] = {}
        self._stages: dict[EngineId, list[int]] = {}  # of which there is an info
        self._generations: dict[EngineId, Generation] = {}
        self._reads: dict[EngineId, _PlannedEngine] = {}

    # --- this rank

    @property
    def is_mla(self) -> bool:
        """Whether the attention cache has no heads to divide."""
        return bool(self._attention) and self.spec.num_kv_heads == 0

    @property
    def block_size(self) -> int:
        """Return the tokens per kernel block of the first attention layer; 0 without attention."""
        return stage_info(self.spec, self.spec.pp_rank, self.layout).remote_block_size

    @property
    def local_physical_heads(self) -> int:
        """Return the number of KV heads that this rank holds."""
        return self._attention[0].num_units if self._attention else 0

    @property
    def local_replicates_kv_cache(self) -> bool:
        """Whether another rank of this engine holds a copy of this one's attention cache."""
        return self.is_mla or 0 < self.spec.num_kv_heads < self.spec.tp_size

    @property
    def is_kv_layout_blocks_first(self) -> bool:
        """Whether K and V of a block lie in one page."""
        return cache_properties(self.layout).is_kv_layout_blocks_first

    @property
    def cross_layers_blocks(self) -> bool:
        """Whether all layers of a block lie in one page."""
        return cache_properties(self.layout).cross_layers_blocks

    @property
    def split_k_and_v(self) -> bool:
        """Whether K and V are registered as two regions."""
        return cache_properties(self.layout).split_k_and_v

    def get_transfer_cache_regions(self, bases: Mapping[RegionId, int]) -> list[TransferRegion]:
        """Return every attention tensor as a region, given the addresses of the exported ones."""
        return get_transfer_cache_regions(self.layout, bases)

    # --- remote engines

    def register_remote_engine(
        self, engine_id: EngineId, info: EngineTransferInfo, generation: Generation = UNKNOWN_GENERATION
    ) -> EngineTransferInfo:
        """Keep one stage's facts and return them; equal facts are kept once.

        A new generation replaces everything known of the old one. Raises EngineError with code
        shape-mismatch, listing each differing field with both values, for other facts under one
        generation, and not-allowed for this rank's own engine.
        """
        if engine_id == self.spec.engine_id:
            raise EngineError(
                f"cannot register engine {engine_id!r} as remote: it is this rank's own", Code.NOT_ALLOWED
            )
        if self._generations.get(engine_id, generation) != generation:
            self.unregister_remote_engine(engine_id)
        known = self._infos.get((engine_id, info.remote_pp_rank))
        if known is not None:
            _require_same_facts(engine_id, known, info)
            return known
        self._generations[engine_id] = generation
        self._infos[engine_id, info.remote_pp_rank] = info
        self._stages.setdefault(engine_id, []).append(info.remote_pp_rank)
        return info

    def register_remote_ranks(
        self, remote_spec: EngineSpec, ranks: Mapping[Rank, RankLayout], plan: Plan | None = None
    ) -> Plan:
        """Keep every stage of an engine whose layouts are known, with the plan that reads it.

        The plan is made here unless given. Raises what `register_remote_engine` and `make_plan` raise.
        """
        made = make_plan(self.spec, self.layout, remote_spec, ranks) if plan is None else plan
        stages = {}
        for pp_rank, info in stage_infos(remote_spec, ranks).items():
            own = {rank: layout for rank, layout in ranks.items() if rank.pp_rank == pp_rank}
            if any(_has_states(layout) for layout in own.values()):
                stages[pp_rank] = HybridReads(self.spec, self.layout, made, own)
            facts = stages[pp_rank].info(info) if pp_rank in stages else info
            self.register_remote_engine(remote_spec.engine_id, facts, remote_spec.generation)
        self._reads[remote_spec.engine_id] = _PlannedEngine(made, stages)
        return made

    def unregister_remote_engine(self, engine_id: EngineId) -> None:
        """Forget an engine with all its stages."""
        self._generations.pop(engine_id, None)
        self._reads.pop(engine_id, None)
        for pp_rank in self._stages.pop(engine_id, ()):
            del self._infos[engine_id, pp_rank]

    def get_engine_info(self, engine_id: EngineId, remote_pp_rank: int = 0) -> EngineTransferInfo:
        """Return one stage's facts; raises EngineError (engine-unknown)."""
        info = self._infos.get((engine_id, remote_pp_rank))
        if info is None:
            raise EngineError(
                f"cannot tell of engine {engine_id!r}, stage {remote_pp_rank}: it is not registered",
                Code.ENGINE_UNKNOWN,
            )
        return info

    # --- arithmetic that planning never uses

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Return local over remote TP, or minus remote over local where the remote is wider.

        Raises ValueError naming both sizes where neither divides the other.
        """
        mine = self.spec.tp_size
        if remote_tp_size > 0 and mine % remote_tp_size == 0:
            return mine // remote_tp_size
        if remote_tp_size > 0 and remote_tp_size % mine == 0:
            return -(remote_tp_size // mine)
        raise ValueError(f"cannot give a ratio: local TP {mine} and remote TP {remote_tp_size} do not divide")

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Return local over remote tokens per block; raises ValueError naming both if that is not whole."""
        mine = self.block_size
        if remote_block_size < 1 or mine % remote_block_size:
            raise ValueError(
                f"cannot give a ratio: the local block size {mine} is no multiple of the remote's "
                f"{remote_block_size}"
            )
        return mine // remote_block_size

    def handshake_target_ranks(self, remote_tp_size: int) -> list[int]:
        """Return the remote ranks whose share of the heads meets this rank's, replicas included."""
        mine, rank = self.spec.tp_size, self.spec.tp_rank
        first, end = rank * remote_tp_size // mine, -(-(rank + 1) * remote_tp_size // mine)
        return list(range(first, end))

    # --- what is read

    def is_kv_replicated(self, engine_id: EngineId, remote_pp_rank: int = 0) -> bool:
        """Whether the remote engine has strictly more ranks than there are KV heads."""
        info = self.get_engine_info(engine_id, remote_pp_rank)
        return 0 < self.spec.num_kv_heads < info.remote_tp_size

    def replicates_kv_cache(self, engine_id: EngineId, remote_pp_rank: int = 0) -> bool:
        """Whether remote ranks hold copies of each other's attention cache."""
        return self.is_kv_replicated(engine_id, remote_pp_rank) or self.is_mla

    def target_remote_ranks(self, engine_id: EngineId, remote_pp_rank: int = 0) -> list[int]:
        """Return the tp_ranks of a remote stage that this rank reads, ascending."""
        info = self.get_engine_info(engine_id, remote_pp_rank)
        known = self._reads.get(engine_id)
        if known is not None:
            return sorted({rank.tp_rank for rank in known.plan.sources if rank.pp_rank == remote_pp_rank})
        heads, wide = self.spec.num_kv_heads, info.remote_tp_size
        whole = (UnitRange(0, 1),)  # without heads every rank holds everything
        held = self._attention[0].units if heads and self._attention else whole
        shares = tuple(
            RankShare(Rank(remote_pp_rank, tp), shard_units(heads, wide, tp) or whole, TokenShard())
            for tp in range(wide)
        )
        preferred = preferred_rank(self.spec.tp_rank, self.spec.tp_size, wide)
        fragments, _ = assign_units(held, TokenShard(), shares, preferred)
        return sorted({fragment.rank.tp_rank for fragment in fragments})

    def hybrid(self, engine_id: EngineId, remote_pp_rank: int = 0) -> HybridReads:
        """Return what is read of a stage that keeps states.

        Raises EngineError (layout-incompatible) for a stage without any, or one known by hand only.
        """
        self.get_engine_info(engine_id, remote_pp_rank)
        known = self._reads.get(engine_id)
        if known is None or remote_pp_rank not in known.stages:
            raise EngineError(
                f"cannot tell attention from states of engine {engine_id!r}, stage {remote_pp_rank}: it has "
                "no state layers",
                Code.LAYOUT_INCOMPATIBLE,
            )
        return known.stages[remote_pp_rank]

    def should_skip_fa(self, engine_id: EngineId, remote_rank: int, remote_pp_rank: int = 0) -> bool:
        """See `HybridReads.should_skip_fa`; this and the next five raise what `hybrid` raises."""
        return self.hybrid(engine_id, remote_pp_rank).should_skip_fa(remote_rank)

    def fa_head_slot(self, engine_id: EngineId, remote_rank: int, remote_pp_rank: int = 0) -> int:
        """See `HybridReads.fa_head_slot`."""
        return self.hybrid(engine_id, remote_pp_rank).fa_head_slot(remote_rank)

    def fa_rank_offset(self, engine_id: EngineId, remote_kv_block_len: int, remote_pp_rank: int = 0) -> int:
        """See `HybridReads.fa_rank_offset`."""
        return self.hybrid(engine_id, remote_pp_rank).fa_rank_offset(remote_kv_block_len)

    def needs_split_handles(self, engine_id: EngineId, remote_pp_rank: int = 0) -> bool:
        """See `HybridReads.needs_split_handles`."""
        return self.hybrid(engine_id, remote_pp_rank).needs_split_handles()

    def compute_split_handle_data(
        self,
        engine_id: EngineId,
        attention: Sequence[Descriptor],
        states: Sequence[Descriptor],
        remote_pp_rank: int = 0,
    ) -> dict[int, list[Descriptor]]:
        """See `HybridReads.compute_split_handle_data`."""
        return self.hybrid(engine_id, remote_pp_rank).compute_split_handle_data(attention, states)

    def filter_block_ids_for_rank(
        self,
        engine_id: EngineId,
        remote_rank: int,
        *,
        local: Sequence[Ids],
        remote: Sequence[Ids],
        is_state_group: Sequence[bool],
        remote_pp_rank: int = 0,
    ) -> tuple[list[Ids | list[int]], list[Ids | list[int]]]:
        """See `HybridReads.filter_block_ids_for_rank`."""
        reads = self.hybrid(engine_id, remote_pp_rank)
        return reads.filter_block_ids_for_rank(remote_rank, local, remote, is_state_group)

    def describe(self, engine_id: EngineId, remote_pp_rank: int = 0) -> str:
        """Return one line for the log: sizes, ranks, and what is read."""
        info = self.get_engine_info(engine_id, remote_pp_rank)
        try:
            ratio = str(self.tp_ratio(info.remote_tp_size))
        except ValueError:
            ratio = f"{self.spec.tp_size}:{info.remote_tp_size}"
        text = (
            f"TransferTopology(engine={engine_id}, tp_ratio={ratio}, num_kv_heads={self.spec.num_kv_heads}, "
            f"local_tp={self.spec.tp_size}, remote_tp={info.remote_tp_size}, local_rank={self.spec.rank}, "
            f"remote_pp={remote_pp_rank}, layers=[{info.start_layer}, {info.end_layer}), "
            f"reads={self.target_remote_ranks(engine_id, remote_pp_rank)}, "
            f"remote_block_len={info.remote_block_len}, remote_block_size={info.remote_block_size}"
        )
        if isinstance(info, MambaEngineTransferInfo):
            text += (
                f", fa_reads={info.remote_num_fa_reads}, mamba_reads={info.remote_num_mamba_reads}, "
                f"fa_sources={list(info.remote_fa_source_ranks)}, "
                f"all_sources={list(info.remote_all_source_ranks)}, "
                f"fa_descriptor_bytes={info.remote_fa_descriptor_bytes}"
            )
        return text + ")"


def _has_states(layout: RankLayout) -> bool:
    kinds = {group.name: group.kind for group in layout.groups}
    return any(kinds[tensor.group] is GroupKind.STATE for tensor in layout.tensors)


def _require_same_facts(engine_id: EngineId, known: EngineTransferInfo, new: EngineTransferInfo) -> None:
    """Refuse other facts about a stage than those kept, field by field."""
    differing = [
        f"{field.name} was {getattr(known, field.name)} and is {getattr(new, field.name, None)}"
        for field in dataclasses.fields(known)
        if getattr(known, field.name) != getattr(new, field.name, None)
    ]
    if type(known) is not type(new):
        differing.append(f"the facts were {type(known).__name__} and are {type(new).__name__}")
    if differing:
        raise EngineError(
            f"cannot register other facts for engine {engine_id!r}, stage {known.remote_pp_rank}, under one "
            f"generation: {'; '.join(differing)}",
            Code.SHAPE_MISMATCH,
        )
