"""A plan's reads summed up by remote rank, for `kvxferd explain`."""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.ids import Rank
from kvxferd.layout import GroupKind, UnitRange
from kvxferd.plan.plan import Plan


class Read(NamedTuple):
    """Everything of one kind that a plan reads from one remote rank."""

    source: Rank
    kind: GroupKind
    layers: tuple[int, ...]  # ascending
    units: dict[str, tuple[UnitRange, ...]]  # by component, of all layers together

    @property
    def start_layer(self) -> int:
        """Return the first layer read."""
        return self.layers[0]

    @property
    def end_layer(self) -> int:
        """Return the layer after the last one read."""
        return self.layers[-1] + 1


def plan_reads(plan: Plan) -> list[Read]:
    """Return the plan's reads in order of source, attention before state."""
    layers: dict[tuple[Rank, GroupKind], set[int]] = {}
    units: dict[tuple[Rank, GroupKind], dict[str, set[tuple[int, int]]]] = {}
    for read in plan.group_reads:
        key = (read.rank, read.local.kind)
        for pattern in read.patterns:
            for extent in pattern.extents:
                layers.setdefault(key, set()).add(extent.layer)
                held = units.setdefault(key, {}).setdefault(extent.component, set())
                held.add((extent.first_unit, extent.first_unit + pattern.num_units))
    return [
        Read(
            source,
            kind,
            tuple(sorted(layers[source, kind])),
            {name: _merge_ranges(ranges) for name, ranges in sorted(units[source, kind].items())},
        )
        for source, kind in sorted(layers)
    ]


def _merge_ranges(ranges: set[tuple[int, int]]) -> tuple[UnitRange, ...]:
    """Return the union of some ranges as the fewest ranges."""
    joined: list[UnitRange] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1].stop:
            joined[-1] = UnitRange(joined[-1].start, max(stop, joined[-1].stop))
        else:
            joined.append(UnitRange(start, stop))
    return tuple(joined)
