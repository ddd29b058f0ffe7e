"""Builds the structs of `snapshot` from a node's parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvxferd.core.context import NodeContext
from kvxferd.core.ranks.placements import is_proved, own_transports
from kvxferd.core.ranks.rank import LocalRank, RankRecord
from kvxferd.core.ranks.registry import LocalEngine, Registry
from kvxferd.core.sink.pull import PullPhase
from kvxferd.core.sink.pull_records import snapshot_of
from kvxferd.core.sink.pulls import Pulls
from kvxferd.core.source.publishing import PublishedTransfers
from kvxferd.ids import Endpoint, EngineKey, GroupName
from kvxferd.records import (
    EngineSnapshot,
    PlacementSnapshot,
    PullSnapshot,
    RankSnapshot,
    TransferSnapshot,
    TransportsSnapshot,
)
from kvxferd.ucx_log import data_transports, slow_transports

# 2,000 transfers take 5 ms. With a pause after each batch a snapshot delays no event by more than that.
BATCH = 2_000
LONG_WAIT_S = 1.0  # of a pull, after which it is said for what it waits
# As many transfers, and as many pulls, are shown; all are counted. It is the limit of one engine, and takes
# 30 ms of a core.
MAX_SHOWN = 8_192

Shown = TypeVar("Shown", TransferSnapshot, PullSnapshot)


@dataclass(slots=True)
class Listing(Generic[Shown]):
    """The first `MAX_SHOWN` of many transfers or pulls, and how many there are in each state."""

    shown: list[Shown] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    num_grants: int = 0
    num_bytes: int = 0  # local: the blocks of transfers, or of pulls in doubt
    oldest_s: float = 0.0  # since the oldest of transfers was published


Steps = Generator[None, None, Listing[Shown]]


def list_transfers(
    published: PublishedTransfers, registry: Registry, context: NodeContext
) -> Steps[TransferSnapshot]:
    """List the live transfers of this node's engines in batches; yield after each, return all."""
    listing: Listing[TransferSnapshot] = Listing()
    live = list(published.table.live.values())
    bytes_of_block: dict[EngineKey, Counter[GroupName]] = {}
    for start in range(0, len(live), BATCH):
        for transfer in live[start : start + BATCH]:
            engine = registry.get(transfer.engine)
            is_ready = engine is not None and transfer.is_ready(engine)
            state = transfer.state(is_ready)
            listing.states[state] += 1
            # As the rows show it: time passes between two batches.
            listing.oldest_s = max(listing.oldest_s, context.now - transfer.published_at)
            listing.num_grants += len(transfer.grants)
            if engine is not None:
                if (sizes := bytes_of_block.get(transfer.engine)) is None:
                    sizes = bytes_of_block[transfer.engine] = _block_bytes_of(engine)
                listing.num_bytes += sum(len(ids) * sizes[group] for group, ids in transfer.blocks.items())
            if len(listing.shown) < MAX_SHOWN:
                num_ready = transfer.num_tokens if is_ready else 0
                if engine is not None and not is_ready:
                    num_ready = transfer.tokens_ready(engine)
                listing.shown.append(transfer.snapshot(context.now, state, num_ready))
        yield None
    return listing


def list_pulls(pulls: Pulls, context: NodeContext) -> Steps[PullSnapshot]:
    """List the pulls that are not over in batches; yield after each, return all."""
    listing: Listing[PullSnapshot] = Listing()
    running = pulls.running()
    for start in range(0, len(running), BATCH):
        for pull in running[start : start + BATCH]:
            is_long = pull.phase is PullPhase.WAITING and context.now - pull.received_at >= LONG_WAIT_S
            says_why = is_long and len(listing.shown) < MAX_SHOWN
            shown = snapshot_of(pull, context.now, pulls.describe(pull)[1] if says_why else "")
            listing.states[shown.phase] += 1
            if pull.phase is PullPhase.IN_DOUBT:
                listing.num_bytes += pull.local_bytes
            if len(listing.shown) < MAX_SHOWN:
                listing.shown.append(shown)
        yield None
    return listing


def engine_snapshots(registry: Registry, endpoint: Endpoint) -> tuple[EngineSnapshot, ...]:
    """Return every engine of which a rank is known here. `endpoint`: this daemon's."""
    return tuple(_engine_snapshot(engine, registry.is_home(engine.spec), endpoint) for engine in registry)


def _block_bytes_of(engine: LocalEngine) -> Counter[GroupName]:
    """Return how many bytes a block of each group takes on the engine's local ranks, together."""
    sizes: Counter[GroupName] = Counter()
    for record in engine.ranks.values():
        if isinstance(record, LocalRank):
            sizes.update(record.block_bytes)
    return sizes


def _engine_snapshot(engine: LocalEngine, is_home: bool, endpoint: Endpoint) -> EngineSnapshot:
    lacking = tuple(engine.missing())
    return EngineSnapshot(
        engine_id=engine.key.engine_id,
        generation=engine.key.generation,
        pp_size=engine.spec.pp_size,
        tp_size=engine.spec.tp_size,
        num_layers=engine.spec.num_layers,
        complete=is_home and not lacking,
        lacking=lacking if is_home else (),
        home=engine.spec.home or endpoint,
        ranks=tuple(_rank_snapshot(record) for _, record in sorted(engine.ranks.items())),
    )


def _placement_snapshot(rank: LocalRank) -> PlacementSnapshot:
    found = rank.placement
    return PlacementSnapshot(
        kind=found.kind,
        proved=is_proved(found),
        why=found.why,
        lanes=own_transports(rank),
        gigabytes_per_s=found.gigabytes_per_s,
    )


def _transports_snapshots(rank: LocalRank) -> tuple[TransportsSnapshot, ...]:
    slow = slow_transports(rank.transports_used)
    return tuple(
        TransportsSnapshot(
            reach=lanes.reach,
            transports=lanes.transports,
            lanes=data_transports(lanes.transports),
            slow=lanes in slow,
        )
        for lanes in rank.transports_used
    )


def _rank_snapshot(record: RankRecord) -> RankSnapshot:
    rank, agent, layers = record.spec.rank, record.agent, (record.layout.start_layer, record.layout.end_layer)
    if not isinstance(record, LocalRank):
        return RankSnapshot(rank=rank, state="remote", agent=agent, library="", bytes=0, layers=layers)
    return RankSnapshot(
        rank=rank,
        state=record.state,
        agent=agent,
        library=record.library,
        bytes=sum(region.size_bytes for region in record.layout.regions),
        placement=_placement_snapshot(record) if record.is_readable else None,
        lanes=_transports_snapshots(record),
        worker_pid=record.pid,
        worker_uid=record.uid,
        layers=layers,
    )
