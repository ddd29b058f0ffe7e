"""A plan's reads summed up by remote rank, for `kvxferd explain` and for in-engine connectors' terms."""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.ids import Rank
from kvxferd.layout import GroupKind, UnitRange
from kvxferd.plan.assignment import shared_fraction
from kvxferd.plan.plan import GroupRead, Plan


class Read(NamedTuple):
    """Everything of one kind that a plan reads from one remote rank."""

    source: Rank
    kind: GroupKind
    layers: tuple[int, ...]  # ascending
    units: dict[str, tuple[UnitRange, ...]]  # by component, of all layers together
    bytes_per_token: float  # of an attention cache, over all shards of the tokens; 0 for a state
    bytes_per_state: int  # of one request's state; 0 for attention

    @property
    def start_layer(self) -> int:
        """Return the first layer read."""
        return self.layers[0]

    @property
    def end_layer(self) -> int:
        """Return the layer after the last one read."""
        return self.layers[-1] + 1


class ReadSummary:
    """Sums up group reads one by one: those of a large plan take 100 ms together."""

    def __init__(self) -> None:
        self._layers: dict[tuple[Rank, GroupKind], set[int]] = {}
        self._units: dict[tuple[Rank, GroupKind], dict[str, set[tuple[int, int]]]] = {}
        self._sizes: dict[tuple[Rank, GroupKind], float] = {}

    def add(self, read: GroupRead) -> None:
        """Count one group read of a plan."""
        key = (read.rank, read.local.kind)
        items_per_token = float(shared_fraction(read.local.shard, read.remote.shard) / read.granule_tokens)
        layers, units = self._layers.setdefault(key, set()), self._units.setdefault(key, {})
        for pattern in read.patterns:
            content = pattern.local.num_chunks * pattern.local.chunk_bytes * pattern.num_units
            size = content * len(pattern.extents) * items_per_token
            self._sizes[key] = self._sizes.get(key, 0.0) + size
            for extent in pattern.extents:
                layers.add(extent.layer)
                held = units.setdefault(extent.component, set())
                held.add((extent.first_unit, extent.first_unit + pattern.num_units))

    def reads(self) -> list[Read]:
        """Return the reads in order of source, attention before state."""
        return [
            Read(
                source,
                kind,
                tuple(sorted(self._layers[source, kind])),
                {name: _merge_ranges(ranges) for name, ranges in sorted(self._units[source, kind].items())},
                size if kind is GroupKind.ATTENTION else 0.0,
                0 if kind is GroupKind.ATTENTION else int(size),
            )
            for (source, kind), size in sorted(self._sizes.items(), key=lambda entry: entry[0])
        ]


def plan_reads(plan: Plan) -> list[Read]:
    """Return the plan's reads in order of source, attention before state."""
    summary = ReadSummary()
    for read in plan.group_reads:
        summary.add(read)
    return summary.reads()


def _merge_ranges(ranges: set[tuple[int, int]]) -> tuple[UnitRange, ...]:
    """Return the union of some ranges as the fewest ranges."""
    joined: list[UnitRange] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1].stop:
            joined[-1] = UnitRange(joined[-1].start, max(stop, joined[-1].stop))
        else:
            joined.append(UnitRange(start, stop))
    return tuple(joined)
