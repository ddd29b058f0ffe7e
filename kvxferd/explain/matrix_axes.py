"""The ranks along one side of the matrix: their stages, their layers, and which heads each holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvxferd.explain.engine_spec_parser import EngineDescription
from kvxferd.explain.formatting import format_layers, format_numbers, format_unit_ranges
from kvxferd.ids import Rank
from kvxferd.layout import GroupKind, RankLayout, UnitRange

# The first of these components that a rank holds represents its share.
_SHARE_COMPONENTS = {
    GroupKind.ATTENTION: ("k", "kv", "latent"),
    GroupKind.STATE: ("ssm", "conv.x"),
}
_UNIT_NAMES = {"k": "heads", "kv": "heads", "latent": "latent", "ssm": "state", "conv.x": "channels"}


@dataclasses.dataclass(frozen=True)
class UnitAxis:
    """The part of one axis of units that every rank holds, for the staircase of shares."""

    kind: GroupKind
    unit_name: str
    total: int
    held: dict[Rank, tuple[UnitRange, ...]]

    def label(self, rank: Rank) -> str:
        """Return the units of a rank: ``0-3``."""
        return format_unit_ranges(self.held.get(rank, ()))


@dataclasses.dataclass(frozen=True)
class PipelineStage:
    """One pipeline stage: neighbouring ranks of the axis."""

    pp_rank: int
    first: int  # index of its first rank on the axis
    size: int
    start_layer: int
    end_layer: int

    def labels(self) -> tuple[str, ...]:
        """Return its labels, the longest first."""
        layers = range(self.start_layer, self.end_layer)
        if not layers:
            return (f"stage {self.pp_rank}: no layers", f"pp{self.pp_rank}: none", str(self.pp_rank))
        return (
            f"stage {self.pp_rank}: layers {format_numbers(layers)}",
            f"pp{self.pp_rank}: {format_layers(layers)}",
            format_layers(layers),
            f"pp{self.pp_rank}",
            str(self.pp_rank),
        )


def pipeline_stages(engine: EngineDescription) -> list[PipelineStage]:
    """Return an engine's stages in the order of its ranks."""
    ranks = sorted(engine.ranks)
    found = []
    for pp_rank in sorted({rank.pp_rank for rank in ranks}):
        own = [index for index, rank in enumerate(ranks) if rank.pp_rank == pp_rank]
        layout = engine.ranks[ranks[own[0]]][1]
        found.append(PipelineStage(pp_rank, own[0], len(own), layout.start_layer, layout.end_layer))
    return found


def unit_axes(engine: EngineDescription, kinds: Sequence[GroupKind]) -> list[UnitAxis]:
    """Return the axes of units by which an engine's cache is divided, one for each kind it has."""
    found = []
    for kind in kinds:
        layouts = {rank: layout for rank, (_, layout) in engine.ranks.items()}
        name = next(
            (n for n in _SHARE_COMPONENTS[kind] if any(_holds(layout, n) for layout in layouts.values())),
            None,
        )
        if name is None:
            continue
        held = {rank: _units(layout, name) for rank, layout in layouts.items()}
        total = max((r.stop for ranges in held.values() for r in ranges), default=0)
        if total:
            found.append(UnitAxis(kind, _UNIT_NAMES[name], total, held))
    return found


def _holds(layout: RankLayout, component: str) -> bool:
    return any(tensor.component == component for tensor in layout.tensors)


def _units(layout: RankLayout, component: str) -> tuple[UnitRange, ...]:
    return next((tensor.units for tensor in layout.tensors if tensor.component == component), ())
