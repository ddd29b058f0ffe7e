"""One local rank's identity and layout, and the ratios of in-engine connectors, which planning never uses."""

from __future__ import annotations

from collections.abc import Mapping

from kvxferd.ids import EngineId, RegionId
from kvxferd.layout import EngineSpec, GroupKind, RankLayout
from kvxferd.plan.info import stage_info
from kvxferd.plan.regions import TransferRegion, cache_properties, get_transfer_cache_regions


class LocalRank:
    """What a rank's spec and layout say of it."""

    def __init__(self, spec: EngineSpec, layout: RankLayout) -> None:
        self.spec = spec
        self.layout = layout
        self._groups = {group.name: group for group in layout.groups}
        self._attention = [t for t in layout.tensors if self._groups[t.group].kind is GroupKind.ATTENTION]

    @property
    def engine_id(self) -> EngineId:
        """Return the id of this rank's engine."""
        return self.spec.engine_id

    @property
    def tp_rank(self) -> int:
        """Return this rank's position in tensor parallelism."""
        return self.spec.tp_rank

    @property
    def tp_size(self) -> int:
        """Return the number of tensor-parallel ranks of this rank's engine."""
        return self.spec.tp_size

    @property
    def pp_rank(self) -> int:
        """Return this rank's pipeline stage."""
        return self.spec.pp_rank

    @property
    def pp_size(self) -> int:
        """Return the number of pipeline stages of this rank's engine."""
        return self.spec.pp_size

    @property
    def total_num_kv_heads(self) -> int:
        """Return the number of KV heads of the whole model; 0 where there are none."""
        return self.spec.num_kv_heads

    @property
    def is_mamba(self) -> bool:
        """Whether this rank's engine keeps states (Mamba, GDN), alone or beside attention.

        Every stage of an engine has every group, also one that holds no layer of it.
        """
        return any(group.kind is GroupKind.STATE for group in self.layout.groups)

    @property
    def is_mla(self) -> bool:
        """Whether the attention cache has no heads to divide."""
        return self.spec.num_kv_heads == 0 and any(
            group.kind is GroupKind.ATTENTION for group in self.layout.groups
        )

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
        """Return every tensor of attention and of states as a region, given the exported ones' addresses."""
        return get_transfer_cache_regions(self.layout, bases)

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
