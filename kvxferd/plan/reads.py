"""What a plan reads from whom, summed up for people: explain, logs, the field's vocabulary."""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.ids import Rank
from kvxferd.layout import GroupKind, UnitRange
from kvxferd.plan.assignment import shared_fraction
from kvxferd.plan.plan import Plan


class Read(NamedTuple):
    """All that one plan reads from one remote rank, of one kind."""

    source: Rank
    kind: GroupKind
    layers: tuple[int, ...]  # ascending
    units: dict[str, tuple[UnitRange, ...]]  # by component, of all layers together
    bytes_per_token: float  # of an attention cache, over all shards of the tokens; 0 for a state
    bytes_per_state: int  # of one request's state; 0 for attention

    @property
    def start_layer(self) -> int:
        """The first layer read."""
        return self.layers[0]

    @property
    def end_layer(self) -> int:
        """The layer after the last one read."""
        return self.layers[-1] + 1


def plan_reads(plan: Plan) -> list[Read]:
    """Return the plan's reads in order of source, attention before state."""
    layers: dict[tuple[Rank, GroupKind], set[int]] = {}
    units: dict[tuple[Rank, GroupKind], dict[str, set[tuple[int, int]]]] = {}
    sizes: dict[tuple[Rank, GroupKind], float] = {}
    for lane in plan.group_reads:
        key = (lane.rank, lane.local.kind)
        items_per_token = shared_fraction(lane.local.shard, lane.remote.shard) / lane.granule_tokens
        for strip in lane.patterns:
            content = strip.local.num_chunks * strip.local.chunk_bytes * strip.num_units
            sizes[key] = sizes.get(key, 0.0) + content * len(strip.extents) * items_per_token
            for piece in strip.extents:
                layers.setdefault(key, set()).add(piece.layer)
                held = units.setdefault(key, {}).setdefault(piece.component, set())
                held.add((piece.first_unit, piece.first_unit + strip.num_units))
    return [
        Read(
            source,
            kind,
            tuple(sorted(layers[source, kind])),
            {name: _merge_ranges(ranges) for name, ranges in sorted(units[source, kind].items())},
            size if kind is GroupKind.ATTENTION else 0.0,
            0 if kind is GroupKind.ATTENTION else int(size),
        )
        for (source, kind), size in sorted(sizes.items(), key=lambda entry: entry[0])
    ]


def _merge_ranges(ranges: set[tuple[int, int]]) -> tuple[UnitRange, ...]:
    """Return the union of ranges as few as possible."""
    joined: list[UnitRange] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1].stop:
            joined[-1] = UnitRange(joined[-1].start, max(stop, joined[-1].stop))
        else:
            joined.append(UnitRange(start, stop))
    return tuple(joined)
