"""The address-free description of a rank's KV cache: layouts, block lists, engine specs.

`tensors` has the formula by which a layout maps a block, token and unit to a region's bytes. All sizes,
strides and offsets are bytes. `from_tensors` makes a layout from an engine's own tensors, `presets` from a
model's facts, and `validate` checks it when a rank registers. `regions` and `conv_split` have the names of
in-engine connectors.
"""

from kvxferd.layout.block_ids import (
    BlockList,
    BlocksByGroup,
    PackedBlocks,
    append_ids,
    borrow_ids,
    check_continues,
    freeze_ids,
    num_id_bytes,
    pack_ids,
    unpack_blocks,
    unpack_ids,
)
from kvxferd.layout.conv_split import (
    ConvPart,
    MambaConvSplitInfo,
    compute_physical_blocks_per_logical,
    derive_mamba_conv_split,
)
from kvxferd.layout.digest import digest_of
from kvxferd.layout.engine import EngineSpec
from kvxferd.layout.from_tensors import NamedTensor, from_tensors
from kvxferd.layout.regions import (
    CacheProperties,
    TransferRegion,
    block_bytes,
    cache_properties,
    get_transfer_cache_regions,
)
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
    "BlockList",
    "BlocksByGroup",
    "CacheProperties",
    "CacheTensor",
    "ConvPart",
    "EngineSpec",
    "Group",
    "GroupKind",
    "MambaConvSplitInfo",
    "NamedTensor",
    "PackedBlocks",
    "RankLayout",
    "RegionSpec",
    "TensorRegion",
    "TokenShard",
    "TransferRegion",
    "UnitRange",
    "append_ids",
    "block_bytes",
    "borrow_ids",
    "cache_properties",
    "check_continues",
    "compute_physical_blocks_per_logical",
    "derive_mamba_conv_split",
    "digest_of",
    "freeze_ids",
    "from_tensors",
    "get_transfer_cache_regions",
    "num_id_bytes",
    "pack_ids",
    "tensor_regions",
    "unpack_blocks",
    "unpack_ids",
]
