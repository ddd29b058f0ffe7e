"""How movers reach each local rank's memory, and over which transports."""

from __future__ import annotations

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import EmitRecord
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.records import PlacementRecord, TransportsRecord
from kvxferd.ucx_log import ITSELF, TransportsUsed, data_transports, slow_transports
from kvxferd.wire.common import MeasuredPlacement


def record_placement(context: NodeContext, rank: LocalRank, placement: MeasuredPlacement) -> None:
    """Keep and record how the rank's mover bound its memory, or the result of its test read."""
    rank.placement = placement
    if is_proved(placement) or placement.why:
        record = PlacementRecord(
            engine_id=rank.spec.engine_id,
            rank=rank.spec.rank,
            placement=placement.kind,
            proved=is_proved(placement),
            why=placement.why,
            lanes=own_transports(rank),
            gigabytes_per_s=placement.gigabytes_per_s,
        )
        context.emit(EmitRecord(record))


def record_transports(context: NodeContext, rank: LocalRank, lanes: TransportsUsed) -> None:
    """Keep and record transports over which the rank's mover had not connected before."""
    rank.transports_used += (lanes,)
    if lanes.reach == ITSELF:
        return
    record = TransportsRecord(
        engine_id=rank.spec.engine_id,
        rank=rank.spec.rank,
        reach=lanes.reach,
        lanes=data_transports(lanes.transports),
        slow=lanes in slow_transports(rank.transports_used),
    )
    context.emit(EmitRecord(record))


def own_transports(rank: LocalRank) -> str:
    """Return the transports over which the rank's mover reads from itself; "" while they are not known."""

    if rank.placement.lanes:
        return rank.placement.lanes
    return next(
        (data_transports(lanes.transports) for lanes in rank.transports_used if lanes.reach == ITSELF), ""
    )


def is_proved(placement: MeasuredPlacement) -> bool:
    """Whether a read was checked and timed."""
    return placement.gigabytes_per_s > 0
