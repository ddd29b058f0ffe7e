"""The address-free description of a rank's KV cache: layouts, block lists, engine specs.

`tensors` has the formula by which a layout maps a block, token and unit to a region's bytes. All sizes,
strides and offsets are bytes. `validate` checks a layout when a rank registers.
"""

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
