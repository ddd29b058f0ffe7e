"""The registry of remote engines of one local rank: what the daemon knows of each, and when it forgets it.

A `TransferTopology` is a rank's own identity and layout, and one `RegisteredEngine` for each remote engine
that the rank reads. An entry holds:

* its name: the engine id and the home, which is the peer whose daemon sent the manifest. Two homes that name
  one engine id have an entry each, and neither refuses or replaces the other's;
* the generation, the spec and one digest of all ranks' layouts: the facts, which one generation cannot change
  while it is registered;
* one `EngineTransferInfo` for each pipeline stage, by pp_rank; of a stage of which it reads states, a
  `MambaEngineTransferInfo`;
* a reference to the plan: which bytes of which remote rank this rank reads. The cache of plans, one for the
  node, keeps it. Once that has evicted it, the entry has the ranks that it reads, and the next use makes it
  again;
* a weak reference to the manifest as it was fetched, with the addresses that every mapping of the memory
  changes. The daemon's record of that peer and the grants that read by it keep the manifest; the registry
  does not, as its bytes count for a user for as long as anything refers to it;
* when it was last used, by the caller's clock: when a grant was last planned by it.

Registration is idempotent. Other facts under one generation are refused: specs field by field, layouts by
their digest. A new manifest with the same facts (memory was mapped again, or it was fetched again) replaces
the manifest and keeps the plan.

An entry is forgotten

* when this rank registers another generation of it from the same home; one that is refused leaves it,
* by `expire`, which the daemon calls at each registration and never in between: if it was not used for
  `transfer.max_hold_s`, or as the longest unused of more than `MAX_REMOTE_ENGINES` entries of all homes,
* with the local rank itself.

A grant holds its plan and manifest itself until it has ended. So none of these takes them from a pull.

The rest has the names of in-engine connectors, and `terms` has all of it. What is read comes from the plan.
The ratios are arithmetic that planning never uses.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvxferd.errors import Code, EngineError
from kvxferd.ids import Endpoint, EngineId, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan.engine_checks import check_stage_layers
from kvxferd.plan.plan import Plan
from kvxferd.plan.plan_cache import PlanCache, PlanJob, PlanOwner
from kvxferd.plan.registered_engine import RegisteredEngine, RemoteManifest
from kvxferd.plan.registration_differences import require_reads_inside, require_same_facts
from kvxferd.plan.transfer_info import (
    EngineTransferInfo,
    MambaEngineTransferInfo,
    lowest_rank_layouts,
    num_latent_heads,
    read_info,
    stage_info,
    stage_infos,
)

# Engines that a rank knows: it reads from tens. An entry takes 300 bytes a stage, of at most MAX_STAGES, and
# a bit for each rank that is read: 5 MiB of all. Plans are not counted here: the cache of plans keeps them.
MAX_REMOTE_ENGINES = 256
MAX_NAMED_RANKS = 16  # of each list, in a line of the log


class TransferTopology:
    """One local rank's identity and layout, and every remote engine registered with it."""

    def __init__(self, spec: EngineSpec, layout: RankLayout) -> None:
        self.spec = spec
        self.layout = layout
        self._engines: dict[tuple[EngineId, Endpoint], RegisteredEngine] = {}  # the longest unused first

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
        `register_remote_engine` is to be called.
        """
        key = (engine_id, home)
        engine = self._engines.get(key)
        if engine is None or engine.manifest() is not manifest:
            return None
        if (plan := engine.kept.plan) is None:
            return None
        engine.last_used = engine.kept.used_at = now
        self._engines[key] = self._engines.pop(key)
        return plan

    def register_remote_engine(
        self,
        remote: RemoteManifest,
        plans: PlanCache,
        *,
        home: Endpoint,
        now: float = 0.0,
        uid: int = 0,
    ) -> Plan | PlanJob:
        """Keep an engine with the plan that reads it, and return the plan.

        Where the generation is registered already, its facts must be the same; then the plan stays and
        `remote` replaces the former manifest. Else the plan is that of `plans`, for the user `uid` and
        `home`. Where that has none, nothing changes, and the job that makes it is returned: once its outcome
        is in `plans`, call this again. The registry keeps a weak reference to `remote` alone.

        Raises EngineError with code shape-mismatch, listing each differing field with both values, for other
        facts under one generation, and not-allowed for this rank's own engine; LayoutError or PlanError
        (layers-missing) where the stages do not hold every layer once, or a tensor that is read lies outside
        its stage's layers; and what `PlanCache.find` raises. Nothing has changed then.
        """
        spec, ranks = remote.spec, remote.layouts()
        engine_id = spec.engine_id
        if engine_id == self.spec.engine_id:
            raise EngineError(
                f"cannot register engine {engine_id!r} as remote: it is this rank's own", Code.NOT_ALLOWED
            )
        digest = plans.digest(ranks)
        known = self.get(engine_id, home)
        if known is not None and known.generation != spec.generation:
            known = None
        if known is not None:
            if known.layouts_digest != digest or known.spec != spec:
                require_same_facts(known, spec, ranks, digest)
            if (known_plan := known.kept.plan) is not None:
                known.manifest, known.kept.used_at = weakref.ref(remote), now
                self._touch(known, now)
                return known_plan
        job = plans.job(self.spec, self.layout, spec, ranks, digest)
        kept = plans.find(job, PlanOwner(uid, home), now)
        if kept is None:
            return job
        plan = kept.plan
        assert plan is not None
        if known is not None:
            known.kept, known.manifest = kept, weakref.ref(remote)
            self._touch(known, now)
            return plan
        stages = self._stages_of(spec, ranks, plan)
        self._engines.pop((engine_id, home), None)  # another generation
        self._engines[engine_id, home] = RegisteredEngine(
            home, spec, now, stages, kept, digest, weakref.ref(remote)
        )
        return plan

    def plan_remote_engine(
        self, remote: RemoteManifest, plans: PlanCache, *, home: Endpoint, now: float = 0.0, uid: int = 0
    ) -> Plan:
        """Do what `register_remote_engine` does, and make the plan here where there is none yet."""
        plan = self.register_remote_engine(remote, plans, home=home, now=now, uid=uid)
        if isinstance(plan, PlanJob):
            kept = plans.put(plan, plan.make(), PlanOwner(uid, home), now)
            plan = self.register_remote_engine(remote, plans, home=home, now=now, uid=uid)
            assert plan is kept.plan
        return plan

    def _stages_of(
        self, remote_spec: EngineSpec, ranks: Mapping[Rank, RankLayout], plan: Plan
    ) -> dict[int, EngineTransferInfo]:
        """Return the facts of each stage, once they are proved to hold the model and all that is read."""
        infos = stage_infos(remote_spec, ranks)
        layers = {pp_rank: (info.start_layer, info.end_layer) for pp_rank, info in infos.items()}
        check_stage_layers(remote_spec, layers)
        require_reads_inside(plan, remote_spec, layers)
        lowest = lowest_rank_layouts(ranks)
        return {pp_rank: read_info(info, self.spec, plan, lowest[pp_rank]) for pp_rank, info in infos.items()}

    def expire(self, unused_since: float = -math.inf) -> None:
        """Forget the engines last used before `unused_since`, and the longest unused of too many."""
        while self._engines:
            key, oldest = next(iter(self._engines.items()))
            if oldest.last_used >= unused_since and len(self._engines) <= MAX_REMOTE_ENGINES:
                return
            del self._engines[key]

    def _touch(self, engine: RegisteredEngine, now: float) -> None:
        key = (engine.engine_id, engine.home)
        engine.last_used = now
        self._engines[key] = self._engines.pop(key)

    # --- what is read

    def target_remote_ranks(
        self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> list[int]:
        """Return the tp_ranks of a remote stage that this rank reads, ascending."""
        bits = self.find(engine_id, home).kept.sources.get(remote_pp_rank, 0)
        return [tp_rank for tp_rank in range(bits.bit_length()) if bits >> tp_rank & 1]

    def is_kv_replicated(
        self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> bool:
        """Whether the remote engine has strictly more ranks than there are KV heads, of latents one."""
        info = self.get_engine_info(engine_id, remote_pp_rank, home=home)
        heads = self.spec.num_kv_heads or num_latent_heads(self.layout)
        return 0 < heads < info.remote_tp_size

    def replicates_kv_cache(
        self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> bool:
        """Whether remote ranks hold copies of each other's attention cache."""
        return self.is_kv_replicated(engine_id, remote_pp_rank, home=home) or self.is_mla

    def hybrid_info(
        self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> MambaEngineTransferInfo:
        """Return the facts of a stage from which this rank reads states.

        Raises EngineError (layout-incompatible) for a stage from which it reads none.
        """
        info = self.get_engine_info(engine_id, remote_pp_rank, home=home)
        if not isinstance(info, MambaEngineTransferInfo):
            raise EngineError(
                f"cannot tell attention from states of engine {engine_id!r}, stage {remote_pp_rank}: "
                "this rank reads no states of it",
                Code.LAYOUT_INCOMPATIBLE,
            )
        return info

    def should_skip_fa(
        self, engine_id: EngineId, remote_rank: int, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> bool:
        """Whether no attention is read from a rank; this and the next two raise what `hybrid_info` raises."""
        info = self.hybrid_info(engine_id, remote_pp_rank, home=home)
        return remote_rank not in info.remote_fa_source_ranks

    def fa_head_slot(
        self, engine_id: EngineId, remote_rank: int, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> int:
        """Return which part of a local attention block a rank's heads fill, counted in sources.

        A rank that is not read has the slot of the source before it, whose heads it may hold copies of.
        """
        info = self.hybrid_info(engine_id, remote_pp_rank, home=home)
        return max(0, bisect.bisect_right(info.remote_fa_source_ranks, remote_rank) - 1)

    def needs_split_handles(
        self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> bool:
        """Whether a local block is filled from several ranks."""
        info = self.hybrid_info(engine_id, remote_pp_rank, home=home)
        return len(info.remote_all_source_ranks) > 1 and not self.is_mla

    # --- arithmetic that planning never uses

    @functools.cached_property
    def is_mla(self) -> bool:
        """Whether the attention cache has no heads to divide."""
        return self.spec.num_kv_heads == 0 and num_latent_heads(self.layout) > 0

    @functools.cached_property
    def block_size(self) -> int:
        """Return the tokens per kernel block of the first attention layer; 0 without attention."""
        return stage_info(self.spec, self.spec.pp_rank, self.layout).remote_block_size

    @functools.cached_property
    def dcp_size(self) -> int:
        """Return how many ranks share the tokens of the first attention layer; 1 without attention."""
        return stage_info(self.spec, self.spec.pp_rank, self.layout).remote_dcp_size

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Return local over remote TP, or minus remote over local where the remote is wider.

        Raises ValueError naming both sizes where neither divides the other.
        """
        mine = self.spec.tp_size
        if remote_tp_size > 0 and mine % remote_tp_size == 0:
            return mine // remote_tp_size
        if remote_tp_size > 0 and remote_tp_size % mine == 0:
            return -(remote_tp_size // mine)
        raise ValueError(f"cannot give a ratio: local TP {mine} and remote TP {remote_tp_size} do not divide")

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Return local over remote tokens per block; raises ValueError naming both if that is not whole."""
        mine = self.block_size
        if remote_block_size < 1 or mine % remote_block_size:
            raise ValueError(
                f"cannot give a ratio: the local block size {mine} is no multiple of the remote's "
                f"{remote_block_size}"
            )
        return mine // remote_block_size

    def handshake_target_ranks(self, remote_tp_size: int, remote_dcp_size: int = 1) -> list[int]:
        """Return the remote ranks whose share of the heads meets this rank's, replicas included.

        Of a remote that shares the tokens of a request (DCP), those whose tokens meet this rank's too, where
        both sides interleave them alike. A rank is a share of the heads times the shares of the tokens.
        """
        dcp_size = self.dcp_size if remote_dcp_size > 1 else 1
        mine, remote = self.spec.tp_size // dcp_size, remote_tp_size // remote_dcp_size
        rank, tokens = divmod(self.spec.tp_rank, dcp_size)
        first, end = rank * remote // mine, -(-(rank + 1) * remote // mine)
        both = math.gcd(dcp_size, remote_dcp_size)
        return [
            share * remote_dcp_size + other
            for share in range(first, end)
            for other in range(tokens % both, remote_dcp_size, both)
        ]

    def terms(
        self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> dict[str, Any]:
        """Return all that is known of a remote stage, by the names of in-engine connectors.

        A ratio of sizes that do not divide is None. Only a stage from which this rank reads states has the
        fields of `MambaEngineTransferInfo`, `fa_head_slots` and `needs_split_handles`.
        """
        engine = self.find(engine_id, home)
        stage: tuple[EngineId, int] = (engine_id, remote_pp_rank)
        info = self.get_engine_info(*stage, home=engine.home)
        found: dict[str, Any] = {
            "local_engine_id": self.spec.engine_id,
            "local_rank": self.spec.rank,
            "local_tp_size": self.spec.tp_size,
            "local_dcp_size": self.dcp_size,
            "num_kv_heads": self.spec.num_kv_heads,
            "engine_id": engine_id,
            "generation": engine.generation,
            "home": engine.home,
            **{field.name: getattr(info, field.name) for field in dataclasses.fields(info)},
            "tp_ratio": _or_none(self.tp_ratio, info.remote_tp_size),
            "block_size_ratio": _or_none(self.block_size_ratio, info.remote_block_size),
            "handshake_target_ranks": self.handshake_target_ranks(info.remote_tp_size, info.remote_dcp_size),
            "target_remote_ranks": self.target_remote_ranks(*stage, home=engine.home),
            "is_kv_replicated": self.is_kv_replicated(*stage, home=engine.home),
            "replicates_kv_cache": self.replicates_kv_cache(*stage, home=engine.home),
        }
        if isinstance(info, MambaEngineTransferInfo):
            # `fa_head_slot` of each rank that is read; one by one they would take the square of the ranks.
            found["fa_head_slots"] = {rank: slot for slot, rank in enumerate(info.remote_fa_source_ranks)}
            found["needs_split_handles"] = self.needs_split_handles(*stage, home=engine.home)
        return found

    def describe(self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None) -> str:
        """Return the terms of a remote stage as one line, for the log."""
        return format_terms(self.terms(engine_id, remote_pp_rank, home=home))


def format_terms(terms: Mapping[str, Any]) -> str:
    """Return what `TransferTopology.terms` returned as one line."""
    return f"TransferTopology({', '.join(f'{name}={_shortened(value)}' for name, value in terms.items())})"


def _shortened(value: Any) -> str:
    """Return the value as text, of a long list the first ranks: an engine may have 4,096."""
    if isinstance(value, list | tuple | dict) and len(value) > MAX_NAMED_RANKS:
        parts = value.items() if isinstance(value, dict) else value
        some = type(value)(itertools.islice(parts, MAX_NAMED_RANKS))
        return f"{some} and {len(value) - MAX_NAMED_RANKS} more"
    return str(value)


def _or_none(ratio: Callable[[int], int], remote_size: int) -> int | None:
    """Return the ratio to a remote size; None where there is none."""
    try:
        return ratio(remote_size)
    except ValueError:
        return None
