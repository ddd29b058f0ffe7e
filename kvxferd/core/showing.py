"""A node's state as plain structs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxferd.core.registry import LocalEngine, LocalRank, RankRecord
from kvxferd.core.snapshot import EngineSnapshot, NodeSnapshot, RankSnapshot

if TYPE_CHECKING:
    from kvxferd.core.node import Node


def take_snapshot(node: Node) -> NodeSnapshot:
    """Everything, as of the last event."""
    now = node.moment.now
    transfers = []
    for transfer in node.source.transfers.live.values():
        engine = node.registry.get(transfer.engine)
        is_ready = engine is not None and node.source.is_ready(transfer, engine)
        transfers.append(transfer.snapshot(now, is_ready))
    return NodeSnapshot(
        boot=node.moment.boot,
        endpoint=node.moment.endpoint,
        draining=node.moment.draining,
        num_sessions=len(node.sessions),
        num_quarantined=node.pulls.num_quarantined,
        quarantined_bytes=node.pulls.quarantined_bytes,
        engines=tuple(_engine(node, engine) for engine in node.registry),
        peers=node.peers.snapshot(node.holds.num_grants()),
        transfers=tuple(transfers),
        pulls=node.pulls.snapshot(),
    )


def _engine(node: Node, engine: LocalEngine) -> EngineSnapshot:
    is_home = node.registry.is_home(engine.spec)
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
        home=engine.spec.home or node.moment.endpoint,
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
