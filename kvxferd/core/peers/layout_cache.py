"""The layouts of remote ranks. Equal layouts are kept once, and checked once."""

from __future__ import annotations

from collections import OrderedDict

from kvxferd.core.events import CheckedLayout
from kvxferd.ids import Digest
from kvxferd.layout import EngineSpec, RankLayout, digest_of
from kvxferd.layout.validate import validate_layout, validate_spec

# Engines of one model that are deployed alike have the same layouts: a rank's 40 tensors are 15 KiB of
# objects, and a thousand engines of 64 ranks would be a GiB of equal ones. Checking a layout takes a hundred
# times as long as its digest. 262,144 tensors are 100 MiB, and a hundred different deployments.
MAX_CACHED_TENSORS = 1 << 18


class LayoutCache:
    """Keeps the layouts that were used last. A layout that it returned stays valid after its eviction.

    Of an engine's spec, a layout's check uses only the number of layers: a layout is kept for each.
    """

    def __init__(self, max_tensors: int = MAX_CACHED_TENSORS) -> None:
        self._cached: OrderedDict[tuple[Digest, int], RankLayout] = OrderedDict()
        self._max_tensors = max_tensors
        self._num_tensors = 0

    def __len__(self) -> int:
        return len(self._cached)

    def get_checked(self, spec: EngineSpec, layout: RankLayout) -> CheckedLayout:
        """Return the layout, or an equal one seen before. Raises LayoutError as `validate_layout` does."""
        digest = digest_of(layout)
        cached = self._cached.get((digest, spec.num_layers))
        if cached is None:
            validate_layout(spec, layout)
        else:
            validate_spec(spec)
        checked = CheckedLayout(digest, cached or layout, spec.num_layers)
        self.add_checked(checked)
        return checked

    def add_checked(self, checked: CheckedLayout) -> None:
        """Keep a layout that a thread has checked, and evict the longest unused of too many."""
        key = (checked.digest, checked.num_layers)
        if key in self._cached:
            self._cached.move_to_end(key)
            return
        self._cached[key] = checked.layout
        self._num_tensors += len(checked.layout.tensors)
        while self._num_tensors > self._max_tensors and len(self._cached) > 1:
            _, oldest = self._cached.popitem(last=False)
            self._num_tensors -= len(oldest.tensors)
