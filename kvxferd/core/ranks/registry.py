"""The engines whose ranks are registered here, or joined here from other nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from kvxferd.core.context import NodeContext
from kvxferd.core.limits.ledger import Charge
from kvxferd.core.limits.table import RANKS
from kvxferd.core.peers.manifest_checks import aggregate_metadata
from kvxferd.core.ranks.owners import Owners, is_user
from kvxferd.core.ranks.rank import LocalRank, MemberRank, RankRecord
from kvxferd.core.tables import discard
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import EngineId, EngineKey, GroupName, Incarnation, Rank
from kvxferd.layout import EngineSpec
from kvxferd.plan import BlockRules, ListRules, check_engine, check_same_engine, engine_rules, list_rules
from kvxferd.wire.common import RankIncarnations


@dataclass(slots=True)
class LocalEngine:
    """One generation of an engine, with the ranks that are known here."""

    spec: EngineSpec  # the first rank's; all others agree with it
    ranks: dict[Rank, RankRecord] = field(default_factory=dict)
    _rules: BlockRules = ()  # of all ranks; computed on first use
    _list_rules: Mapping[GroupName, ListRules] = field(default_factory=dict)  # by these
    _interned: tuple[RankIncarnations, Mapping[Rank, Incarnation]] = ((), {})

    @property
    def key(self) -> EngineKey:
        """The engine id and the generation."""
        return self.spec.key

    def put(self, record: RankRecord) -> None:
        """Add a rank, or replace it."""
        self.ranks[record.spec.rank] = record
        self._rules = ()

    def remove(self, rank: Rank) -> None:
        """Remove a rank."""
        del self.ranks[rank]
        self._rules = ()

    @property
    def rules(self) -> BlockRules:
        """The rules for the block lists of a request, of all ranks that are here."""
        if not self._rules:
            self._rules = engine_rules(record.rules for record in self.ranks.values())
            self._list_rules = list_rules(self._rules)
        return self._rules

    @property
    def list_rules(self) -> Mapping[GroupName, ListRules]:
        """How the block lists of a request may be cut, by group."""
        return self._list_rules if self.rules else {}

    def unregistered(self) -> list[Rank]:
        """Return the ranks that are not here at all, whose groups are not known."""
        return [rank for rank in self.spec.ranks() if rank not in self.ranks]

    def missing(self) -> list[Rank]:
        """Return the ranks that cannot be read."""
        return [
            r for r in self.spec.ranks() if (record := self.ranks.get(r)) is None or not record.is_readable
        ]

    def intern_incarnations(self, named: RankIncarnations) -> Mapping[Rank, Incarnation]:
        """Return the incarnations of this engine's ranks that a publish names.

        Publishes that name the same share one object: thousands of transfers of 64 ranks would otherwise keep
        5 KiB each.
        """
        if self._interned[0] != named:
            shape = frozenset(self.spec.ranks())
            self._interned = (named, {rank: inc for rank, inc in named if rank in shape})
        return self._interned[1]

    def find_remapped(self, incarnations: Mapping[Rank, Incarnation]) -> Rank | None:
        """Return a rank that sleeps, or whose memory has another mapping than `incarnations` names, or None.

        Absent ranks are left out: a daemon that has restarted does not know them yet.
        """
        for rank, record in self.ranks.items():
            if record.is_asleep or incarnations.get(rank, record.incarnation) != record.incarnation:
                return rank
        return None

    def local_ranks(self) -> list[LocalRank]:
        """Return its ranks whose workers are connected here."""
        return [record for record in self.ranks.values() if isinstance(record, LocalRank)]


class Registry:
    """The engines that are here. There is at most one record for each rank and generation."""

    def __init__(self, context: NodeContext, owners: Owners) -> None:
        self._context = context
        self._share = context.ledger[RANKS]
        self.owners = owners
        self._engines: dict[EngineId, dict[EngineKey, LocalEngine]] = {}  # of an id the oldest first

    def __iter__(self) -> Iterator[LocalEngine]:
        for generations in self._engines.values():
            yield from generations.values()

    def local_ranks(self) -> Iterator[LocalRank]:
        """Return the ranks whose workers are connected here, of all engines."""
        for engine in self:
            yield from engine.local_ranks()

    def get(self, key: EngineKey) -> LocalEngine | None:
        """Return the engine; None: no rank of it is here."""
        return self._engines.get(key.engine_id, {}).get(key)

    def newest(self, engine_id: EngineId) -> EngineKey | None:
        """Return the generation that started last, of those that are here."""
        return next(reversed(self._engines.get(engine_id, {})), None)

    def is_silent(self, record: RankRecord) -> bool:
        """Whether the daemon of another node that has joined the rank has sent no heartbeat for too long."""
        limit_s = self._context.settings.member_silent_after_s
        return isinstance(record, MemberRank) and record.last_seen_at <= self._context.now - limit_s

    def users_of(self, engine_id: EngineId) -> set[int]:
        """Return the users of the local ranks of the newest generation, or if it has none the last owner."""
        generations = self.generations_of(engine_id)
        present = {rank.uid for rank in generations[-1].local_ranks()} if generations else set()
        if present or (last := self.owners.user_of(engine_id)) is None:
            return present
        return {last}

    def has_local_rank(self, engine_id: EngineId) -> bool:
        """Whether a rank of any generation of the engine is connected here."""
        return any(engine.local_ranks() for engine in self.generations_of(engine_id))

    def is_owner(self, uid: int, engine_id: EngineId) -> bool:
        """Whether the user may act for the engine: root, an owner, or any user while it has no owner."""
        users = self.users_of(engine_id)
        return not users or uid in (0, *users)

    def check_absent_owner(self, spec: EngineSpec) -> None:
        """Raise EngineError where the rank of a local worker is kept for another node's daemon."""
        row = self.owners.find_absent(spec.key, spec.rank)
        if row is None or is_user(row.owner) or not self.is_home(spec):
            return
        left_s = self.owners.left_s(row)
        raise EngineError(
            f"cannot register rank {spec.rank} of engine {spec.key}: it is another node's, and is kept for "
            f"its daemon for {left_s:.0f} s; register it there, start this engine with a new generation, or "
            "have the operator disown it",
            Code.RANK_TAKEN,
            retry_after_s=left_s,
        )

    def may_publish(self, uid: int, engine_id: EngineId) -> bool:
        """Whether the user may publish for the engine: the mover of a rank here serves its fence pages.

        Root too needs a rank of its own: no mover serves pages of other users.
        """
        users = self.users_of(engine_id)
        return not users or uid in users

    def charges(self) -> Iterator[Charge]:
        """Yield what the ranks of this node's workers are counted for."""
        return ((RANKS, rank.uid, 1) for rank in self.local_ranks())

    def successor(self, key: EngineKey) -> EngineKey | None:
        """Return the generation that has replaced this one, which gets no new grants; None: none has.

        It started later, and something is heard of it: else it may have ended with its nodes.
        """
        for engine in reversed(self.generations_of(key.engine_id)):
            if engine.key == key:
                return None
            if not all(map(self.is_silent, engine.ranks.values())):
                return engine.key
        return None

    def is_home(self, spec: EngineSpec) -> bool:
        """Whether this daemon is the engine's home."""
        return spec.home in ("", self._context.endpoint)

    def generations_of(self, engine_id: EngineId) -> list[LocalEngine]:
        """Return every generation of the engine that is here, the oldest first."""
        return list(self._engines.get(engine_id, {}).values())

    def check_claim(self, record: RankRecord, replaced: MemberRank | None = None) -> None:
        """Raise EngineError where the rank cannot be added: it is taken, or disagrees with the others.

        `replaced`: the record that this one may replace.
        """
        spec = record.spec
        engine = self.get(spec.key) or LocalEngine(spec)
        check_same_engine(engine.spec, spec)
        present = engine.ranks.get(spec.rank)
        if present is not None and present is not replaced:
            raise EngineError(
                f"cannot register rank {spec.rank} of engine {spec.key}: another worker holds it; "
                "stop that worker, or start this engine with a new generation",
                Code.RANK_TAKEN,
            )
        others = {r: (x.spec, x.layout) for r, x in engine.ranks.items() if r != spec.rank}
        others[spec.rank] = (spec, record.layout)
        if len(others) == len(spec.ranks()) and self.is_home(spec):
            try:
                check_engine(others)
            except KvxferdError as error:
                raise EngineError(f"cannot complete engine {spec.key}: {error}", error.code) from error

    def claim(self, record: RankRecord) -> None:
        """Add the rank, after `check_claim`. The first rank of a new generation supersedes the old one.

        A generation that was here before the present one started does not: it has only connected again.
        """
        engine = self.get(record.spec.key)
        if engine is None:
            engine = LocalEngine(record.spec)
            self.owners.add_generation(engine.key)
            generations = [*self.generations_of(engine.key.engine_id), engine]
            generations.sort(key=lambda one: self.owners.position_of(one.key))
            self._engines[engine.key.engine_id] = {one.key: one for one in generations}
        engine.put(record)
        if isinstance(record, LocalRank):
            self._share.add(record.uid, 1)

    def remove(self, record: RankRecord) -> None:
        """Remove the rank, and its engine with the last one."""
        engine = self._engines[record.spec.key.engine_id][record.spec.key]
        engine.remove(record.spec.rank)
        if isinstance(record, LocalRank):
            self._share.release(record.uid)
        if not engine.ranks:
            discard(self._engines, engine.key.engine_id, engine.key)

    def manifest(self, engine: LocalEngine, reader: str, pp_aware: bool) -> tuple[msgspec.Raw, ...]:
        """Return the encoded manifests of all ranks of a complete engine, stage by stage.

        Raises NotPPAwareError, which names the reader, where it is not PP-aware and there are later stages.
        """
        workers = ({rank: record.encoded_manifest()} for rank, record in engine.ranks.items())
        return tuple(aggregate_metadata(workers, reader, pp_aware).values())
