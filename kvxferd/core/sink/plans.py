"""The plans of a node: made beside its loop, kept for grants that read by them, and for the next ones.

Ranks with equal layouts share a plan. It is charged to the user for whom it was made, from then until it is
evicted: no grant reads by it, and somebody needs the room.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import MakePlan
from kvxferd.core.limits.ledger import Charge
from kvxferd.core.limits.table import PLAN_BYTES
from kvxferd.core.peers.remote_engine import RemoteEngine
from kvxferd.core.sink.held_grant import HeldGrant
from kvxferd.errors import KvxferdError, PlanError
from kvxferd.ids import EngineId
from kvxferd.plan import PlanJob, PlanKey, PlannedReads
from kvxferd.wire.common import Refusal
from kvxferd.wire.limits import MAX_SENTENCE_CHARS

# A request that is refused again costs no planning, which takes up to two seconds. A refusal has 2 KB of text
# at most.
MAX_REFUSALS = 1024


@dataclass(slots=True)
class _KeptReads:
    """Reads that are planned, the user whom they are charged to, and how many grants read by them."""

    reads: PlannedReads
    uid: int
    num_grants: int = 0


class Plans:
    """Finds the reads of grants. Those without room are refused; nobody's running pulls lose theirs."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._share = context.ledger[PLAN_BYTES]
        self._kept: dict[PlanKey, _KeptReads] = {}
        # Those that no grant reads by, by user, the longest unused first.
        self._unused: dict[int, OrderedDict[PlanKey, None]] = {}
        # Why there is no plan, or the bytes of one that had no room. The text names the engine.
        self._refusals: OrderedDict[tuple[PlanKey, EngineId], Refusal | int] = OrderedDict()
        self._waiting: dict[PlanKey, list[HeldGrant]] = {}  # for what is being planned

    def acquire(self, grant: HeldGrant, remote: RemoteEngine) -> PlannedReads | None:
        """Return what the grant's rank reads of the engine, which its topology has from now on.

        The grant reads by it until `release`. None: it is being planned, and `plan_made` returns the grant.
        Raises what `register_remote_engine` raises; PlanError where the layouts cannot be read from one
        another, BusyError where grants read by so many plans that there is no room for another one.
        """
        topology, now, home = grant.rank.topology, self._context.now, grant.ref.endpoint
        topology.expire(now - self._context.settings.transfer.max_hold_s)
        find = partial(self._find_or_plan, grant)
        reads = topology.register_remote_engine(remote, find, home=home, now=now)
        if reads is None:
            return None
        kept = self._kept[reads.key]
        if not kept.num_grants:
            self._remove_unused(kept)
        kept.num_grants += 1
        return reads

    def release(self, reads: PlannedReads) -> None:
        """Count one grant less that reads by them."""
        kept = self._kept[reads.key]
        kept.num_grants -= 1
        if not kept.num_grants:
            self._unused.setdefault(kept.uid, OrderedDict())[reads.key] = None

    def plan_made(self, job: PlanJob, made: PlannedReads | KvxferdError) -> list[HeldGrant]:
        """Keep a plan, for the first user who waits and has room for it; return the grants that waited."""
        waiting = self._waiting.pop(job.key, [])
        if isinstance(made, PlanError):
            self._refuse(job, Refusal(made.code, made.message[:MAX_SENTENCE_CHARS]))
        elif isinstance(made, PlannedReads):
            users = dict.fromkeys(grant.rank.uid for grant in waiting)
            uid = next((uid for uid in users if self._make_room(uid, made.num_bytes)), None)
            if uid is None:
                self._refuse(job, made.num_bytes)
            else:
                self._share.add(uid, made.num_bytes)
                self._kept[job.key] = _KeptReads(made, uid)
                self._unused.setdefault(uid, OrderedDict())[job.key] = None
        return waiting

    def _find_or_plan(self, grant: HeldGrant, job: PlanJob) -> PlannedReads | None:
        if (kept := self._kept.get(job.key)) is not None:
            return kept.reads
        engine_id, uid = job.remote_spec.engine_id, grant.rank.uid
        refused = self._refusals.pop((job.key, engine_id), None)
        if refused is not None and not (isinstance(refused, int) and self._make_room(uid, refused)):
            self._refusals[job.key, engine_id] = refused
            if isinstance(refused, Refusal):
                raise PlanError(refused.message, refused.code)
            raise self._share.refusal(uid, f"keep a plan to read {engine_id} of {refused} bytes")
        waiting = self._waiting.setdefault(job.key, [])
        waiting.append(grant)
        if len(waiting) == 1:
            self._context.emit(MakePlan(job, uid))
        return None

    def _refuse(self, job: PlanJob, refused: Refusal | int) -> None:
        self._refusals[job.key, job.remote_spec.engine_id] = refused
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def _make_room(self, uid: int, num_bytes: int) -> bool:
        """Evict unused plans, of this user and those with more, until it has room; return whether it has."""
        held_by = self._share.held_by
        while not self._share.has_room(uid, num_bytes):
            losers = [one for one in self._unused if one == uid or held_by(one) > held_by(uid)]
            if not losers:
                return False
            evicted = self._kept[next(iter(self._unused[max(losers, key=held_by)]))]
            self._remove_unused(evicted)
            del self._kept[evicted.reads.key]
            self._share.release(evicted.uid, evicted.reads.num_bytes)
        return True

    def _remove_unused(self, kept: _KeptReads) -> None:
        del self._unused[kept.uid][kept.reads.key]
        if not self._unused[kept.uid]:
            del self._unused[kept.uid]

    def charges(self) -> Iterator[Charge]:
        """Yield what the plans are counted for."""
        return ((PLAN_BYTES, kept.uid, kept.reads.num_bytes) for kept in self._kept.values())

    def check_integrity(self, holds: Iterable[HeldGrant]) -> None:
        """Raise AssertionError where other plans are counted, or by other grants, than these read by."""
        reading = Counter(hold.reads.key for hold in holds if hold.reads is not None)
        counted = {key: kept.num_grants for key, kept in self._kept.items() if kept.num_grants}
        assert reading == counted, f"{sum(counted.values())} grants counted that read, {reading.total()} do"
