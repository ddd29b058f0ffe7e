"""Builds the structs of `topology_snapshot` from the registries of local ranks, in steps.

Between two steps the event loop runs other work: a rank has up to 2,048 cache tensors, and a plan up to
65,536 extents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import NamedTuple

from kvxferd.core.context import NodeContext
from kvxferd.core.registry import LocalRank, Registry
from kvxferd.core.topology_snapshot import (
    ReadSnapshot,
    RegionSnapshot,
    SplitPartSnapshot,
    SplitSnapshot,
    StageSnapshot,
    TopologySnapshot,
)
from kvxferd.errors import EngineError
from kvxferd.ids import EngineId, Rank
from kvxferd.layout import GroupKind, RankLayout, UnitRange
from kvxferd.plan import EngineTransferInfo, MambaEngineTransferInfo, Read, ReadSummary, TransferTopology
from kvxferd.plan.plan import GroupRead, Strides
from kvxferd.plan.regions import transfer_region
from kvxferd.plan.registered_engine import RegisteredEngine

# Cache tensors, or extents of a plan, between two pauses. They take under 2 ms.
BATCH = 512


class TopologyListing(NamedTuple):
    """The topologies to come, and their number. Each step is one, or None where events may be fed.

    One that is forgotten, or replaced by a new generation, before its step is left out.
    """

    num_topologies: int
    steps: Iterator[TopologySnapshot | None]


def list_topologies(
    registry: Registry, context: NodeContext, engine_id: EngineId | None = None
) -> TopologyListing:
    """List the remote engines that each rank here has registered, rank by rank, the last used first.

    With `engine_id`: only engines of that id.
    """
    ranks = [rank for local in registry for rank in local.ranks.values() if isinstance(rank, LocalRank)]
    ranks.sort(key=lambda rank: (rank.spec.key, rank.spec.rank))
    num_registered = sum(
        engine_id in (None, engine.engine_id) for rank in ranks for engine in rank.topology.engines()
    )
    return TopologyListing(num_registered, _topologies(ranks, context, engine_id))


def _topologies(
    ranks: Iterable[LocalRank], context: NodeContext, engine_id: EngineId | None
) -> Iterator[TopologySnapshot | None]:
    for rank in ranks:
        for engine in reversed(list(rank.topology.engines())):
            if engine_id not in (None, engine.engine_id):
                continue
            try:
                snapshot = yield from topology_steps(rank.topology, engine, context.now)
                is_current = rank.topology.find(engine.engine_id, engine.home) is engine
            except EngineError:
                continue  # forgotten between two steps
            if is_current:
                yield snapshot
        yield None


def topology_steps(
    topology: TransferTopology, engine: RegisteredEngine, now: float
) -> Generator[None, None, TopologySnapshot]:
    """Return what the topology has of an engine; yield where events may be fed. `now`: the clock of its use.

    Raises EngineError (engine-unknown) if the engine is forgotten between two steps.
    """
    regions = yield from _regions(topology.layout)
    splits, summary = _Splits(topology.layout), ReadSummary()
    plan = engine.plan  # the cache may evict it between two steps
    for read in plan.group_reads if plan is not None else ():
        yield None
        summary.add(read)
        yield from splits.add(read)
    reads: dict[int, list[ReadSnapshot]] = {}
    for one in summary.reads():
        reads.setdefault(one.source.pp_rank, []).append(_read_snapshot(one))
    stages = []
    for pp_rank, info in sorted(engine.stages.items()):
        yield None
        of_stage = yield from splits.of_stage(pp_rank)
        stages.append(
            StageSnapshot(
                info=dataclasses.asdict(info),
                tp_ratio=_or_none(topology.tp_ratio, info.remote_tp_size),
                block_size_ratio=_or_none(topology.block_size_ratio, info.remote_block_size),
                handshake_target_ranks=tuple(topology.handshake_target_ranks(info.remote_tp_size)),
                target_remote_ranks=tuple(
                    topology.target_remote_ranks(engine.engine_id, pp_rank, home=engine.home)
                ),
                is_kv_replicated=topology.is_kv_replicated(engine.engine_id, pp_rank, home=engine.home),
                replicates_kv_cache=topology.replicates_kv_cache(engine.engine_id, pp_rank, home=engine.home),
                fa_head_slots=_fa_head_slots(info),
                regions=tuple(r for r in regions if info.start_layer <= r.layer < info.end_layer),
                splits=of_stage,
                reads=tuple(reads.get(pp_rank, ())),
            )
        )
    return TopologySnapshot(
        local_engine_id=topology.spec.engine_id,
        local_rank=topology.spec.rank,
        engine_id=engine.engine_id,
        home=engine.home,
        generation=engine.generation,
        last_used_s=round(max(0.0, now - engine.last_used), 3),
        stages=tuple(stages),
        is_plan_kept=plan is not None,
    )


def _or_none(ratio: Callable[[int], int], remote_size: int) -> int | None:
    """Return the ratio to a remote size; None where there is none."""
    try:
        return ratio(remote_size)
    except ValueError:
        return None


def _fa_head_slots(info: EngineTransferInfo) -> dict[int, int] | None:
    """Return which part of a local attention block each rank fills: ranks fill parts in ascending order."""
    if not isinstance(info, MambaEngineTransferInfo):
        return None
    return {rank: slot for slot, rank in enumerate(info.remote_fa_source_ranks)}


def _read_snapshot(read: Read) -> ReadSnapshot:
    return ReadSnapshot(
        remote_rank=read.source.tp_rank,
        kind=read.kind,
        layers=read.layers,
        units=read.units,
        bytes_per_token=read.bytes_per_token,
        bytes_per_state=read.bytes_per_state,
    )


def _regions(layout: RankLayout) -> Generator[None, None, list[RegionSnapshot]]:
    """Return every cache tensor that holds bytes as a region, in order of layer and offset."""
    groups = {group.name: group for group in layout.groups}
    held = sorted((t for t in layout.tensors if t.num_units), key=lambda t: (t.layer, t.offset))
    found: list[RegionSnapshot] = []
    for number, tensor in enumerate(held):
        if number % BATCH == 0:
            yield None
        region = transfer_region(tensor, groups[tensor.group], 0)
        found.append(
            RegionSnapshot(
                layer=tensor.layer,
                component=tensor.component,
                kind=groups[tensor.group].kind,
                region=tensor.region,
                offset=region.base_addr,
                block_len=region.block_len,
                kv_block_len=region.kv_block_len,
            )
        )
    return found


class _PartKey(NamedTuple):
    """What the parts of several layers have in common."""

    kind: GroupKind
    component: str
    first_unit: int
    num_units: int
    offset: int
    length: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]


class _Splits:
    """The parts of a local rank's blocks, by the remote rank that fills them."""

    def __init__(self, layout: RankLayout) -> None:
        self._offsets = {(tensor.layer, tensor.component): tensor.offset for tensor in layout.tensors}
        self._parts: dict[Rank, dict[_PartKey, list[int]]] = {}  # the layers of each

    def add(self, read: GroupRead) -> Iterator[None]:
        """Add a group read; yield after each batch of extents."""
        parts = self._parts.setdefault(read.rank, {})
        num_items = read.local.block_tokens // read.granule_tokens or 1
        num_added = 0
        for pattern in read.patterns:
            length, counts, strides = _runs_in_block(pattern.local, pattern.num_units, num_items)
            for extent in pattern.extents:
                offset = extent.local_offset - self._offsets[extent.layer, extent.component]
                key = _PartKey(
                    read.local.kind,
                    extent.component,
                    extent.first_unit,
                    pattern.num_units,
                    offset,
                    length,
                    counts,
                    strides,
                )
                parts.setdefault(key, []).append(extent.layer)
                num_added += 1
                if num_added % BATCH == 0:
                    yield None

    def of_stage(self, pp_rank: int) -> Generator[None, None, tuple[SplitSnapshot, ...]]:
        """Return the splits of one stage's ranks; parts in order of kind, layer and place in a block.

        Yield after each batch: 65,536 parts that differ took 0.25 s.
        """
        splits = []
        for rank in sorted(rank for rank in self._parts if rank.pp_rank == pp_rank):
            parts = []
            for number, (key, layers) in enumerate(self._parts[rank].items()):
                if number % BATCH == 0:
                    yield None
                first = min(layers)
                parts.append((key.kind, first, self._offsets[first, key.component], key, sorted(layers)))
            parts.sort()
            shown = []
            for number, (*_, key, layers) in enumerate(parts):
                if number % BATCH == 0:
                    yield None
                shown.append(
                    SplitPartSnapshot(
                        kind=key.kind,
                        component=key.component,
                        layers=tuple(layers),
                        units=UnitRange(key.first_unit, key.first_unit + key.num_units),
                        offset=key.offset,
                        length=key.length,
                        counts=key.counts,
                        strides=key.strides,
                    )
                )
            splits.append(SplitSnapshot(remote_rank=rank.tp_rank, parts=tuple(shown)))
        return tuple(splits)


def _runs_in_block(
    strides: Strides, num_units: int, num_items: int
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the length of the contiguous runs of consecutive units in a block, their counts and strides."""
    axes = [(strides.chunk, strides.num_chunks), (strides.unit, num_units), (strides.token, num_items)]
    apart: list[tuple[int, int]] = []  # (stride, count), the innermost first
    length = strides.chunk_bytes
    for stride, count in sorted(axis for axis in axes if axis[1] > 1):
        if not apart and stride == length:
            length *= count
        elif apart and stride == apart[-1][0] * apart[-1][1]:
            apart[-1] = (apart[-1][0], apart[-1][1] * count)
        else:
            apart.append((stride, count))
    apart.reverse()
    return length, tuple(count for _, count in apart), tuple(stride for stride, _ in apart)
