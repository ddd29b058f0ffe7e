"""How each local rank's memory is reached, and over what: what movers found out, and what it means."""

from __future__ import annotations

from kvxferd.core.effects import Observed
from kvxferd.core.lanes import ITSELF, Lanes, for_data, slow_ones
from kvxferd.core.moment import Moment
from kvxferd.core.registry import LocalRank
from kvxferd.core.snapshot import LanesRecord, PlacementRecord
from kvxferd.wire.common import Placement


class Placements:
    """Keeps what is known of a rank's present mover on the rank; each finding is told once."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment

    def mover_taken(self, rank: LocalRank) -> None:
        """Another mover: what was known of the last one is void."""
        rank.placement, rank.lanes = Placement(), ()

    def found(self, rank: LocalRank, placement: Placement) -> None:
        """The mover has bound the rank, or has proved what it had bound."""
        rank.placement = placement
        if is_proved(placement) or placement.why:
            record = PlacementRecord(
                engine_id=rank.spec.engine_id,
                rank=rank.spec.rank,
                placement=placement.kind,
                proved=is_proved(placement),
                why=placement.why,
                lanes=lanes_of(rank),
                gigabytes_per_s=placement.gigabytes_per_s,
            )
            self._moment.do(Observed(record))

    def lanes_seen(self, rank: LocalRank, lanes: Lanes) -> None:
        """The rank's mover has connected in a way in which it had not before."""
        rank.lanes += (lanes,)
        if lanes.reach == ITSELF:
            return
        record = LanesRecord(
            engine_id=rank.spec.engine_id,
            rank=rank.spec.rank,
            reach=lanes.reach,
            lanes=for_data(lanes.transports),
            slow=lanes in slow_ones(rank.lanes),
        )
        self._moment.do(Observed(record))


def lanes_of(rank: LocalRank) -> str:
    """Return by what the rank's mover reads from itself; "" while that is not known."""
    if rank.placement.lanes:
        return rank.placement.lanes
    return next((for_data(lanes.transports) for lanes in rank.lanes if lanes.reach == ITSELF), "")


def is_proved(placement: Placement) -> bool:
    """Whether a read was checked and timed."""
    return placement.gigabytes_per_s > 0
