"""The address-free description of a rank's KV cache: layouts, block lists, engine specs.

`tensors` has the formula by which a layout maps a block, token and unit to a region's bytes. All sizes,
strides and offsets are bytes. `from_tensors` makes a layout from an engine's own tensors, `presets` from a
model's facts, and `validate` checks it when a rank registers.
"""

from kvxferd.layout.blocks import PackedBlocks, check_continues, lend_ids, pack_ids, unpack_ids
from kvxferd.layout.digest import digest_of
from kvxferd.layout.engine import EngineSpec
from kvxferd.layout.from_tensors import NamedTensor, from_tensors
from kvxferd.layout.tensor_views import TensorRegion, tensor_regions
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
    "NamedTensor",
    "PackedBlocks",
    "RankLayout",
    "RegionSpec",
    "TensorRegion",
    "TokenShard",
    "UnitRange",
    "check_continues",
    "digest_of",
    "from_tensors",
    "lend_ids",
    "pack_ids",
    "tensor_regions",
    "unpack_ids",
]
