"""How movers reach each local rank's memory, and over which transports."""

from __future__ import annotations

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import EmitRecord
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.records import PlacementRecord, TransportsRecord
from kvxferd.ucx_log import ITSELF, TransportsUsed, data_transports, slow_transports
from kvxferd.wire.common import MeasuredPlacement


class Placements:
    """Keeps the placement and transports of a rank's present mover on the rank, and records each once."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context

    def reset(self, rank: LocalRank) -> None:
        """Forget what is known of the rank's last mover: it has another one."""
        rank.placement, rank.transports_used = MeasuredPlacement(), ()

    def record_placement(self, rank: LocalRank, placement: MeasuredPlacement) -> None:
        """Record how the mover bound the rank, or the result of its test read."""
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
            self._context.emit(EmitRecord(record))

    def record_transports(self, rank: LocalRank, lanes: TransportsUsed) -> None:
        """Record transports over which the rank's mover had not connected before."""
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
        self._context.emit(EmitRecord(record))


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
