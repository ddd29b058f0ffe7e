"""A node's state as plain structs."""

from __future__ import annotations

from kvxferd.core.registry import LocalEngine, LocalRank, RankRecord, Registry
from kvxferd.core.snapshot import EngineSnapshot, RankSnapshot, TransferSnapshot
from kvxferd.core.source import Source
from kvxferd.ids import Endpoint


def show_transfers(source: Source, registry: Registry, now: float) -> tuple[TransferSnapshot, ...]:
    """Every live transfer of this node's engines."""
    shown = []
    for transfer in source.transfers.live.values():
        engine = registry.get(transfer.engine)
        is_ready = engine is not None and source.is_ready(transfer, engine)
        shown.append(transfer.snapshot(now, is_ready))
    return tuple(shown)


def show_engines(registry: Registry, endpoint: Endpoint) -> tuple[EngineSnapshot, ...]:
    """Every engine of which a rank is known here. `endpoint`: this daemon's."""
    return tuple(_engine(engine, registry.is_home(engine.spec), endpoint) for engine in registry)


def _engine(engine: LocalEngine, is_home: bool, endpoint: Endpoint) -> EngineSnapshot:
    lacking = tuple(engine.lacking())
    return EngineSnapshot(
        engine_id=engine.key.engine_id,
        generation=engine.key.generation,
        pp_size=engine.spec.pp_size,
        tp_size=engine.spec.tp_size,
        num_layers=engine.spec.num_layers,
        complete=is_home and not lacking,
        lacking=lacking if is_home else (),
        problem="" if is_home else "aggregated at its home",
        home=engine.spec.home or endpoint,
        ranks=tuple(_rank(record) for _, record in sorted(engine.ranks.items())),
    )


def _rank(record: RankRecord) -> RankSnapshot:
    local = isinstance(record, LocalRank)
    return RankSnapshot(
        rank=record.spec.rank,
        state=record.state if isinstance(record, LocalRank) else "remote",
        agent=record.agent,
        library=record.library if isinstance(record, LocalRank) else "",
        bytes=sum(region.size_bytes for region in record.layout.regions) if local else 0,
        layers=(record.layout.start_layer, record.layout.end_layer),
    )
