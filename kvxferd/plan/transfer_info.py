"""A remote engine's pipeline stages, as in-engine connectors describe them to each other."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

from kvxferd.errors import Code, PlanError
from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, GroupKind, RankLayout
from kvxferd.plan.plan import GroupRead, Plan


@dataclasses.dataclass(frozen=True)
class EngineTransferInfo:
    """One pipeline stage of a remote engine."""

    remote_tp_size: int
    remote_block_len: int  # bytes from one block to the next, of its first layer
    remote_block_size: int  # tokens per kernel block
    remote_physical_blocks_per_logical: int = 1
    remote_pp_rank: int = 0
    start_layer: int = 0
    end_layer: int = 0
    remote_dcp_size: int = 1  # ranks that share a request's tokens, of its first layer


@dataclasses.dataclass(frozen=True)
class MambaEngineTransferInfo(EngineTransferInfo):
    """One stage of a remote engine that keeps states, as one local rank reads it.

    Attention and states may come from different numbers of ranks: heads are replicated where there are
    more ranks than heads, states hardly ever.
    """

    remote_fa_source_ranks: tuple[int, ...] = ()  # tp_ranks read for attention
    remote_all_source_ranks: tuple[int, ...] = ()  # for attention or states
    remote_num_fa_reads: int = 0
    remote_num_mamba_reads: int = 0
    remote_fa_descriptor_bytes: int = 0  # of one descriptor of K (or V) in a block
    remote_physical_heads: int = 0  # that a remote rank holds
    needs_split_handles: bool = False  # a local block is filled from several ranks

    def should_skip_fa(self, remote_rank: int) -> bool:
        """Whether no attention is read from a rank."""
        return remote_rank not in self.remote_fa_source_ranks

    def fa_head_slot(self, remote_rank: int) -> int:
        """Return which part of a local attention block a rank's heads fill, counted in sources.

        A rank that is not read has the slot of the source before it, whose heads it may hold copies of.
        """
        return max(0, bisect.bisect_right(self.remote_fa_source_ranks, remote_rank) - 1)


def stage_infos(spec: EngineSpec, ranks: Mapping[Rank, RankLayout]) -> dict[int, EngineTransferInfo]:
    """Return every stage of an engine by pp_rank, each from the layout of its lowest rank."""
    return {
        pp_rank: stage_info(spec, pp_rank, layout) for pp_rank, layout in lowest_rank_layouts(ranks).items()
    }


def lowest_rank_layouts(ranks: Mapping[Rank, RankLayout]) -> dict[int, RankLayout]:
    """Return the layout of each stage's lowest rank, by pp_rank."""
    found: dict[int, RankLayout] = {}
    for rank in sorted(ranks):
        found.setdefault(rank.pp_rank, ranks[rank])
    return found


def stage_info(spec: EngineSpec, pp_rank: int, layout: RankLayout) -> EngineTransferInfo:
    """Return one stage from one rank's layout; block sizes are its first attention layer's, if any."""
    groups = {group.name: group for group in layout.groups}
    tensors = sorted(layout.tensors, key=lambda t: (groups[t.group].kind, t.layer, t.offset))
    first = tensors[0] if tensors else None
    group = groups[first.group] if first is not None else None
    per_logical = 1 if group is None else group.physical_blocks_per_logical
    return EngineTransferInfo(
        remote_tp_size=spec.tp_size,
        remote_block_len=0 if first is None else first.block_stride,
        remote_block_size=0 if group is None else group.block_tokens // per_logical,
        remote_physical_blocks_per_logical=per_logical,
        remote_pp_rank=pp_rank,
        start_layer=layout.start_layer,
        end_layer=layout.end_layer,
        remote_dcp_size=1 if group is None else group.token_shard.count,
    )


def require_reads_inside(plan: Plan, remote: EngineSpec, stages: Mapping[int, EngineTransferInfo]) -> None:
    """Raise PlanError (layers-missing) for a tensor that is read outside the layers of its stage."""
    for read in plan.group_reads:
        stage = stages[read.rank.pp_rank]
        for pattern in read.patterns:
            for extent in pattern.extents:
                if not stage.start_layer <= extent.layer < stage.end_layer:
                    raise PlanError(
                        f"cannot read engine {remote.key}: rank {read.rank} holds component "
                        f"{extent.component!r} of layer {extent.layer}, and its stage the layers "
                        f"[{stage.start_layer}, {stage.end_layer})",
                        Code.LAYERS_MISSING,
                    )


def read_info(
    info: EngineTransferInfo, plan: Plan, layout: RankLayout, *, is_mla: bool
) -> EngineTransferInfo:
    """Return a stage's facts as one rank reads it by `plan`; the same where it reads no states.

    `layout`: that of the stage's lowest rank.
    """
    attention: dict[int, list[GroupRead]] = {}
    states = set()
    for read in _group_reads_of(plan, info.remote_pp_rank):
        if read.local.kind is GroupKind.STATE:
            states.add(read.rank.tp_rank)
        else:
            attention.setdefault(read.rank.tp_rank, []).append(read)
    if not states:
        return info
    descriptor_bytes = physical_heads = 0
    if attention:
        descriptor_bytes, first = _first_descriptor(attention[min(attention)], info.remote_block_size)
        physical_heads = sum(t.num_units for t in layout.tensors if (t.layer, t.component) == first)
    sources = states.union(attention)
    return MambaEngineTransferInfo(
        **dataclasses.asdict(info),
        remote_fa_source_ranks=tuple(sorted(attention)),
        remote_all_source_ranks=tuple(sorted(sources)),
        remote_num_fa_reads=len(attention),
        remote_num_mamba_reads=len(states),
        remote_fa_descriptor_bytes=descriptor_bytes,
        remote_physical_heads=physical_heads,
        needs_split_handles=len(sources) > 1 and not is_mla,
    )


def num_latent_heads(layout: RankLayout) -> int:
    """Return how many KV heads in-engine connectors count where there are none: one for latents, or 0."""
    return int(any(group.kind is GroupKind.ATTENTION for group in layout.groups))


def _group_reads_of(plan: Plan, pp_rank: int) -> Sequence[GroupRead]:
    """Return the group reads of one stage; a plan has them in order of rank."""
    start, end = (
        bisect.bisect_left(plan.group_reads, stage, key=lambda read: read.rank.pp_rank)
        for stage in (pp_rank, pp_rank + 1)
    )
    return plan.group_reads[start:end]


def _first_descriptor(reads: Sequence[GroupRead], remote_block_size: int) -> tuple[int, tuple[int, str]]:
    """Return the bytes that one descriptor has of the first tensor read, and its (layer, component).

    They are the heads of one read, of the smaller block: for dense blocks of equal tokens what in-engine
    connectors compute from block lengths. Pages that are padded, or hold all layers, and blocks of other
    sizes have no bytes that could be compared.
    """
    read, pattern, first = min(
        (
            (read, pattern, extent)
            for read in reads
            for pattern in read.patterns
            for extent in pattern.extents
        ),
        key=lambda found: (found[2].layer, found[2].local_offset),
    )
    heads = sum(
        alike.num_units
        for alike in read.patterns
        for extent in alike.extents
        if (extent.layer, extent.component) == (first.layer, first.component)
    )
    tokens = min(read.local.block_tokens, remote_block_size or read.local.block_tokens)
    content_bytes = pattern.local.num_chunks * pattern.local.chunk_bytes
    return heads * (tokens // read.granule_tokens) * content_bytes, (first.layer, first.component)
