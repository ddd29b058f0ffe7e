"""Where the bytes of a KV cache lie, without addresses.

Every byte has coordinates that do not depend on how an engine is parallelised:
``(layer, component, unit, token, byte)``. A `CacheTensor` maps them into a region:

    region offset = offset
                  + block * block_stride            block: the id that the engine allocates
                  + item  * token_stride            item: token within the block // granule_tokens
                  + index * unit_stride             index: position of the unit among `units`
                  + chunk * chunk_stride + byte     chunk: num_chunks of chunk_bytes each

Where a group has p `physical_blocks_per_logical`, an id stands for the blocks id * p .. id * p + p - 1.
All strides and offsets are bytes. HND, NHD, K/V split first, blocks first, cross-layer blocks and
padded pages are choices of these numbers; no code downstream distinguishes them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from kvxferd.ids import GroupName, RegionId


class UnitRange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Half-open range ``[start, stop)`` on a component's global unit axis (KV heads, state channels)."""

    start: int
    stop: int


def num_units(units: tuple[UnitRange, ...]) -> int:
    """Return how many units the ranges have together."""
    # A generator takes twice as long; plans of 64 ranks against 64 count 200,000 times.
    total = 0
    for held in units:
        total += held.stop - held.start
    return total


class TokenShard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Context parallelism: this rank holds token t when ``t // interleave % count == index``."""

    count: int = 1
    index: int = 0
    interleave: int = 1


class GroupKind(StrEnum):
    """What a block of the group holds."""

    ATTENTION = "attention"  # block_tokens tokens
    STATE = "state"  # one request's state; no token axis


class CacheTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One component of one layer inside a region of one rank."""

    layer: int  # the model's global layer index
    component: str  # "k", "v", "kv", "latent", "indexer.k", "conv.x", "ssm", ...
    group: GroupName
    region: RegionId
    offset: int
    block_stride: int
    token_stride: int  # from one item to the next inside a block; 0 in a state group
    unit_stride: int
    units: tuple[UnitRange, ...]  # global units held, in the order in which they lie
    chunk_bytes: int  # one unit's content for one item, contiguous part
    num_chunks: int = 1
    chunk_stride: int = 0
    granule_tokens: int = 1  # tokens per item
    itemsize: int = 2
    dtype: str = "bfloat16"
    encoding: str = ""  # compared like a dtype: swizzle, packing, quantisation block

    @property
    def content_bytes(self) -> int:
        """Return the bytes of one unit for one item."""
        return self.num_chunks * self.chunk_bytes

    @property
    def num_units(self) -> int:
        """Return how many units of the component this rank holds."""
        return num_units(self.units)


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """Layers whose blocks are allocated together. The name is local: only layers and components meet."""

    name: GroupName
    num_blocks: int  # valid block ids are 0 .. num_blocks - 1
    block_tokens: int = 0  # tokens per block id on this rank; 0 in a state group
    kind: GroupKind = GroupKind.ATTENTION
    sliding_window: int | None = None  # tokens; earlier ones are not required by a pull
    token_shard: TokenShard = TokenShard()
    physical_blocks_per_logical: int = 1  # kernel blocks inside one id; they divide block_tokens among them

    if TYPE_CHECKING:  # an engine's own names are plain texts

        def __init__(
            self,
            name: str,
            num_blocks: int,
            block_tokens: int = 0,
            kind: GroupKind = GroupKind.ATTENTION,
            sliding_window: int | None = None,
            token_shard: TokenShard = TokenShard(),  # noqa: B008 - it is frozen
            physical_blocks_per_logical: int = 1,
        ) -> None: ...


class RegionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One contiguous exported allocation."""

    region: RegionId
    size_bytes: int

    if TYPE_CHECKING:  # an engine's own names are plain texts

        def __init__(self, region: str, size_bytes: int) -> None: ...


class RankLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The address-free description of one rank's cache. Layouts are compared and cached by digest."""

    start_layer: int  # the pipeline stage's half-open range of global layers
    end_layer: int
    groups: tuple[Group, ...]
    tensors: tuple[CacheTensor, ...]
    regions: tuple[RegionSpec, ...]
