"""What a pull must do, byte by byte, from the definition of a cache tensor alone.

Shares no code with the planner: it walks every listed block, token, unit, chunk and byte with
plain loops, and keeps a dictionary from global coordinate to place.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Set

import numpy as np

from kvxferd.ids import GroupName, Rank, RegionId
from kvxferd.layout import CacheTensor, Group, GroupKind, PackedBlocks, RankLayout, unpack_ids
from kvxferd.plan import Runs

Coordinate = tuple[int, str, int, int, int]  # layer, component, unit, first token of the item, byte
Place = tuple[RegionId, int]  # region, byte in it
Lists = Mapping[GroupName, PackedBlocks]
Memory = dict[RegionId, np.ndarray]
Bases = Mapping[RegionId, int]

STATE = -1  # stands for the token of a state


def items(group: Group, tensor: CacheTensor, listed: PackedBlocks) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, kernel block, item in the block) of everything that a list holds."""
    ids = list(unpack_ids(listed.ids))
    if group.kind is GroupKind.STATE:
        if ids:
            yield STATE, ids[-1], 0
        return
    shard, per_id = group.token_shard, group.physical_blocks_per_logical
    kernel_tokens = group.block_tokens // per_id
    for position, block in enumerate(ids):
        begin = listed.first_token + position * group.block_tokens * shard.count
        tokens = range(begin, begin + group.block_tokens * shard.count)
        own = [t for t in tokens if t // shard.interleave % shard.count == shard.index]
        assert len(own) == group.block_tokens
        for slot, token in enumerate(own):
            if slot % tensor.granule_tokens == 0:
                inside = slot % kernel_tokens // tensor.granule_tokens
                yield token, block * per_id + slot // kernel_tokens, inside


def places(layout: RankLayout, lists: Lists) -> dict[Coordinate, Place]:
    """Return where each coordinate of the listed blocks lies on a rank."""
    groups = {group.name: group for group in layout.groups}
    found: dict[Coordinate, Place] = {}
    for tensor in layout.tensors:
        units = [unit for held in tensor.units for unit in range(held.start, held.stop)]
        for token, block, item in items(groups[tensor.group], tensor, lists[tensor.group]):
            for position, unit in enumerate(units):
                for byte in range(tensor.num_chunks * tensor.chunk_bytes):
                    chunk, inside = divmod(byte, tensor.chunk_bytes)
                    at = tensor.offset + block * tensor.block_stride + item * tensor.token_stride
                    at += position * tensor.unit_stride + chunk * tensor.chunk_stride + inside
                    coordinate = (tensor.layer, tensor.component, unit, token, byte)
                    assert coordinate not in found
                    found[coordinate] = (tensor.region, at)
    return found


def value(coordinate: Coordinate) -> int:
    """Return the byte that a coordinate holds at the source, the same on every replica."""
    return zlib.crc32(repr(coordinate).encode()) & 0xFF


def memory(layout: RankLayout, seed: int) -> Memory:
    """Return a rank's regions full of noise."""
    noise = np.random.default_rng(seed)
    return {r.region: noise.integers(0, 256, r.size_bytes, dtype=np.uint8) for r in layout.regions}


def bases(layout: RankLayout, seed: int) -> dict[RegionId, int]:
    """Return made-up addresses, regions touching one another so that a merge across them would show."""
    at = (seed + 1) << 32
    found = {}
    for region in layout.regions:
        found[region.region] = at
        at += region.size_bytes
    return found


def check_pull(
    *,
    local: tuple[RankLayout, Lists],
    remote: Mapping[Rank, RankLayout],
    remote_lists: Lists,
    required: Mapping[GroupName, int],
    num_tokens: int,
    runs: Mapping[Rank, Runs],
) -> int:
    """Carry out `runs` on real arrays and assert everything a pull promises; returns bytes written.

    `required` gives, per local group, the first token that must arrive. Local bases are
    ``bases(layout, 0)``, those of the i-th remote rank ``bases(layout, i + 1)``.
    """
    layout, lists = local
    mine = places(layout, lists)
    theirs = {rank: places(remote[rank], remote_lists) for rank in remote}
    sources = {rank: memory(remote[rank], i + 1) for i, rank in enumerate(sorted(remote))}
    for rank, found in theirs.items():
        for coordinate, (region, at) in found.items():
            sources[rank][region][at] = value(coordinate)
    sink = memory(layout, 0)
    before = {region: array.copy() for region, array in sink.items()}
    written = {region: np.zeros(array.shape, dtype=np.int64) for region, array in sink.items()}
    for i, rank in enumerate(sorted(remote)):
        if rank in runs:
            read(runs[rank], sink, bases(layout, 0), sources[rank], bases(remote[rank], i + 1))
            _check_runs(runs[rank], written, bases(layout, 0), sources[rank], bases(remote[rank], i + 1))
    held = set().union(*theirs.values()) if theirs else set()
    groups = {(t.layer, t.component): t.group for t in layout.tensors}
    arrived = check_arrived(sink, before, mine, held)
    for coordinate in mine.keys() - held:
        assert coordinate[3] != STATE, coordinate
        assert not required[groups[coordinate[:2]]] <= coordinate[3] < num_tokens, coordinate
    for region in sink:
        assert (written[region] == arrived[region]).all()
    return int(sum(array.sum() for array in written.values()))


def check_arrived(
    sink: Memory, before: Memory, mine: Mapping[Coordinate, Place], held: Set[Coordinate]
) -> dict[RegionId, np.ndarray]:
    """Assert that what the source held is in its places, and that no other byte has changed; return which."""
    arrived = {region: np.zeros(len(content), dtype=bool) for region, content in sink.items()}
    for coordinate, (region, at) in mine.items():
        if coordinate in held:
            arrived[region][at] = True
            assert sink[region][at] == value(coordinate), coordinate
    for region, own in arrived.items():
        assert (sink[region][~own] == before[region][~own]).all()
    return arrived


def read(runs: Runs, sink: Memory, sink_at: Bases, source: Memory, source_at: Bases) -> None:
    """Copy run by run. `sink_at` and `source_at`: the regions' addresses."""
    for region, begin, remote_region, remote_begin, size in _places(runs, sink, sink_at, source, source_at):
        sink[region][begin : begin + size] = source[remote_region][remote_begin : remote_begin + size]


def _check_runs(runs: Runs, written: Memory, sink_at: Bases, source: Memory, source_at: Bases) -> None:
    """Count what is written, and assert that runs are in order and could not be longer."""
    assert all(column.dtype == np.uint64 for column in runs)
    last: tuple[RegionId, RegionId, int, int] | None = None
    for region, begin, remote_region, remote_begin, size in _places(
        runs, written, sink_at, source, source_at
    ):
        assert size > 0
        written[region][begin : begin + size] += 1
        if last is not None and last[:2] == (region, remote_region):
            assert begin >= last[2], "not walked forwards"
            assert (begin, remote_begin) != last[2:], "two runs that touch on both sides"
        last = (region, remote_region, begin + size, remote_begin + size)


def _places(
    runs: Runs, sink: Memory, sink_at: Bases, source: Memory, source_at: Bases
) -> Iterator[tuple[RegionId, int, RegionId, int, int]]:
    """Yield (region, offset, remote region, remote offset, size) of each run."""
    for to, at, size in zip(*(column.tolist() for column in runs), strict=True):
        yield *_region_of(sink, sink_at, to, size), *_region_of(source, source_at, at, size), size


def _region_of(memory: Memory, at: Bases, address: int, size: int) -> tuple[RegionId, int]:
    """Return the region that holds a run, all of it."""
    for region, content in memory.items():
        begin = address - at[region]
        if 0 <= begin < len(content):
            assert begin + size <= len(content), "a run reaches across two regions"
            return region, begin
    raise AssertionError(f"address {address} is in no region")
