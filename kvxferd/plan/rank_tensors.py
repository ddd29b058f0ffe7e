"""One rank's cache tensors, as the sender's plan looks units up in them."""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.errors import Code, PlanError
from kvxferd.ids import Rank
from kvxferd.layout import CacheTensor, RankLayout, UnitRange
from kvxferd.plan.plan import BlockGeometry, Extent, Strides, block_geometry, strides_of


class TensorShape(NamedTuple):
    """What tensors of many layers share: everything but their offsets and units."""

    geometry: BlockGeometry
    strides: Strides
    granule_tokens: int


class HeldUnits(NamedTuple):
    """Where consecutive units begin on a rank."""

    shape: int  # index of the tensor's shape
    tensor_offset: int
    offset: int  # from the component's first unit


class RankTensors:
    """One rank's cache tensors by layer and component, and where units lie in them."""

    def __init__(self, rank: Rank, layout: RankLayout) -> None:
        self.rank = rank
        self.shapes: list[TensorShape] = []
        self._numbers: dict[TensorShape, int] = {}
        self._tensors = {(tensor.layer, tensor.component): tensor for tensor in layout.tensors}
        self._tensor_shapes: dict[tuple[int, str], int] = {}
        self._geometries = {group.name: block_geometry(group) for group in layout.groups}
        self._positions: dict[tuple[tuple[UnitRange, ...], int, int], int | None] = {}

    def find(self, extent: Extent, num_units: int) -> HeldUnits:
        """Return where an extent's units begin here; raises PlanError unless they are held in a row.

        The extent's own offsets, which the reader's planner computed, are not read.
        """
        tensor = self._tensors.get((extent.layer, extent.component))
        position = None
        if tensor is not None:
            key = (tensor.units, extent.first_unit, num_units)
            if key not in self._positions:
                self._positions[key] = _position(*key)
            position = self._positions[key]
        if tensor is None or position is None:
            raise PlanError(
                f"cannot plan what is sent: {num_units} units from {extent.first_unit} on of layer "
                f"{extent.layer}'s component {extent.component!r} do not lie in a row on rank {self.rank}",
                Code.LAYOUT_INCOMPATIBLE,
            )
        return HeldUnits(self._shape(tensor), tensor.offset, position * tensor.unit_stride)

    def _shape(self, tensor: CacheTensor) -> int:
        """Return the index of a tensor's shape in `shapes`."""
        name = (tensor.layer, tensor.component)
        if name not in self._tensor_shapes:
            shape = TensorShape(self._geometries[tensor.group], strides_of(tensor), tensor.granule_tokens)
            if shape not in self._numbers:
                self._numbers[shape] = len(self.shapes)
                self.shapes.append(shape)
            self._tensor_shapes[name] = self._numbers[shape]
        return self._tensor_shapes[name]


def _position(units: tuple[UnitRange, ...], first: int, count: int) -> int | None:
    """Return the position of unit `first`; None unless `count` units from it on are held in a row."""
    position, expected, left = 0, first, count
    found: int | None = None
    for held in units:
        if found is None and held.start <= first < held.stop:
            found = position + first - held.start
            expected, left = held.stop, count - (held.stop - first)
        elif found is not None and left > 0:
            if held.start != expected:
                return None
            expected, left = held.stop, left - (held.stop - held.start)
        position += held.stop - held.start
    return found if left <= 0 else None
