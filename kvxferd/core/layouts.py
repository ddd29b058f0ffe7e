"""Layouts learnt from other daemons, each kept and checked once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvxferd.ids import Digest
from kvxferd.layout import EngineSpec, RankLayout, digest_of
from kvxferd.layout.overlap import Places
from kvxferd.layout.validate import validate_layout, validate_spec

# Engines of one model, deployed alike, have the same layouts: a rank's 40 tensors are 15 KiB of
# objects, and a thousand engines of 64 ranks would be a GiB of equal ones. Checking one takes a
# hundred times as long as its digest. 262,144 tensors are 100 MiB, and a hundred different deployments.
MAX_TENSORS_KEPT = 1 << 18


@dataclass(slots=True)
class _Kept:
    """A layout, and in engines of how many layers it has been found to be right."""

    layout: RankLayout
    checked_for: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class CheckedLayout:
    """A layout that `validate_layout` has found to be right in an engine of so many layers."""

    digest: Digest
    layout: RankLayout
    num_layers: int


class Layouts:
    """The layouts seen last. What was given out stays valid when it is no longer kept here."""

    def __init__(self, max_tensors: int = MAX_TENSORS_KEPT) -> None:
        self._kept: OrderedDict[Digest, _Kept] = OrderedDict()
        self._max_tensors = max_tensors
        self._num_tensors = 0

    def __len__(self) -> int:
        return len(self._kept)

    def checked(self, spec: EngineSpec, layout: RankLayout, places: Places | None = None) -> RankLayout:
        """Return the layout, or an equal one seen before. Raises LayoutError as `validate_layout` does."""
        digest = digest_of(layout)
        kept = self._kept.get(digest)
        if kept is None:
            validate_layout(spec, layout, places)
            kept = self._kept[digest] = _Kept(layout, {spec.num_layers})
            self._num_tensors += len(layout.tensors)
            self._forget_oldest()
            return layout
        self._kept.move_to_end(digest)
        if spec.num_layers in kept.checked_for:
            validate_spec(spec)  # of an engine, a layout's check asks for nothing but its layers
        else:
            validate_layout(spec, layout, places)
            kept.checked_for.add(spec.num_layers)
        return kept.layout

    def learn(self, checked: CheckedLayout) -> None:
        """Keep a layout that was checked elsewhere: `checked` returns it without checking it again."""
        kept = self._kept.get(checked.digest)
        if kept is None:
            kept = self._kept[checked.digest] = _Kept(checked.layout)
            self._num_tensors += len(checked.layout.tensors)
            self._forget_oldest()
        kept.checked_for.add(checked.num_layers)

    def _forget_oldest(self) -> None:
        while self._num_tensors > self._max_tensors and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_tensors -= len(oldest.layout.tensors)
