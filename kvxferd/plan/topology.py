"""The registry of remote engines of one local rank: what the daemon knows of each, and when it forgets it.

A `TransferTopology` is a rank's own identity and layout, and one `RegisteredEngine` for each remote engine
that the rank reads. An entry holds:

* its name: the engine id and the home, which is the peer whose daemon sent the manifest. Two homes that name
  one engine id have an entry each, and neither refuses or replaces the other's;
* the generation, the spec and a digest of each rank's layout: the facts, which one generation cannot change
  while it is registered;
* one `EngineTransferInfo` for each pipeline stage, by pp_rank;
* a reference to the plan: which bytes of which remote rank this rank reads. The cache of plans, one for the
  node, keeps it. Once that has evicted it, the entry has the ranks that it reads, and the next use makes it
  again;
* for each stage of which it reads states, which ranks are read for what (`HybridReads`);
* a weak reference to the manifest as it was fetched, with the addresses that every mapping of the memory
  changes. The daemon's record of that peer and the grants that read by it keep the manifest; the registry
  does not, as its bytes count for a user for as long as anything refers to it;
* when it was last used, by the caller's clock: when a grant was last planned by it.

Registration is idempotent. Other facts under one generation are refused, field by field. A new manifest with
the same facts (memory was mapped again, or it was fetched again) replaces the manifest and keeps the plan.

An entry is forgotten

* when this rank registers another generation of it from the same home; one that is refused leaves it,
* by `expire`, which the daemon calls at each registration and never in between: if it was not used for
  `transfer.max_hold_s`, or as the longest unused of more than `MAX_REMOTE_ENGINES` entries or
  `MAX_KEPT_PARTS` parts, of all homes together,
* by `forget_longest_unused`, which the daemon calls where all ranks of the node together have too many parts,
* with the local rank itself.

A grant holds its plan and manifest itself until it has ended. So none of these takes them from a pull.

The questions have the names of in-engine connectors. The ratios are arithmetic that planning never uses.
What is read comes from the plan; for an engine of which only `EngineTransferInfo` is known, it comes from the
planner's own assignment of units to the ranks that such an engine has (plan/stage_reads.py).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvxferd.errors import Code, EngineError
from kvxferd.ids import Endpoint, EngineId, Generation, Rank
from kvxferd.layout import EngineSpec, GroupKind, RankLayout
from kvxferd.plan.engine_checks import check_stage_layers
from kvxferd.plan.hybrid import Descriptor, HybridReads, Ids, MambaEngineTransferInfo
from kvxferd.plan.info import EngineTransferInfo, stage_infos
from kvxferd.plan.local_rank import LocalRank
from kvxferd.plan.plan import Plan
from kvxferd.plan.plan_cache import KeptPlan, LayoutDigests, PlanCache, PlanOwner
from kvxferd.plan.registered_engine import LayoutsByHand, RegisteredEngine, RemoteManifest
from kvxferd.plan.registration_differences import (
    differing_fields,
    other_facts,
    require_own_layers,
    require_reads_inside,
    require_same_facts,
)
from kvxferd.plan.stage_reads import assigned_reads

UNKNOWN_GENERATION = Generation("")  # of facts built by hand
BY_HAND = Endpoint("")  # the home of facts that no peer sent

# Engines of which a rank keeps a plan: it reads from tens.
MAX_REMOTE_ENGINES = 256
# The ranks and stages of all of them, and of hybrids the ranges of units. 256 engines of 64 ranks in 8 stages
# are 18,432. Each takes 205 bytes where it is like no other: 13 MiB. Plans are not counted here: the cache of
# plans keeps them.
MAX_KEPT_PARTS = 1 << 16


class TransferTopology(LocalRank):
    """One local rank's identity and layout, and every remote engine registered with it."""

    def __init__(self, spec: EngineSpec, layout: RankLayout) -> None:
        super().__init__(spec, layout)
        self._engines: dict[tuple[EngineId, Endpoint], RegisteredEngine] = {}  # the longest unused first
        self._num_parts = 0  # of all of them

    # --- remote engines

    def engines(self) -> Iterator[RegisteredEngine]:
        """Iterate over the remote engines, the longest unused first."""
        return iter(self._engines.values())

    def get(self, engine_id: EngineId, home: Endpoint) -> RegisteredEngine | None:
        """Return the remote engine of that home; None: it is not registered."""
        return self._engines.get((engine_id, home))

    def find(self, engine_id: EngineId, home: Endpoint | None = None) -> RegisteredEngine:
        """Return a remote engine; without a home, the last used one of that id.

        Raises EngineError (engine-unknown) where none is registered.
        """
        if home is not None:
            found = self.get(engine_id, home)
        else:
            latest_first = reversed(self._engines.values())
            found = next((engine for engine in latest_first if engine.engine_id == engine_id), None)
        if found is None:
            where = f" of {home}" if home else ""
            raise EngineError(
                f"cannot tell of engine {engine_id!r}{where}: it is not registered", Code.ENGINE_UNKNOWN
            )
        return found

    def get_engine_info(
        self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> EngineTransferInfo:
        """Return one stage's facts; raises EngineError (engine-unknown)."""
        info = self.find(engine_id, home).stages.get(remote_pp_rank)
        if info is None:
            raise EngineError(
                f"cannot tell of engine {engine_id!r}, stage {remote_pp_rank}: it is not registered",
                Code.ENGINE_UNKNOWN,
            )
        return info

    def use(self, engine_id: EngineId, home: Endpoint, manifest: RemoteManifest, now: float) -> Plan | None:
        """Return the plan of the engine that is registered with exactly that manifest, and count it as used.

        None: it is not registered, or with another manifest, or its plan is evicted; then
        `register_remote_ranks` is to be called.
        """
        key = (engine_id, home)
        engine = self._engines.get(key)
        if engine is None or engine.manifest is None or engine.manifest() is not manifest:
            return None
        kept = engine.kept
        if kept is None or (plan := kept.plan) is None:
            return None
        engine.last_used = kept.used_at = now
        self._engines[key] = self._engines.pop(key)
        return plan

    def register_remote_engine(
        self,
        engine_id: EngineId,
        info: EngineTransferInfo,
        generation: Generation = UNKNOWN_GENERATION,
        *,
        home: Endpoint = BY_HAND,
        now: float = 0.0,
    ) -> EngineTransferInfo:
        """Keep and return the facts of one stage whose layouts are not known; equal ones are kept once.

        Where this rank reads states of it, the result is a `MambaEngineTransferInfo`: which ranks are read
        is the planner's own assignment of units, made here from this rank's layout and `info`.
        A new generation replaces everything known of the old one. Raises EngineError with code
        shape-mismatch, listing each differing field with both values, for other facts under one
        generation, layers-missing for layers that another stage holds, and not-allowed for this
        rank's own engine.
        """
        self._require_remote(engine_id)
        if info.remote_tp_size < 1:
            raise EngineError(
                f"cannot register engine {engine_id!r}: its remote_tp_size is {info.remote_tp_size}; give "
                "the number of ranks of a stage",
                Code.SHAPE_MISMATCH,
            )
        facts = self._with_reads(info)
        engine = self.get(engine_id, home)
        if engine is None or engine.generation != generation:
            engine = RegisteredEngine(engine_id, home, generation, now, {})
            self._put(engine)
        self._touch(engine, now)
        known = engine.stages.get(info.remote_pp_rank)
        if known is not None:
            differing = differing_fields(known, facts, EngineTransferInfo)
            if type(known) is not type(facts):
                differing.append(f"the facts were {type(known).__name__} and are {type(facts).__name__}")
            if differing:
                raise other_facts(engine_id, f", stage {info.remote_pp_rank}", differing)
            return known
        if engine.kept is not None:
            raise other_facts(engine_id, "", [f"stage {info.remote_pp_rank} is none of its stages"])
        require_own_layers(engine, facts)
        engine.stages[info.remote_pp_rank] = facts
        return facts

    def register_remote_ranks(
        self,
        remote_spec: EngineSpec,
        ranks: Mapping[Rank, RankLayout],
        plan: Plan | None = None,
        *,
        home: Endpoint = BY_HAND,
        manifest: Callable[[], RemoteManifest | None] | None = None,
        plans: PlanCache | None = None,
        now: float = 0.0,
        uid: int = 0,
    ) -> Plan:
        """Keep an engine whose layouts are known, with the plan that reads it, and return the plan.

        Where the generation is registered already, its facts must be the same; then the plan stays and
        `manifest` replaces the former one. Else the plan is `plan`, or made through `plans` for the user
        `uid` and `home`, also where it was evicted. `manifest` is a weak reference to what has the layouts;
        without one they are kept here.

        Raises EngineError as `register_remote_engine` does (shape-mismatch for other specs and layouts
        too), LayoutError or PlanError (layers-missing) where the stages do not hold every layer once, or a
        tensor that is read lies outside its stage's layers, and what `PlanCache.keep` raises. Nothing has
        changed then.
        """
        engine_id = remote_spec.engine_id
        self._require_remote(engine_id)
        cache = PlanCache() if plans is None else plans
        digests = cache.digests(ranks)
        by_hand = LayoutsByHand(ranks)
        reference = (lambda: by_hand) if manifest is None else manifest
        known = self.get(engine_id, home)
        if known is not None and known.generation == remote_spec.generation:
            if known.layout_digests is not digests or known.spec != remote_spec:
                require_same_facts(known, remote_spec, ranks, digests)
            if known.kept is not None and (known_plan := known.kept.plan) is not None:
                known.manifest, known.kept.used_at = reference, now
                self._touch(known, now)
                return known_plan
        kept, made = self._keep(plan, cache, remote_spec, ranks, digests, PlanOwner(uid, home), now)
        if known is not None and known.generation == remote_spec.generation and known.kept is not None:
            known.kept, known.manifest = kept, reference
            self._touch(known, now)
            return made
        alike = self._find_alike(remote_spec, digests, kept)
        if alike is not None:
            stages, hybrids = dict(alike.stages), alike.hybrids or {}
        else:
            stages, hybrids = self._stages_of(remote_spec, ranks, made)
        self._put(
            RegisteredEngine(
                engine_id,
                home,
                remote_spec.generation,
                now,
                stages,
                remote_spec,
                kept,
                digests,
                reference,
                hybrids or None,
                len(ranks) + len(stages) + sum(reads.num_parts for reads in hybrids.values()),
            )
        )
        return made

    def _keep(
        self,
        plan: Plan | None,
        cache: PlanCache,
        remote_spec: EngineSpec,
        ranks: Mapping[Rank, RankLayout],
        digests: LayoutDigests,
        owner: PlanOwner,
        now: float,
    ) -> tuple[KeptPlan, Plan]:
        """Return the plan as the cache keeps it, and itself; one that was made by hand is kept here."""
        if plan is not None:
            return KeptPlan(plan, plan.sources), plan
        kept = cache.keep(self.spec, self.layout, remote_spec, ranks, digests, owner=owner, now=now)
        assert kept.plan is not None
        return kept, kept.plan

    def _find_alike(
        self, remote_spec: EngineSpec, digests: LayoutDigests, kept: KeptPlan
    ) -> RegisteredEngine | None:
        """Return the last used engine, if this one is deployed alike: then it has the same facts.

        A hybrid's facts take 300 us, and most engines that a rank reads have the same layouts.
        """
        latest = next(reversed(self._engines.values()), None)
        if latest is None or latest.spec is None or latest.kept is not kept:
            return None
        sizes = (remote_spec.pp_size, remote_spec.tp_size, remote_spec.num_layers)
        if latest.layout_digests is not digests or sizes != (
            latest.spec.pp_size,
            latest.spec.tp_size,
            latest.spec.num_layers,
        ):
            return None
        return latest

    def _stages_of(
        self, remote_spec: EngineSpec, ranks: Mapping[Rank, RankLayout], plan: Plan
    ) -> tuple[dict[int, EngineTransferInfo], dict[int, HybridReads]]:
        """Return the facts of each stage, once they are proved to hold the model and all that is read.

        And the reads of each stage of which states are read.
        """
        stages = stage_infos(remote_spec, ranks)
        layers = {pp_rank: (info.start_layer, info.end_layer) for pp_rank, info in stages.items()}
        check_stage_layers(remote_spec, layers)
        require_reads_inside(plan, remote_spec, layers)
        ranks_of: dict[int, dict[Rank, RankLayout]] = {}
        for rank, layout in ranks.items():
            ranks_of.setdefault(rank.pp_rank, {})[rank] = layout
        hybrids = {}
        for pp_rank in {read.rank.pp_rank for read in plan.group_reads if read.local.kind is GroupKind.STATE}:
            hybrids[pp_rank] = reads = HybridReads(self.spec, self.layout, plan, ranks_of[pp_rank])
            stages[pp_rank] = reads.info(stages[pp_rank])
        return stages, hybrids

    def _with_reads(self, info: EngineTransferInfo) -> EngineTransferInfo:
        """Return facts built by hand, extended by what this rank reads of the stage where that is states."""
        if not self.is_mamba:
            return info
        reads = HybridReads.by_facts(self.spec, self.layout, info)
        return reads.info(info) if reads.state_source_ranks else info

    def expire(self, unused_since: float = -math.inf) -> None:
        """Forget the engines last used before `unused_since`, and the longest unused of too many.

        The last used one stays, however large it is.
        """
        while self._engines:
            key, oldest = next(iter(self._engines.items()))
            is_full = len(self._engines) > MAX_REMOTE_ENGINES or self._num_parts > MAX_KEPT_PARTS
            if not (oldest.last_used < unused_since or (is_full and len(self._engines) > 1)):
                return
            self._drop(key)

    @property
    def num_parts(self) -> int:
        """Return the number of ranks and stages of all remote engines."""
        return self._num_parts

    def forget_longest_unused(self) -> None:
        """Forget one engine. There is one."""
        self._drop(next(iter(self._engines)))

    def _require_remote(self, engine_id: EngineId) -> None:
        if engine_id == self.spec.engine_id:
            raise EngineError(
                f"cannot register engine {engine_id!r} as remote: it is this rank's own", Code.NOT_ALLOWED
            )

    def _touch(self, engine: RegisteredEngine, now: float) -> None:
        key = (engine.engine_id, engine.home)
        engine.last_used = now
        self._engines[key] = self._engines.pop(key)

    def _put(self, engine: RegisteredEngine) -> None:
        key = (engine.engine_id, engine.home)
        if key in self._engines:
            self._drop(key)
        self._engines[key] = engine
        self._num_parts += engine.num_parts

    def _drop(self, key: tuple[EngineId, Endpoint]) -> None:
        self._num_parts -= self._engines.pop(key).num_parts

    # --- what is read

    def is_kv_replicated(
        self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> bool:
        """Whether the remote engine has strictly more ranks than there are KV heads."""
        info = self.get_engine_info(engine_id, remote_pp_rank, home=home)
        return 0 < self.spec.num_kv_heads < info.remote_tp_size

    def replicates_kv_cache(
        self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> bool:
        """Whether remote ranks hold copies of each other's attention cache."""
        return self.is_kv_replicated(engine_id, remote_pp_rank, home=home) or self.is_mla

    def target_remote_ranks(
        self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> list[int]:
        """Return the tp_ranks of a remote stage that this rank reads, ascending."""
        info = self.get_engine_info(engine_id, remote_pp_rank, home=home)
        if isinstance(info, MambaEngineTransferInfo):
            return list(info.remote_all_source_ranks)
        kept = self.find(engine_id, home).kept
        if kept is not None:
            first = bisect.bisect_left(kept.sources, (remote_pp_rank,))
            end = bisect.bisect_left(kept.sources, (remote_pp_rank + 1,))
            return [rank.tp_rank for rank in kept.sources[first:end]]
        return assigned_reads(self.spec, self.layout, info).sources

    def hybrid(
        self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> HybridReads:
        """Return what is read of a stage from which this rank reads states.

        Raises EngineError (layout-incompatible) for a stage from which it reads none.
        """
        info = self.get_engine_info(engine_id, remote_pp_rank, home=home)
        engine = self.find(engine_id, home)
        if not isinstance(info, MambaEngineTransferInfo):
            raise EngineError(
                f"cannot tell attention from states of engine {engine_id!r}, stage {remote_pp_rank}: "
                "this rank reads no states of it",
                Code.LAYOUT_INCOMPATIBLE,
            )
        known = (engine.hybrids or {}).get(remote_pp_rank)
        return known if known is not None else HybridReads.by_facts(self.spec, self.layout, info)

    def should_skip_fa(
        self, engine_id: EngineId, remote_rank: int, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> bool:
        """See `HybridReads.should_skip_fa`; this and the next five raise what `hybrid` raises."""
        return self.hybrid(engine_id, remote_pp_rank, home=home).should_skip_fa(remote_rank)

    def fa_head_slot(
        self, engine_id: EngineId, remote_rank: int, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> int:
        """See `HybridReads.fa_head_slot`."""
        return self.hybrid(engine_id, remote_pp_rank, home=home).fa_head_slot(remote_rank)

    def fa_rank_offset(
        self,
        engine_id: EngineId,
        remote_kv_block_len: int,
        remote_pp_rank: int = 0,
        *,
        home: Endpoint | None = None,
    ) -> int:
        """See `HybridReads.fa_rank_offset`."""
        return self.hybrid(engine_id, remote_pp_rank, home=home).fa_rank_offset(remote_kv_block_len)

    def needs_split_handles(
        self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> bool:
        """See `HybridReads.needs_split_handles`."""
        return self.hybrid(engine_id, remote_pp_rank, home=home).needs_split_handles()

    def compute_split_handle_data(
        self,
        engine_id: EngineId,
        attention: Sequence[Descriptor],
        states: Sequence[Descriptor],
        remote_pp_rank: int = 0,
        *,
        home: Endpoint | None = None,
    ) -> dict[int, list[Descriptor]]:
        """See `HybridReads.compute_split_handle_data`."""
        return self.hybrid(engine_id, remote_pp_rank, home=home).compute_split_handle_data(attention, states)

    def filter_block_ids_for_rank(
        self,
        engine_id: EngineId,
        remote_rank: int,
        *,
        local: Sequence[Ids],
        remote: Sequence[Ids],
        is_state_group: Sequence[bool],
        remote_pp_rank: int = 0,
        home: Endpoint | None = None,
    ) -> tuple[list[Ids | list[int]], list[Ids | list[int]]]:
        """See `HybridReads.filter_block_ids_for_rank`."""
        reads = self.hybrid(engine_id, remote_pp_rank, home=home)
        return reads.filter_block_ids_for_rank(remote_rank, local, remote, is_state_group)

    def describe(self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None) -> str:
        """Return one line for the log: sizes, ranks, and what is read."""
        engine = self.find(engine_id, home)
        info = self.get_engine_info(engine_id, remote_pp_rank, home=home)
        try:
            ratio = str(self.tp_ratio(info.remote_tp_size))
        except ValueError:
            ratio = f"{self.spec.tp_size}:{info.remote_tp_size}"
        text = (
            f"TransferTopology(engine={engine_id}, generation={engine.generation}, "
            f"home={engine.home or '-'}, "
            f"tp_ratio={ratio}, num_kv_heads={self.spec.num_kv_heads}, "
            f"local_tp={self.spec.tp_size}, remote_tp={info.remote_tp_size}, local_rank={self.spec.rank}, "
            f"remote_pp={remote_pp_rank}, layers=[{info.start_layer}, {info.end_layer}), "
            f"reads={self.target_remote_ranks(engine_id, remote_pp_rank, home=home)}, "
            f"remote_block_len={info.remote_block_len}, remote_block_size={info.remote_block_size}"
        )
        if isinstance(info, MambaEngineTransferInfo):
            text += (
                f", fa_reads={info.remote_num_fa_reads}, mamba_reads={info.remote_num_mamba_reads}, "
                f"fa_sources={list(info.remote_fa_source_ranks)}, "
                f"all_sources={list(info.remote_all_source_ranks)}, "
                f"fa_descriptor_bytes={info.remote_fa_descriptor_bytes}"
            )
        return text + ")"
