"""A cache of plans, keyed by the digests of the specs and layouts that they were made from.

It is the only place that keeps plans: a registry of remote engines refers to a `KeptPlan`, which has its plan
until the cache evicts it. The plan is made again on the next use. What reads by a plan meanwhile refers to
the plan itself, and its bytes count until nothing does.

Each plan counts for an owner: the user whose pull it was made for, and the peer that the remote engine is of.
Where there is no room, the owner with the most bytes loses the plan that it has not used for longest. So one
owner that has ever new plans made evicts its own.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvxferd.errors import BusyError, Code, PlanError
from kvxferd.ids import Digest, Endpoint, Rank
from kvxferd.layout import EngineSpec, RankLayout, digest_of
from kvxferd.plan.plan import Plan, plan_bytes
from kvxferd.plan.planner import make_plan

# The plans of a node: those of the cache, and those evicted by which pulls still read. A plan of 80 layers
# has 160 extents for each rank that is read, 24 KiB: 160 MiB are 1,600 plans that read four ranks. With the
# layouts below (96 MiB) the cache takes 256 MiB at most.
MAX_PLAN_BYTES = 160 << 20
# Small ones: their keys and places are counted for 4 KiB each, 32 MiB of the limit above.
MAX_PLANS = 8192
# Every rank of every engine known: 64 ranks times tens of engines.
MAX_LAYOUTS = 8192
# A tensor is 375 bytes of objects, and a hostile peer's engine may have 65,536 that nobody else has: without
# a limit of these as well, 8,192 layouts were gigabytes.
MAX_LAYOUT_TENSORS = 1 << 18

# Refusals that are kept, and sizes of plans for which there was no room. A request for one of these costs no
# planning, which takes up to two seconds. A refusal has 1 KiB of text, and may have a megabyte.
MAX_REFUSALS = 1024
MAX_REFUSAL_CHARS = 1 << 20

RETRY_AFTER_S = 1.0  # where pulls that are under way have taken all room

_KeyPart = tuple[object, ...]
PlanKey = tuple[object, ...]


class PlanOwner(NamedTuple):
    """For whom a plan was made."""

    uid: int = 0  # the user of the local rank
    home: Endpoint = Endpoint("")  # the peer that the remote engine is of


ANY_OWNER = PlanOwner()


@dataclass(slots=True, eq=False)
class KeptPlan:
    """A plan for as long as the cache keeps it, and which ranks it reads for ever.

    The ranks are bits, because registries keep them: an engine may have 4,096 ranks that are read.
    """

    plan: Plan | None  # None: evicted
    sources: dict[int, int]  # by pp_rank: bit n is set where the rank of tp_rank n is read
    owner: PlanOwner = ANY_OWNER
    used_at: float = 0.0  # seconds of the caller's clock
    placed_at: float = 0.0  # `used_at` when it got its place in the order of eviction


class _Refusal(NamedTuple):
    message: str
    code: Code


class PlanJob(NamedTuple):
    """A plan that is to be made, by any thread: it takes up to two seconds, and touches no cache."""

    key: PlanKey
    spec: EngineSpec
    layout: RankLayout
    remote_spec: EngineSpec
    remote: Mapping[Rank, RankLayout]

    def make(self) -> Plan | PlanError:
        """Return the plan, or why there is none."""
        try:
            return make_plan(self.spec, self.layout, self.remote_spec, self.remote)
        except PlanError as error:
            return error


class PlanCache:
    """Plans by what they were made from, all of them of one owner unless one is given."""

    def __init__(
        self,
        max_plans: int = MAX_PLANS,
        max_layouts: int = MAX_LAYOUTS,
        max_tensors: int = MAX_LAYOUT_TENSORS,
        max_bytes: int = MAX_PLAN_BYTES,
    ) -> None:
        self.max_bytes = max_bytes
        self._max_plans = max_plans
        self._kept: dict[PlanKey, KeptPlan] = {}
        self._keys_of: dict[PlanOwner, OrderedDict[PlanKey, None]] = {}  # the longest unused about first
        # All plans that anything refers to, with the owner that each counts for.
        self._alive: dict[PlanKey, tuple[weakref.ref[Plan], PlanOwner]] = {}
        self._bytes_of: dict[PlanOwner, int] = {}
        self._refusals: OrderedDict[tuple[PlanKey, str], _Refusal] = OrderedDict()
        self._sizes: OrderedDict[PlanKey, int] = OrderedDict()  # of plans for which there was no room
        # By identity: a digest of 80 layers costs 100 us, and the same layout objects come again. The
        # reference to the layout keeps its id from being reused.
        self._layouts: OrderedDict[int, tuple[RankLayout, Digest]] = OrderedDict()
        self._max_layouts = max_layouts
        self._max_tensors = max_tensors
        self._num_tensors = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all plans that anything refers to."""
        return sum(self._bytes_of.values())

    def bytes_of(self, owner: PlanOwner) -> int:
        """Return the bytes of an owner's plans that anything refers to."""
        return self._bytes_of.get(owner, 0)

    def bytes_by_owner(self) -> Mapping[PlanOwner, int]:
        """Return the bytes of each owner that has any."""
        return self._bytes_of

    def digest(self, remote: Mapping[Rank, RankLayout]) -> Digest:
        """Return the digest of an engine's layouts, of each rank its own."""
        return digest_of(tuple((rank, self._digest(remote[rank])) for rank in sorted(remote)))

    def get(
        self,
        spec: EngineSpec,
        layout: RankLayout,
        remote_spec: EngineSpec,
        remote: Mapping[Rank, RankLayout],
        digest: Digest | None = None,
    ) -> Plan:
        """Return the plan of `make_plan`, from the cache if it is there. Raises what `keep` raises."""
        plan = self.keep(spec, layout, remote_spec, remote, digest).plan
        assert plan is not None
        return plan

    def keep(
        self,
        spec: EngineSpec,
        layout: RankLayout,
        remote_spec: EngineSpec,
        remote: Mapping[Rank, RankLayout],
        digest: Digest | None = None,
        *,
        owner: PlanOwner = ANY_OWNER,
        now: float = 0.0,
    ) -> KeptPlan:
        """Return the plan of `make_plan`, from the cache if it is there, for as long as it is there.

        `digest`: of `remote`, where the caller has it. Raises what `make_plan` raises, and BusyError
        where pulls read by so many plans of the owner that there is no room for another one.
        """
        job = self.job(spec, layout, remote_spec, remote, digest)
        return self.find(job, owner, now) or self.put(job, job.make(), owner, now)

    def job(
        self,
        spec: EngineSpec,
        layout: RankLayout,
        remote_spec: EngineSpec,
        remote: Mapping[Rank, RankLayout],
        digest: Digest | None = None,
    ) -> PlanJob:
        """Return what is to be done where `find` finds no plan."""
        of_remote = self.digest(remote) if digest is None else digest
        key = (_reader_key(spec), self._digest(layout), _source_key(remote_spec), of_remote)
        return PlanJob(key, spec, layout, remote_spec, remote)

    def find(self, job: PlanJob, owner: PlanOwner = ANY_OWNER, now: float = 0.0) -> KeptPlan | None:
        """Return a plan that is there; None: it is to be made.

        Raises the PlanError that `put` was given for it, and BusyError where it was made already and there
        is still no room: neither costs planning again.
        """
        key = job.key
        kept = self._kept.get(key)
        if kept is not None:
            self._keys_of[kept.owner].move_to_end(key)
            kept.used_at = kept.placed_at = max(kept.used_at, now)
            return kept
        plan, counted_for = self._find_alive(key)
        if plan is not None and counted_for is not None:
            return self._keep(key, plan, counted_for, owner, now)
        refusal_key = (key, job.remote_spec.engine_id)
        if (refusal := self._refusals.get(refusal_key)) is not None:
            self._refusals.move_to_end(refusal_key)
            raise PlanError(refusal.message, refusal.code)
        if key in self._sizes:
            self._make_room(owner, self._sizes[key])
        return None

    def put(
        self, job: PlanJob, made: Plan | PlanError, owner: PlanOwner = ANY_OWNER, now: float = 0.0
    ) -> KeptPlan:
        """Keep what became of a job. Raises the PlanError, or BusyError where there is no room."""
        key = job.key
        if isinstance(made, PlanError):
            refusal = _Refusal(str(made), made.code)
            self._keep_refusal((key, job.remote_spec.engine_id), refusal)
            raise PlanError(refusal.message, refusal.code)
        if (kept := self.find(job, owner, now)) is not None:
            return kept  # made twice at once
        size = plan_bytes(made)
        self._sizes[key] = size
        if len(self._sizes) > MAX_REFUSALS:
            self._sizes.popitem(last=False)
        self._make_room(owner, size)
        del self._sizes[key]
        self._alive[key] = (weakref.ref(made), owner)
        self._bytes_of[owner] = self.bytes_of(owner) + size
        weakref.finalize(made, self._release, key, owner, size).atexit = False
        return self._keep(key, made, owner, owner, now)

    def _keep(
        self, key: PlanKey, plan: Plan, counted_for: PlanOwner, owner: PlanOwner, now: float
    ) -> KeptPlan:
        while len(self._kept) >= self._max_plans and any(map(self._evict, self.losers(owner, 0))):
            pass
        kept = self._kept[key] = KeptPlan(plan, _rank_bits(plan), counted_for, now, now)
        self._keys_of.setdefault(counted_for, OrderedDict())[key] = None
        return kept

    def has_room(self, owner: PlanOwner, num_bytes: int) -> bool:
        """Whether the owner may have so many bytes more."""
        return self.num_bytes + num_bytes <= self.max_bytes

    def losers(self, owner: PlanOwner, num_bytes: int) -> list[PlanOwner]:
        """Return the owners that lose plans where this one has no room for so many bytes, the first first."""
        return sorted(self._keys_of, key=self.bytes_of, reverse=True)

    def _find_alive(self, key: PlanKey) -> tuple[Plan | None, PlanOwner | None]:
        """Return a plan that was evicted and that a pull reads by, and the owner that it counts for."""
        reference, owner = self._alive.get(key, (None, None))
        return (None if reference is None else reference()), owner

    def _make_room(self, owner: PlanOwner, num_bytes: int) -> None:
        """Evict plans until the owner may have so many bytes more; raises BusyError where it may not."""
        while not self.has_room(owner, num_bytes):
            evicted = next((loser for loser in self.losers(owner, num_bytes) if self._evict(loser)), None)
            if evicted is None:
                raise BusyError(
                    f"cannot keep a plan of {num_bytes} bytes: pulls read by plans of {self.num_bytes} bytes "
                    f"of {self.max_bytes}, {self.bytes_of(owner)} of them for uid {owner.uid} from "
                    f"{owner.home or 'here'}; try again in {RETRY_AFTER_S:g} s",
                    RETRY_AFTER_S,
                )

    def _evict(self, owner: PlanOwner) -> bool:
        """Evict the plan that the owner has not used for longest; return whether it had one."""
        keys = self._keys_of.get(owner)
        while keys:
            key = next(iter(keys))
            kept = self._kept[key]
            if kept.used_at > kept.placed_at:  # registries note a use without a word to the cache
                kept.placed_at = kept.used_at
                keys.move_to_end(key)
                continue
            del keys[key], self._kept[key]
            if not keys:
                del self._keys_of[owner]
            kept.plan = None
            return True
        return False

    def _release(self, key: PlanKey, owner: PlanOwner, num_bytes: int) -> None:
        del self._alive[key]
        left = self._bytes_of[owner] - num_bytes
        if left:
            self._bytes_of[owner] = left
        else:
            del self._bytes_of[owner]

    def _keep_refusal(self, key: tuple[PlanKey, str], refusal: _Refusal) -> None:
        self._refusals[key] = refusal
        num_chars = sum(len(kept.message) for kept in self._refusals.values())
        while len(self._refusals) > MAX_REFUSALS or num_chars > MAX_REFUSAL_CHARS:
            num_chars -= len(self._refusals.popitem(last=False)[1].message)

    def _digest(self, layout: RankLayout) -> Digest:
        known = self._layouts.get(id(layout))
        if known is None:
            known = self._layouts[id(layout)] = (layout, digest_of(layout))
            self._num_tensors += len(layout.tensors)
            while len(self._layouts) > self._max_layouts or self._num_tensors > self._max_tensors:
                _, (oldest, _) = self._layouts.popitem(last=False)
                self._num_tensors -= len(oldest.tensors)
        return known[1]


def _rank_bits(plan: Plan) -> dict[int, int]:
    bits: dict[int, int] = {}
    for rank in plan.sources:
        bits[rank.pp_rank] = bits.get(rank.pp_rank, 0) | 1 << rank.tp_rank
    return bits


def _reader_key(spec: EngineSpec) -> _KeyPart:
    """Return the fields of the reader's spec that a plan depends on."""
    return (spec.rank, spec.tp_size, spec.num_layers, spec.num_kv_heads, spec.fingerprint)


def _source_key(spec: EngineSpec) -> _KeyPart:
    """Return the fields of the source's spec that a plan depends on."""
    return (spec.tp_size, spec.num_layers, spec.num_kv_heads, spec.fingerprint)
