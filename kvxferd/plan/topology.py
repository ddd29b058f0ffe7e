"""A local rank's registry of remote engines, and the one door through which the daemon plans.

`register_remote_engine` takes a remote engine's manifest and returns what this rank reads of it. A
`TransferTopology` is a rank's own identity and layout, and one `RegisteredEngine` for each remote engine:

* its name: the engine id and the home, which is the peer whose daemon sent the manifest. Two homes that name
  one engine id have an entry each, and neither refuses or replaces the other's;
* the spec with the generation, and one digest of all ranks' layouts: the facts, which one generation cannot
  change while it is registered;
* one `EngineTransferInfo` for each pipeline stage, by pp_rank; of a stage of which it reads states, a
  `MambaEngineTransferInfo`; and which ranks are read;
* when it was last used, by the caller's clock: when a grant was last planned by it.

It refers to neither manifest nor plan: the daemon keeps these as long as a grant uses them, and plans anew
what it has dropped. An entry is forgotten

* when this rank registers another generation of it from the same home; one that is refused leaves it,
* by `expire`, which the daemon calls at each registration: if it was not used for `transfer.max_hold_s`,
* as the longest unused of more than `MAX_REMOTE_ENGINES` entries of all homes,
* with the local rank itself.

The rest has the names of in-engine connectors, and `terms` has all of it. What is read comes from the plan.
The ratios are arithmetic that planning never uses.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvxferd.errors import Code, EngineError
from kvxferd.ids import Digest, Endpoint, EngineId
from kvxferd.layout import EngineSpec, RankLayout, digest_of
from kvxferd.plan.engine_checks import require_pp_aware
from kvxferd.plan.plan import Plan
from kvxferd.plan.planned_reads import PlanJob, PlannedReads
from kvxferd.plan.registered_engine import RegisteredEngine, RemoteManifest
from kvxferd.plan.transfer_info import (
    EngineTransferInfo,
    MambaEngineTransferInfo,
    lowest_rank_layouts,
    num_latent_heads,
    read_info,
    require_reads_inside,
    stage_info,
    stage_infos,
)

# Engines that a rank knows: it reads from tens. An entry takes 300 bytes a stage, of at most MAX_STAGES, and
# a bit for each rank that is read: 5 MiB of all.
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

    def register_remote_engine(
        self,
        remote: RemoteManifest,
        find_reads: Callable[[PlanJob], PlannedReads | None],
        *,
        home: Endpoint,
        now: float = 0.0,
    ) -> PlannedReads | None:
        """Keep an engine, and return what this rank reads of it.

        `find_reads` returns what became of a job; where it returns None, the reads are to be planned yet: so
        does this, nothing has changed, and it is to be called again once they are.

        Raises EngineError with code shape-mismatch, listing each differing field with both values, for other
        facts under one generation, and not-allowed for this rank's own engine; NotPPAwareError where this
        rank is not PP-aware and the engine has stages; PlanError (layers-missing) where a tensor that is read
        lies outside its stage's layers; and what `find_reads` raises. Nothing has changed then.
        """
        spec = remote.spec
        known = self.get(spec.engine_id, home)
        if known is not None and known.generation == spec.generation:
            known.require_same_facts(remote)
        else:
            known = None
            self._require_readable(remote)
        reads = find_reads(self._job(remote))
        if reads is None:
            return None
        if known is None:
            known = self._entry(remote, reads, home)
        known.last_used = now
        self._engines.pop((spec.engine_id, home), None)
        self._engines[spec.engine_id, home] = known
        if len(self._engines) > MAX_REMOTE_ENGINES:
            del self._engines[next(iter(self._engines))]
        return reads

    def plan_remote_engine(self, remote: RemoteManifest, *, home: Endpoint, now: float = 0.0) -> Plan:
        """Register an engine with reads that are planned here and now, as tools do. Raises as above."""
        reads = self.register_remote_engine(remote, PlanJob.make, home=home, now=now)
        assert reads is not None
        return reads.plan

    def _require_readable(self, remote: RemoteManifest) -> None:
        if remote.spec.engine_id == self.spec.engine_id:
            raise EngineError(
                f"cannot register engine {remote.spec.engine_id!r} as remote: it is this rank's own",
                Code.NOT_ALLOWED,
            )
        if not self.spec.pp_aware:
            require_pp_aware(remote.layouts(), f"engine {self.spec.key}")

    def _job(self, remote: RemoteManifest) -> PlanJob:
        """Return the planning of the engine; its key has every field of both specs that a plan depends on."""
        mine, theirs = self.spec, remote.spec
        key = (
            *(mine.rank, mine.tp_size, mine.num_layers, mine.num_kv_heads, mine.fingerprint),
            self._layout_digest,
            *(theirs.tp_size, theirs.num_layers, theirs.num_kv_heads, theirs.fingerprint),
            remote.layouts_digest,
        )
        return PlanJob(key, mine, self.layout, theirs, remote.layouts())

    @functools.cached_property
    def _layout_digest(self) -> Digest:
        return digest_of(self.layout)

    def _entry(self, remote: RemoteManifest, reads: PlannedReads, home: Endpoint) -> RegisteredEngine:
        """Return a new entry, once its stages are proved to hold all that is read."""
        ranks, source_bits = remote.layouts(), dict[int, int]()
        infos, lowest = stage_infos(remote.spec, ranks), lowest_rank_layouts(ranks)
        require_reads_inside(reads.plan, remote.spec, infos)
        for rank in reads.sources:
            source_bits[rank.pp_rank] = source_bits.get(rank.pp_rank, 0) | 1 << rank.tp_rank
        stages = {n: read_info(info, reads.plan, lowest[n], is_mla=self.is_mla) for n, info in infos.items()}
        return RegisteredEngine(home, remote.spec, remote.layouts_digest, stages, source_bits, 0.0)

    def expire(self, unused_since: float) -> None:
        """Forget the engines last used before `unused_since`."""
        while self._engines:
            key, oldest = next(iter(self._engines.items()))
            if oldest.last_used >= unused_since:
                return
            del self._engines[key]

    # --- what is read

    def target_remote_ranks(
        self, engine_id: EngineId, remote_pp_rank: int = 0, *, home: Endpoint | None = None
    ) -> list[int]:
        """Return the tp_ranks of a remote stage that this rank reads, ascending."""
        bits = self.find(engine_id, home).source_bits.get(remote_pp_rank, 0)
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

    # --- arithmetic that planning never uses

    @functools.cached_property
    def is_mla(self) -> bool:
        """Whether the attention cache has no heads to divide."""
        return self.spec.num_kv_heads == 0 and num_latent_heads(self.layout) > 0

    @functools.cached_property
    def _own(self) -> EngineTransferInfo:
        """This rank's own stage, as another one would have it."""
        return stage_info(self.spec, self.spec.pp_rank, self.layout)

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Return local over remote TP, a positive size, or minus remote over local where the remote is wider.

        Raises ValueError naming both sizes where neither divides the other.
        """
        mine = self.spec.tp_size
        if mine % remote_tp_size == 0:
            return mine // remote_tp_size
        if remote_tp_size % mine == 0:
            return -(remote_tp_size // mine)
        raise ValueError(f"cannot give a ratio: local TP {mine} and remote TP {remote_tp_size} do not divide")

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Return local over remote tokens per block; raises ValueError naming both if that is not whole."""
        mine = self._own.remote_block_size
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
        dcp_size = self._own.remote_dcp_size if remote_dcp_size > 1 else 1
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
        fields of `MambaEngineTransferInfo` and `fa_head_slots`.
        """
        engine = self.find(engine_id, home)
        stage: tuple[EngineId, int] = (engine_id, remote_pp_rank)
        info = self.get_engine_info(*stage, home=engine.home)
        found: dict[str, Any] = {
            "local_engine_id": self.spec.engine_id,
            "local_rank": self.spec.rank,
            "local_tp_size": self.spec.tp_size,
            "local_dcp_size": self._own.remote_dcp_size,
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
            slots = {rank: info.fa_head_slot(rank) for rank in info.remote_fa_source_ranks}
            found["fa_head_slots"] = slots
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
