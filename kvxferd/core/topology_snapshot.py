"""What this daemon knows of remote engines, in the words of in-engine connectors, as plain structs."""

from __future__ import annotations

from typing import Any

import msgspec

from kvxferd.ids import Endpoint, EngineId, Generation, Rank, RegionId
from kvxferd.layout import GroupKind, UnitRange


class RegionSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer region of the local rank: a cache tensor. Addresses are not shown."""

    layer: int
    component: str
    kind: GroupKind
    region: RegionId  # the exported memory that it lies in
    offset: int  # bytes from the beginning of that memory to this region's part of block 0
    block_len: int  # bytes from one block to the next
    kv_block_len: int  # bytes of a block that are this region's


class SplitPartSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What one remote rank fills of a block in regions that differ in their layer alone.

    A run of `length` bytes begins at `offset`. For each place in `counts` there are that many, as many bytes
    apart as `strides` has at that place. Where both are empty there is one run.
    """

    kind: GroupKind
    component: str
    layers: tuple[int, ...]
    units: UnitRange  # global
    offset: int  # bytes from the beginning of the region's part of a block
    length: int  # bytes
    counts: tuple[int, ...]
    strides: tuple[int, ...]  # bytes


class SplitSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the local rank's blocks that one remote rank fills."""

    remote_rank: int  # tp_rank
    parts: tuple[SplitPartSnapshot, ...]


class ReadSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one kind that is read from one remote rank."""

    remote_rank: int  # tp_rank
    kind: GroupKind
    layers: tuple[int, ...]
    units: dict[str, tuple[UnitRange, ...]]  # by component, of all layers together
    bytes_per_token: float  # of attention; 0 for a state
    bytes_per_state: int  # of one request's state; 0 for attention


class StageSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline stage of a remote engine. Its ranks are named by tp_rank."""

    info: dict[str, Any]  # the fields of EngineTransferInfo, or of MambaEngineTransferInfo
    tp_ratio: int | None  # None where neither size divides the other
    block_size_ratio: int | None  # None where the local size is no multiple of the remote's
    handshake_target_ranks: tuple[int, ...]
    target_remote_ranks: tuple[int, ...]
    is_kv_replicated: bool
    replicates_kv_cache: bool
    fa_head_slots: dict[int, int] | None  # of each rank read for attention; None for a stage without states
    regions: tuple[RegionSnapshot, ...]  # the local rank's, of the stage's layers
    splits: tuple[SplitSnapshot, ...]
    reads: tuple[ReadSnapshot, ...]


class TopologySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A remote engine as one local rank knows it."""

    local_engine_id: EngineId
    local_rank: Rank
    engine_id: EngineId
    home: Endpoint  # the peer that sent its manifest
    generation: Generation
    last_used_s: float  # seconds since the rank used its plan
    stages: tuple[StageSnapshot, ...]  # by pp_rank
    is_plan_kept: bool = True  # else `splits` and `reads` are empty until the next pull plans again
