"""The address-free description of a rank's KV cache."""

from kvxferd.layout.blocks import PackedBlocks, lend_ids, pack_ids, unpack_ids
from kvxferd.layout.digest import digest_of
from kvxferd.layout.engine import EngineSpec
from kvxferd.layout.tensors import (
    CacheTensor,
    Group,
    GroupKind,
    RankLayout,
    RegionSpec,
    TokenShard,
    UnitRange,
)

__all__ = [
    "CacheTensor",
    "EngineSpec",
    "Group",
    "GroupKind",
    "PackedBlocks",
    "RankLayout",
    "RegionSpec",
    "TokenShard",
    "UnitRange",
    "digest_of",
    "lend_ids",
    "pack_ids",
    "unpack_ids",
]
