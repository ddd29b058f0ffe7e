"""Checks a layout against itself, its engine and its regions, once, when a rank registers.

Every error that a layout can have is refused here, so that later code can compute with it unchecked.
Arithmetic is on Python's integers: nothing overflows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from kvxferd.errors import Code, LayoutError
from kvxferd.ids import GroupName, RegionId
from kvxferd.layout.engine import EngineSpec
from kvxferd.layout.overlap import find_overlap
from kvxferd.layout.tensors import CacheTensor, Group, GroupKind, RankLayout

MAX_NAME_CHARS = 256  # longer than any layer or component name in use
# 256 TiB: sixteen times the largest memory that one process maps today.
MAX_BYTES = 1 << 48
# Engines have 16 stages at most today, and a thousand ranks. What a node keeps of a remote engine, and
# reports of it, has an entry for each stage.
MAX_STAGES = 64
MAX_RANKS = 4096
# A million layers, a billion units: a larger number is a mistake or an attack.
MAX_LAYERS = 1 << 20
MAX_UNITS = 1 << 30
# 128 layers of sixteen components; a check takes 10 to 25 us a tensor, which block the daemon.
MAX_TENSORS = 2048
# The groups that a request may name, and the regions that a rank may export. Known engines have one
# to three groups.
MAX_GROUPS, MAX_REGIONS = 256, 1024
# Ranges in which one rank holds heads, or channels of a state: known layouts have one to three.
MAX_UNIT_RANGES = 256
# Requests are expanded with 21-bit arithmetic on the tokens of a block.
MAX_BLOCK_TOKENS = (1 << 21) - 1
# Block ids are int32.
MAX_BLOCKS = 1 << 31

_Named = TypeVar("_Named")


def validate_layout(spec: EngineSpec, layout: RankLayout) -> None:
    """Raise LayoutError (layout-invalid) for the first contradiction, naming where and the values.

    In a valid layout ranks and layers are in range; every tensor names a known group and region; all
    bytes of every valid block id lie inside their region; no two coordinates of one group share a byte;
    granules and interleaves divide blocks; units are not listed twice; numbers are within their limits.
    Tensors of a group that lie among one another in steps of unlike sizes count as overlapping.
    """
    validate_spec(spec)
    _check_layer_range(spec, layout)
    _check_counts(layout)
    regions = _by_name(layout.regions, lambda region: region.region, "region")
    for region in layout.regions:
        _require(
            0 < region.size_bytes <= MAX_BYTES,
            f"cannot use region {region.region!r}: its size is {region.size_bytes} bytes",
        )
    groups = _by_name(layout.groups, lambda group: group.name, "group")
    for group in layout.groups:
        _check_group(group)
    seen: set[tuple[int, str]] = set()
    for tensor in layout.tensors:
        key = (tensor.layer, tensor.component)
        if key in seen:
            raise LayoutError(f"{_cannot_use(tensor)}: it is listed twice")
        seen.add(key)
        if tensor.group not in groups:
            raise LayoutError(f"{_cannot_use(tensor)}: there is no group {tensor.group!r}")
        if tensor.region not in regions:
            raise LayoutError(f"{_cannot_use(tensor)}: there is no region {tensor.region!r}")
        _check_tensor(layout, tensor, groups[tensor.group])
        _check_end(tensor, groups[tensor.group], regions[tensor.region].size_bytes)
    _check_overlaps(layout, groups)


def check_types(spec: EngineSpec) -> None:
    """Raise LayoutError for a field of another type. A specification that was decoded has the right ones."""
    try:
        msgspec.convert(msgspec.structs.asdict(spec), EngineSpec)
    except msgspec.ValidationError as error:
        raise LayoutError(f"cannot use this engine's specification: {error}") from error


def validate_spec(spec: EngineSpec) -> None:
    """Raise LayoutError for impossible sizes of an engine, or an impossible position of this rank in it."""
    for name, text in (("engine_id", spec.engine_id), ("generation", spec.generation)):
        _check_name(text, name)
    _require(
        len(spec.fingerprint) <= MAX_NAME_CHARS,
        f"cannot use a fingerprint of {len(spec.fingerprint)} characters: {MAX_NAME_CHARS} is the limit",
    )
    for name, value, limit in (
        ("num_layers", spec.num_layers, MAX_LAYERS),
        ("pp_size", spec.pp_size, MAX_STAGES),
        ("tp_size", spec.tp_size, MAX_RANKS),
        ("pp_size x tp_size", spec.pp_size * spec.tp_size, MAX_RANKS),
    ):
        _require(
            1 <= value <= limit, f"cannot use {name} {value}: it must be 1 to {limit}", Code.RANK_INVALID
        )
    _require(
        0 <= spec.num_kv_heads <= MAX_UNITS,
        f"cannot use num_kv_heads {spec.num_kv_heads}: it must be 0 to {MAX_UNITS}",
    )
    for name, rank, size in (
        ("pp_rank", spec.pp_rank, spec.pp_size),
        ("tp_rank", spec.tp_rank, spec.tp_size),
    ):
        _require(
            0 <= rank < size,
            f"cannot use {name} {rank}: the engine has {size} of them, from 0 on",
            Code.RANK_INVALID,
        )


def _check_layer_range(spec: EngineSpec, layout: RankLayout) -> None:
    _require(
        0 <= layout.start_layer <= layout.end_layer <= spec.num_layers,
        f"cannot use layers [{layout.start_layer}, {layout.end_layer}) of rank {spec.rank}: the engine's "
        f"are [0, {spec.num_layers})",
    )


def _check_counts(layout: RankLayout) -> None:
    """Check how many items there are, before each is checked: 20,000 groups of a register took 89 ms."""
    for what, count, limit in (
        ("cache tensors", len(layout.tensors), MAX_TENSORS),
        ("groups", len(layout.groups), MAX_GROUPS),
        ("regions", len(layout.regions), MAX_REGIONS),
    ):
        _require(count <= limit, f"cannot use {count} {what}: {limit} is the limit")


def _check_group(group: Group) -> None:
    """Check one group by itself."""
    cannot = f"cannot use group {group.name!r}"
    _require(
        1 <= group.num_blocks <= MAX_BLOCKS,
        f"{cannot}: num_blocks {group.num_blocks} is not 1 to {MAX_BLOCKS}",
    )
    shard, per_id = group.token_shard, group.physical_blocks_per_logical
    window = group.sliding_window
    _require(window is None or window >= 1, f"{cannot}: sliding_window {window} is less than 1")
    _require(
        1 <= per_id <= MAX_BLOCK_TOKENS, f"{cannot}: physical_blocks_per_logical {per_id} is out of range"
    )
    _require(
        1 <= shard.count <= MAX_RANKS
        and 0 <= shard.index < shard.count
        and 1 <= shard.interleave <= MAX_BLOCK_TOKENS,
        f"{cannot}: token_shard (count {shard.count}, index {shard.index}, interleave {shard.interleave}) "
        "is out of range",
    )
    if group.kind is GroupKind.STATE:
        _require(
            group.block_tokens == 0, f"{cannot}: a state has no tokens, block_tokens is {group.block_tokens}"
        )
        _require(per_id == 1, f"{cannot}: a state's id is one block, physical_blocks_per_logical is {per_id}")
        _require(
            shard.count == 1, f"{cannot}: a state has no tokens to shard, token_shard.count is {shard.count}"
        )
        return
    _require(
        1 <= group.block_tokens <= MAX_BLOCK_TOKENS,
        f"{cannot}: block_tokens {group.block_tokens} is not 1 to {MAX_BLOCK_TOKENS}",
    )
    _require(
        group.block_tokens % per_id == 0,
        f"{cannot}: physical_blocks_per_logical {per_id} does not divide block_tokens {group.block_tokens}",
    )
    _require(
        shard.count == 1 or group.block_tokens // per_id % shard.interleave == 0,
        f"{cannot}: the interleave {shard.interleave} does not divide its blocks of "
        f"{group.block_tokens // per_id} tokens",
    )


def _check_tensor(layout: RankLayout, tensor: CacheTensor, group: Group) -> None:
    """Check one tensor by itself. No message is formatted for a tensor without an error."""
    for name, text in (("component", tensor.component), ("dtype", tensor.dtype)):
        _check_name(text, name)
    if len(tensor.encoding) > MAX_NAME_CHARS:
        raise LayoutError(f"{_cannot_use(tensor)}: its encoding is over {MAX_NAME_CHARS} characters")
    if not layout.start_layer <= tensor.layer < layout.end_layer:
        raise LayoutError(
            f"{_cannot_use(tensor)}: the rank's layers are [{layout.start_layer}, {layout.end_layer})"
        )
    for name in ("offset", "block_stride", "token_stride", "unit_stride", "chunk_stride", "chunk_bytes"):
        if not 0 <= (value := getattr(tensor, name)) <= MAX_BYTES:
            raise LayoutError(f"{_cannot_use(tensor)}: {name} {value} is not 0 to {MAX_BYTES}")
    for name in ("num_chunks", "itemsize", "granule_tokens"):
        if not 1 <= (value := getattr(tensor, name)) <= MAX_UNITS:
            raise LayoutError(f"{_cannot_use(tensor)}: {name} {value} is not 1 to {MAX_UNITS}")
    _check_units(tensor)
    granule = tensor.granule_tokens
    if group.kind is GroupKind.STATE:
        if granule != 1:
            raise LayoutError(f"{_cannot_use(tensor)}: a state has no tokens, granule_tokens is {granule}")
        return
    block_tokens = group.block_tokens // group.physical_blocks_per_logical
    if block_tokens % granule:
        raise LayoutError(
            f"{_cannot_use(tensor)}: granule_tokens {granule} does not divide its blocks of {block_tokens} "
            "tokens"
        )
    shard = group.token_shard
    if shard.count != 1 and shard.interleave % granule:
        raise LayoutError(
            f"{_cannot_use(tensor)}: granule_tokens {granule} does not divide the interleave "
            f"{shard.interleave}"
        )


def _check_units(tensor: CacheTensor) -> None:
    """Check that no range is empty or overlaps. A component of no width has one empty range, or none."""
    if len(tensor.units) > MAX_UNIT_RANGES:
        raise LayoutError(
            f"{_cannot_use(tensor)}: its units are in {len(tensor.units)} ranges, {MAX_UNIT_RANGES} go"
        )
    if len(tensor.units) == 1:
        ((start, stop),) = ((units.start, units.stop) for units in tensor.units)
        if start != stop and not 0 <= start < stop <= MAX_UNITS:
            raise LayoutError(f"{_cannot_use(tensor)}: unit range [{start}, {stop}) is empty")
        return
    ordered = sorted((units.start, units.stop) for units in tensor.units)
    for start, stop in ordered:
        _require(
            0 <= start < stop <= MAX_UNITS, f"{_cannot_use(tensor)}: unit range [{start}, {stop}) is empty"
        )
    for (_, end), (start, stop) in itertools.pairwise(ordered):
        _require(end <= start, f"{_cannot_use(tensor)}: units [{start}, {min(end, stop)}) are listed twice")


def _check_end(tensor: CacheTensor, group: Group, region_bytes: int) -> None:
    """Check that the last byte of the last block lies inside the region."""
    if tensor.num_units == 0 or tensor.content_bytes == 0:
        return
    reach = tensor.offset + tensor.chunk_bytes
    for count, stride in axes_of(tensor, group):
        reach += (count - 1) * stride
    if reach > region_bytes:
        raise LayoutError(
            f"{_cannot_use(tensor)}: its last block, {group.num_blocks - 1}, reaches to byte {reach} of "
            f"region {tensor.region!r}, which has {region_bytes}"
        )


def axes_of(tensor: CacheTensor, group: Group) -> list[tuple[int, int]]:
    """Return (length, stride in bytes) of a tensor's axes: blocks, items, units, chunks."""
    per_id = group.physical_blocks_per_logical
    items = 1
    if group.kind is GroupKind.ATTENTION:
        items = group.block_tokens // per_id // tensor.granule_tokens
    return [
        (group.num_blocks * per_id, tensor.block_stride),
        (items, tensor.token_stride),
        (tensor.num_units, tensor.unit_stride),
        (tensor.num_chunks, tensor.chunk_stride),
    ]


def _check_overlaps(layout: RankLayout, groups: Mapping[str, Group]) -> None:
    """Check that no byte of a group has two coordinates. Groups may overlay one another."""
    together: dict[tuple[GroupName, RegionId], list[CacheTensor]] = {}
    for tensor in layout.tensors:
        if tensor.num_units and tensor.content_bytes:
            together.setdefault((tensor.group, tensor.region), []).append(tensor)
    for (name, region), tensors in together.items():
        group = groups[name]
        found = find_overlap([(t.offset, t.chunk_bytes, axes_of(t, group)) for t in tensors])
        if found is not None:
            first, second = (tensors[index] for index in found)
            what = "itself" if first is second else f"layer {second.layer}'s component {second.component!r}"
            raise LayoutError(
                f"{_cannot_use(first)}: it overlaps {what} in group {name!r}, region {region!r}"
            )


def _by_name(items: Iterable[_Named], name_of: Callable[[_Named], str], what: str) -> dict[str, _Named]:
    """Return the items by name; raises LayoutError for a name that occurs twice."""
    named: dict[str, _Named] = {}
    for item in items:
        name = name_of(item)
        _check_name(name, f"{what} name")
        _require(name not in named, f"cannot use {what} {name!r}: it is listed twice")
        named[name] = item
    return named


def _check_name(text: str, what: str) -> None:
    if not 0 < len(text) <= MAX_NAME_CHARS:
        raise LayoutError(
            f"cannot use a name of {len(text)} characters as {what}: 1 to {MAX_NAME_CHARS} are allowed"
        )


def _cannot_use(tensor: CacheTensor) -> str:
    return f"cannot use layer {tensor.layer}'s component {tensor.component!r}"


def _require(holds: bool, otherwise: str, code: Code = Code.LAYOUT_INVALID) -> None:
    if not holds:
        raise LayoutError(otherwise, code)
