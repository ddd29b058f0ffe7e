"""A plan's structs: group reads, the stride patterns of each, and the extents of each pattern.

They hold plain numbers only. A plan goes from the daemon to its movers as msgpack. It has everything
that the expansion of a request needs, and nothing that depends on addresses or block ids.
"""

from __future__ import annotations

import msgspec

from kvxferd.ids import Digest, GroupName, Rank, RegionId
from kvxferd.layout import CacheTensor, Group, GroupKind, PackedBlocks, TokenShard

# Of objects, measured with tracemalloc, as planned and as decoded. A plan's include its key and its place in
# a cache.
PLAN_BYTES, GROUP_READ_BYTES, PATTERN_BYTES, EXTENT_BYTES = 4096, 1024, 320, 148


class BlockGeometry(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens an id of one side's block list of a group stands for."""

    group: GroupName
    kind: GroupKind
    num_blocks: int  # valid ids are 0 .. num_blocks - 1
    block_tokens: int  # tokens per kernel block on that rank; 0 in a state group
    blocks_per_id: int  # kernel blocks inside one id; strides are per kernel block
    shard: TokenShard
    sliding_window: int | None

    @property
    def id_tokens(self) -> int:
        """Return the tokens of the sequence that one listed id stands for, over all token shards."""
        return self.block_tokens * self.blocks_per_id * self.shard.count

    def end_of(self, listed: PackedBlocks) -> int:
        """Return the token behind the last one of a block list."""
        return listed.first_token + len(listed) * self.id_tokens

    @property
    def period_tokens(self) -> int:
        """Return the tokens after which the ranks that share them take turns anew; 1 where they do not."""
        return self.shard.count * self.shard.interleave if self.shard.count > 1 else 1

    @property
    def is_cut_by_tokens(self) -> bool:
        """Whether some of a list's tokens can be read without the others, with full attention alone.

        States stand at a request's end, and of a sliding window the source may free what the finished
        request does not need.
        """
        return self.kind is GroupKind.ATTENTION and self.sliding_window is None


def block_geometry(group: Group) -> BlockGeometry:
    """Return a group's geometry in kernel blocks. A state's id is one kernel block."""
    per_id = 1 if group.kind is GroupKind.STATE else group.physical_blocks_per_logical
    return BlockGeometry(
        group.name,
        group.kind,
        group.num_blocks,
        group.block_tokens // per_id,
        per_id,
        group.token_shard,
        group.sliding_window,
    )


class Strides(msgspec.Struct, frozen=True, array_like=True):
    """A cache tensor's strides, in bytes, without its offset."""

    region: RegionId
    block: int
    token: int
    unit: int
    chunk: int
    chunk_bytes: int
    num_chunks: int


def strides_of(tensor: CacheTensor) -> Strides:
    """Return a cache tensor's strides."""
    return Strides(
        tensor.region,
        tensor.block_stride,
        tensor.token_stride,
        tensor.unit_stride,
        tensor.chunk_stride,
        tensor.chunk_bytes,
        tensor.num_chunks,
    )


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive units of one component of one layer, held next to each other on both sides.

    The offsets are those of the first unit in block 0 of each side's region, in bytes.
    """

    layer: int
    component: str
    first_unit: int  # global
    local_offset: int
    remote_offset: int


class StridePattern(msgspec.Struct, frozen=True, array_like=True):
    """Extents with equal strides and numbers of units, which differ only in where they begin."""

    local: Strides
    remote: Strides
    num_units: int
    extents: tuple[Extent, ...]


class GroupRead(msgspec.Struct, frozen=True, array_like=True):
    """What one local group reads from one group of one remote rank."""

    rank: Rank
    local: BlockGeometry
    remote: BlockGeometry
    granule_tokens: int  # tokens per item, equal on both sides
    patterns: tuple[StridePattern, ...]

    @property
    def is_cut_by_tokens(self) -> bool:
        """Whether both sides' lists are."""
        return self.local.is_cut_by_tokens and self.remote.is_cut_by_tokens


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """What one local rank reads from one remote engine, and where each byte goes.

    `digest` is of the group reads: plans with equal digests move the same bytes.
    """

    local_rank: Rank
    digest: Digest
    group_reads: tuple[GroupRead, ...]

    @property
    def sources(self) -> tuple[Rank, ...]:
        """Return the remote ranks that are read, in ascending order."""
        return tuple(sorted({read.rank for read in self.group_reads}))


def plan_bytes(plan: Plan) -> int:
    """Return about how many bytes of memory a plan takes: about ten times those of `encode_plan`."""
    patterns = [pattern for read in plan.group_reads for pattern in read.patterns]
    return (
        PLAN_BYTES
        + GROUP_READ_BYTES * len(plan.group_reads)
        + PATTERN_BYTES * len(patterns)
        + EXTENT_BYTES * sum(len(pattern.extents) for pattern in patterns)
    )


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Plan)


def encode_plan(plan: Plan) -> bytes:
    """Return the plan as msgpack."""
    return _ENCODER.encode(plan)


def decode_plan(encoded: bytes) -> Plan:
    """Return the plan that `encode_plan` encoded; raises msgspec.DecodeError for anything else."""
    return _DECODER.decode(encoded)
