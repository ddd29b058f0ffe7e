"""A cache of plans, keyed by the digests of the specs and layouts that they were made from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from kvxferd.ids import Digest, Rank
from kvxferd.layout import EngineSpec, RankLayout, digest_of
from kvxferd.plan.plan import Plan
from kvxferd.plan.planner import make_plan

# One rank of a TP=16, PP=4 engine against 64 ranks has a plan of 100 KiB at most; a node has 8 ranks
# and reads tens of engines with a few distinct layouts.
MAX_PLANS = 256
# Every rank of every engine known: 64 ranks times tens of engines.
MAX_LAYOUTS = 8192
# A tensor is 375 bytes of objects, and a hostile peer's engine may have 65,536 that nobody else has: without
# a limit of these as well, 8,192 layouts were gigabytes.
MAX_LAYOUT_TENSORS = 1 << 18

# The extents of all plans, 100 to 300 bytes each: 64 MiB. 256 plans with 400 are 102,400; the plan of a
# hostile layout may have 65,536.
MAX_PLAN_EXTENTS = 1 << 18

LayoutDigests = tuple[tuple[Rank, Digest], ...]  # of an engine's ranks, the lowest first
_KeyPart = tuple[object, ...]


class PlanCache:
    """Plans by what they were made from. The least recently used is evicted first."""

    def __init__(
        self,
        max_plans: int = MAX_PLANS,
        max_layouts: int = MAX_LAYOUTS,
        max_tensors: int = MAX_LAYOUT_TENSORS,
    ) -> None:
        self._plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
        # By identity: a digest of 80 layers costs 100 us, and the same layout objects come again. The
        # reference to the layout keeps its id from being reused.
        self._layouts: OrderedDict[int, tuple[RankLayout, Digest]] = OrderedDict()
        self._max_plans = max_plans
        self._max_layouts = max_layouts
        self._max_tensors = max_tensors
        self._num_tensors = 0
        self._num_extents = 0
        # Engines that are deployed alike share one tuple: that of 64 ranks is 5 KiB.
        self._shared: OrderedDict[LayoutDigests, LayoutDigests] = OrderedDict()
        self._num_shared_ranks = 0

    def __len__(self) -> int:
        return len(self._plans)

    def digests(self, remote: Mapping[Rank, RankLayout]) -> LayoutDigests:
        """Return the digest of each rank's layout; the same object for equal ones, unless it was evicted."""
        digests = tuple((rank, self._digest(remote[rank])) for rank in sorted(remote))
        shared = self._shared.get(digests)
        if shared is not None:
            self._shared.move_to_end(shared)
            return shared
        self._shared[digests] = digests
        self._num_shared_ranks += len(digests)
        while self._num_shared_ranks > self._max_layouts and len(self._shared) > 1:
            self._num_shared_ranks -= len(self._shared.popitem(last=False)[0])
        return digests

    def get(
        self,
        spec: EngineSpec,
        layout: RankLayout,
        remote_spec: EngineSpec,
        remote: Mapping[Rank, RankLayout],
        digests: LayoutDigests | None = None,
    ) -> Plan:
        """Return the plan of `make_plan`, from the cache if it is there. Raises what `make_plan` raises.

        `digests`: of `remote`, where the caller has them.
        """
        of_remote = self.digests(remote) if digests is None else digests
        key = (_reader_key(spec), self._digest(layout), _source_key(remote_spec), of_remote)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make_plan(spec, layout, remote_spec, remote)
            self._num_extents += plan.num_extents
            while len(self._plans) > self._max_plans or (
                self._num_extents > MAX_PLAN_EXTENTS and len(self._plans) > 1
            ):
                self._num_extents -= self._plans.popitem(last=False)[1].num_extents
        else:
            self._plans.move_to_end(key)
        return plan

    def _digest(self, layout: RankLayout) -> Digest:
        known = self._layouts.get(id(layout))
        if known is None:
            known = self._layouts[id(layout)] = (layout, digest_of(layout))
            self._num_tensors += len(layout.tensors)
            while len(self._layouts) > self._max_layouts or self._num_tensors > self._max_tensors:
                _, (oldest, _) = self._layouts.popitem(last=False)
                self._num_tensors -= len(oldest.tensors)
        return known[1]


def _reader_key(spec: EngineSpec) -> _KeyPart:
    """Return the fields of the reader's spec that a plan depends on."""
    return (spec.rank, spec.tp_size, spec.num_layers, spec.num_kv_heads, spec.fingerprint)


def _source_key(spec: EngineSpec) -> _KeyPart:
    """Return the fields of the source's spec that a plan depends on."""
    return (spec.tp_size, spec.num_layers, spec.num_kv_heads, spec.fingerprint)
