"""A remote engine's pipeline stages, as in-engine connectors describe them to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, RankLayout


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


def stage_infos(spec: EngineSpec, ranks: Mapping[Rank, RankLayout]) -> dict[int, EngineTransferInfo]:
    """Return every stage of an engine by pp_rank, each from the layout of its lowest rank."""
    infos: dict[int, EngineTransferInfo] = {}
    for rank in sorted(ranks):
        if rank.pp_rank not in infos:
            infos[rank.pp_rank] = stage_info(spec, rank.pp_rank, ranks[rank])
    return infos


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
    )
