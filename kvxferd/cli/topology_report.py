"""The topologies of remote engines as text, in the words of in-engine connectors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvxferd.core.topology_snapshot import (
    RegionSnapshot,
    SplitPartSnapshot,
    StageSnapshot,
    TopologySnapshot,
)
from kvxferd.explain.formatting import format_numbers, format_unit_ranges, format_units
from kvxferd.layout import GroupKind
from kvxferd.tooling.output import console, format_bytes, format_duration, plain_text


def print_topologies(topologies: Sequence[TopologySnapshot]) -> None:
    """Print each remote engine as each local rank knows it, or one line if there are none."""
    if not topologies:
        console().print("Remote engines: none", highlight=False)
    for topology in topologies:
        for line in _lines(topology):
            console().print(plain_text(line), soft_wrap=True)


def _lines(topology: TopologySnapshot) -> Iterator[str]:
    home = f" of {topology.home}" if topology.home else ""
    yield (
        f"{topology.local_engine_id} {topology.local_rank} reads "
        f"{topology.engine_id}@{topology.generation}{home}, "
        f"last used {format_duration(topology.last_used_s)} ago"
    )
    if not topology.is_plan_kept:
        yield "  its plan was evicted: splits and reads are shown again after the next pull"
    for stage in topology.stages:
        yield f"  stage {stage.info['remote_pp_rank']}"
        for line in _stage_lines(stage):
            yield f"    {line}"


def _stage_lines(stage: StageSnapshot) -> Iterator[str]:
    is_hybrid = stage.fa_head_slots is not None
    facts = ", ".join(f"{name}={value}" for name, value in stage.info.items())
    yield f"{'MambaEngineTransferInfo' if is_hybrid else 'EngineTransferInfo'}({facts})"
    yield f"tp_ratio={_ratio(stage.tp_ratio)} block_size_ratio={_ratio(stage.block_size_ratio)}"
    yield (
        f"handshake_target_ranks={list(stage.handshake_target_ranks)} "
        f"target_remote_ranks={list(stage.target_remote_ranks)}"
    )
    yield f"is_kv_replicated={stage.is_kv_replicated} replicates_kv_cache={stage.replicates_kv_cache}"
    if is_hybrid:
        yield f"fa_head_slots={stage.fa_head_slots}"
    yield from _titled("regions", _region_lines(stage.regions))
    yield from _titled(
        "splits",
        (f"rank {split.remote_rank}: {line}" for split in stage.splits for line in _part_lines(split.parts)),
    )
    yield from _titled(
        "reads",
        (
            f"rank {read.remote_rank}: {read.kind}, layers {format_numbers(read.layers)}, "
            f"{format_units(read.units)}, {_size(read.kind, read.bytes_per_token, read.bytes_per_state)}"
            for read in stage.reads
        ),
    )


def _titled(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines below a title, or the title with "none"."""
    listed = list(lines)
    yield f"{title}:" if listed else f"{title}: none"
    yield from (f"  {line}" for line in listed)


def _ratio(ratio: int | None) -> str:
    return "none (they do not divide)" if ratio is None else str(ratio)


def _region_lines(regions: Iterable[RegionSnapshot]) -> Iterator[str]:
    """Yield a line for the regions of each component and size; --json has each with its offset."""
    layers: dict[tuple[str, str, int, int], list[int]] = {}  # by kind, component and lengths
    for region in regions:
        key = (region.kind.value, region.component, region.block_len, region.kv_block_len)
        layers.setdefault(key, []).append(region.layer)
    for (kind, component, block_len, kv_block_len), held in layers.items():
        yield (
            f"{kind} {component}, layers {format_numbers(held)}: {len(held)} of block_len={block_len} "
            f"kv_block_len={kv_block_len}"
        )


def _part_lines(parts: Iterable[SplitPartSnapshot]) -> Iterator[str]:
    """Yield a line for the components that a rank fills in the same way, as `k v` often are."""
    components: dict[SplitPartSnapshot, list[str]] = {}
    for part in parts:
        components.setdefault(msgspec.structs.replace(part, component=""), []).append(part.component)
    for part, names in components.items():
        units = format_unit_ranges((part.units,))
        runs = f"[{part.offset}, {part.offset + part.length})"
        for count, stride in zip(reversed(part.counts), reversed(part.strides), strict=True):
            runs += f" x {count} every {stride}"
        layers = format_numbers(part.layers)
        yield f"{part.kind.value} {' '.join(names)} {units}, layers {layers}: bytes {runs}"


def _size(kind: GroupKind, bytes_per_token: float, bytes_per_state: int) -> str:
    if kind is GroupKind.STATE:
        return f"{format_bytes(bytes_per_state)} a state"
    return f"{bytes_per_token:.12g} bytes a token"
