"""The layouts of remote ranks. Equal layouts are kept once, and checked once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvxferd.core.events import CheckedLayout
from kvxferd.ids import Digest
from kvxferd.layout import EngineSpec, RankLayout, digest_of
from kvxferd.layout.overlap import OverlapBudget
from kvxferd.layout.validate import validate_layout, validate_spec

# Engines of one model that are deployed alike have the same layouts: a rank's 40 tensors are 15 KiB of
# objects, and a thousand engines of 64 ranks would be a GiB of equal ones. Checking a layout takes a hundred
# times as long as its digest. 262,144 tensors are 100 MiB, and a hundred different deployments.
MAX_CACHED_TENSORS = 1 << 18


@dataclass(slots=True)
class _CachedLayout:
    """A layout, and the numbers of layers of the engines in which it was found valid."""

    layout: RankLayout
    checked_num_layers: set[int] = field(default_factory=set)


class LayoutCache:
    """Keeps the layouts that were used last. A layout that it returned stays valid after its eviction."""

    def __init__(self, max_tensors: int = MAX_CACHED_TENSORS) -> None:
        self._cached: OrderedDict[Digest, _CachedLayout] = OrderedDict()
        self._max_tensors = max_tensors
        self._num_tensors = 0

    def __len__(self) -> int:
        return len(self._cached)

    def get_checked(
        self, spec: EngineSpec, layout: RankLayout, places: OverlapBudget | None = None
    ) -> CheckedLayout:
        """Return the layout, or an equal one seen before. Raises LayoutError as `validate_layout` does."""
        digest = digest_of(layout)
        cached = self._cached.get(digest)
        if cached is None:
            validate_layout(spec, layout, places)
            self._add(digest, layout).checked_num_layers.add(spec.num_layers)
            return CheckedLayout(digest, layout, spec.num_layers)
        self._cached.move_to_end(digest)
        if spec.num_layers in cached.checked_num_layers:
            validate_spec(spec)  # of the engine's spec, a layout's check uses only the number of layers
        else:
            validate_layout(spec, layout, places)
            cached.checked_num_layers.add(spec.num_layers)
        return CheckedLayout(digest, cached.layout, spec.num_layers)

    def add_checked(self, checked: CheckedLayout) -> None:
        """Keep a layout that a thread has checked: `get_checked` does not check it again."""
        cached = self._cached.get(checked.digest) or self._add(checked.digest, checked.layout)
        cached.checked_num_layers.add(checked.num_layers)

    def _add(self, digest: Digest, layout: RankLayout) -> _CachedLayout:
        """Keep a layout, and evict the longest unused of too many."""
        added = self._cached[digest] = _CachedLayout(layout)
        self._num_tensors += len(layout.tensors)
        while self._num_tensors > self._max_tensors and len(self._cached) > 1:
            _, oldest = self._cached.popitem(last=False)
            self._num_tensors -= len(oldest.layout.tensors)
        return added
