"""Published transfers, the grants on their leases, who has read them, and those that have ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvxferd.core.context import NodeContext
from kvxferd.core.limits.ledger import Charge, Ledger
from kvxferd.core.limits.table import ACKNOWLEDGED, BLOCK_ID_BYTES, ENDED_TRANSFERS, GRANTS
from kvxferd.core.ranks.registry import LocalEngine
from kvxferd.core.tables import discard
from kvxferd.errors import Code
from kvxferd.ids import (
    AgentName,
    Endpoint,
    EngineId,
    EngineKey,
    GrantId,
    Incarnation,
    Rank,
    SessionId,
    TransferId,
)
from kvxferd.layout import BlocksByGroup, EngineSpec
from kvxferd.plan import covered_tokens, has_all_blocks
from kvxferd.records import HolderSnapshot, ReaderRecord, TransferSnapshot
from kvxferd.wire.limits import MAX_RANKS
from kvxferd.wire.peer import Consumer

TransferKey = tuple[EngineKey, TransferId]

# Of a transfer's readers, and of a reader's daemons: those that the release's record names.
MAX_RECORDED = 8
# Engines that acknowledge or abandon one transfer. A request is routed to a handful.
MAX_READERS = 256
READER_COST = 8  # of a reader itself, in ranks: its names take as much

# What a rank has written that has said so: more than any count of tokens, since states may come behind them.
ALL_TOKENS = 1 << 62


@dataclass(slots=True)
class Grant:
    """A reader's entry on a transfer's lease."""

    grant_id: GrantId
    agents: frozenset[AgentName]  # the source movers that must poll while it lives
    granted_at: float
    peer_id: str  # the reader's key, or its route
    reader: EngineId
    peer: Endpoint  # of the reader's daemon, as its greeting names it
    expires_at: float = 0.0


@dataclass(slots=True)
class Reader:
    """One consumer engine: which of its ranks have acknowledged."""

    num_ranks: int
    acknowledged: set[Rank] = field(default_factory=set)
    abandoned: bool = False
    num_bytes: int = 0  # that these ranks report
    peers: dict[Endpoint, None] = field(default_factory=dict)  # of their daemons, the first few

    def acknowledge(self, rank: Rank, num_bytes: int, peer: Endpoint) -> None:
        """Record that the rank of a daemon has its bytes, for the first time."""
        self.acknowledged.add(rank)
        self.num_bytes += num_bytes
        if peer and len(self.peers) < MAX_RECORDED:
            self.peers[peer] = None

    @property
    def is_done(self) -> bool:
        """Whether it does not need the blocks any more."""
        return self.abandoned or len(self.acknowledged) >= self.num_ranks


@dataclass(slots=True, kw_only=True)
class Transfer:
    """One request's cache, published here. `PublishedTransfers.release` ends it, once."""

    engine: EngineKey
    transfer_id: TransferId
    nonce: str
    session: SessionId  # the publisher's; its fence page holds the word
    uid: int  # the publisher's, whose share the block ids count for
    fence_slot: int
    fence_word: bytes
    blocks: BlocksByGroup
    num_tokens: int
    num_readers: int
    published_at: float
    lease_expires_at: float
    # The mappings that hold its bytes, as the publisher knew them, else as each rank's `ready` named them.
    # Transfers share this object: it is replaced, never changed.
    incarnations: Mapping[Rank, Incarnation]
    lease_s: float = 0.0  # by which an extension renews the lease
    ready_tokens: dict[Rank, int] = field(default_factory=dict)  # how far each rank has written it
    is_growing: bool = False  # its publisher adds blocks
    charged_bytes: int = 0  # that count in its user's share
    traceparent: str = ""  # under which this node records it; "": it does not
    grants: dict[GrantId, Grant] = field(default_factory=dict)
    readers: dict[EngineKey, Reader] = field(default_factory=dict)
    reader_cost_of_peer: Counter[str] = field(default_factory=Counter)  # in ranks, by peer id

    @property
    def key(self) -> TransferKey:
        """Its engine and id."""
        return self.engine, self.transfer_id

    def set_ready(self, rank: Rank, incarnation: Incarnation, ready_tokens: int) -> None:
        """Record that a rank has written tokens [0, ready_tokens); a late smaller number changes nothing.

        `incarnation`: the mapping in which it wrote, which is the published one, or counts where none is.
        """
        if rank not in self.incarnations:
            self.incarnations = {**self.incarnations, rank: incarnation}
        num_ready = ready_tokens if ready_tokens < self.num_tokens else ALL_TOKENS
        self.ready_tokens[rank] = max(self.ready_tokens.get(rank, 0), num_ready)

    def unready(self, spec: EngineSpec) -> list[Rank]:
        """Return the ranks that have not written all of it."""
        return [r for r in self._writers(spec) if self.ready_tokens.get(r, 0) < ALL_TOKENS]

    def has_all_blocks(self, engine: LocalEngine) -> bool:
        """Whether no blocks are to be added. A rank that comes back may bring a group that lacks them."""
        return not self.is_growing or has_all_blocks(engine.rules, self.blocks, self.num_tokens)

    def is_ready(self, engine: LocalEngine) -> bool:
        """Whether every rank of the engine has finished writing all blocks."""
        return self.has_all_blocks(engine) and not self.unready(engine.spec)

    def tokens_ready(self, engine: LocalEngine) -> int:
        """Return up to which token every rank has written it, and its blocks are known."""
        known = self.num_tokens
        if not self.has_all_blocks(engine):
            known = covered_tokens(engine.rules, self.blocks, self.num_tokens)
        return min([known, *(self.ready_tokens.get(rank, 0) for rank in self._writers(engine.spec))])

    def _writers(self, spec: EngineSpec) -> Iterable[Rank]:
        """Return the ranks whose reports count: where the publish implies them, the publisher's alone."""
        return self.ready_tokens if spec.publish_implies_ready else spec.ranks()

    def expires_at(self, is_written: bool) -> float:
        """Return when the lease ends: once all is written, never before the grants on it."""
        grants = self.grants.values() if is_written else ()
        return max([self.lease_expires_at, *(grant.expires_at for grant in grants)])

    def next_expiry(self, now: float) -> float:
        """When the first grant on the lease ends, or the lease, unless that is over and grants keep it."""
        ends = [grant.expires_at for grant in self.grants.values()]
        if self.lease_expires_at > now or not ends:
            ends.append(self.lease_expires_at)
        return min(ends)

    @property
    def is_read_by_all(self) -> bool:
        """Whether every announced reader is done."""
        return sum(reader.is_done for reader in self.readers.values()) >= self.num_readers

    def state(self, is_ready: bool) -> str:
        """Return the state as /v1/transfers shows it: "granted", "readable" or "writing"."""
        return "granted" if self.grants else "readable" if is_ready else "writing"

    @property
    def num_bytes_read(self) -> int:
        """The bytes that its readers report."""
        return sum(reader.num_bytes for reader in self.readers.values())

    def reader_records(self) -> tuple[ReaderRecord, ...]:
        """Return the first engines that acknowledged, as the release's record names them."""
        done = [(key, reader) for key, reader in self.readers.items() if reader.acknowledged][:MAX_RECORDED]
        return tuple(
            ReaderRecord(
                engine_id=key.engine_id,
                peers=tuple(reader.peers),
                num_ranks=len(reader.acknowledged),
                bytes=reader.num_bytes,
            )
            for key, reader in done
        )

    def holders(self, now: float) -> tuple[HolderSnapshot, ...]:
        """Return the first engines that hold it, and for how long."""
        since: dict[tuple[EngineId, Endpoint], list[float]] = {}
        for grant in self.grants.values():
            since.setdefault((grant.reader, grant.peer), []).append(grant.granted_at)
        return tuple(
            HolderSnapshot(
                engine_id=engine_id, peer=peer, num_grants=len(times), held_s=round(now - min(times), 3)
            )
            for (engine_id, peer), times in list(since.items())[:MAX_RECORDED]
        )

    def snapshot(self, now: float, state: str, ready_tokens: int) -> TransferSnapshot:
        """Return the transfer as /v1/transfers shows it. `ready_tokens`: that every rank has written."""
        return TransferSnapshot(
            transfer_id=self.transfer_id,
            engine_id=self.engine.engine_id,
            generation=self.engine.generation,
            state=state,
            num_tokens=self.num_tokens,
            num_grants=len(self.grants),
            holders=self.holders(now),
            num_acks=sum(len(reader.acknowledged) for reader in self.readers.values()),
            lease_left_s=round(self.expires_at(ready_tokens >= self.num_tokens) - now, 3),
            age_s=round(now - self.published_at, 3),
            ready_tokens=ready_tokens,
        )


class TransferTable:
    """The live transfers of this node's engines, and the grants on them."""

    def __init__(self, ledger: Ledger) -> None:
        self.live: dict[TransferKey, Transfer] = {}
        self._reader_share = ledger[ACKNOWLEDGED]
        self._grant_share = ledger[GRANTS]
        self.by_grant: dict[GrantId, Transfer] = {}
        self._by_session: dict[SessionId, dict[int, Transfer]] = {}  # by fence slot
        self._by_engine: dict[EngineKey, dict[TransferId, Transfer]] = {}

    def add(self, transfer: Transfer) -> None:
        """Start a transfer's life."""
        assert transfer.key not in self.live
        self.live[transfer.key] = transfer
        self._by_session.setdefault(transfer.session, {})[transfer.fence_slot] = transfer
        self._by_engine.setdefault(transfer.engine, {})[transfer.transfer_id] = transfer

    def remove(self, transfer: Transfer) -> None:
        """Forget a transfer that has ended, and who has read it."""
        del self.live[transfer.key]
        discard(self._by_session, transfer.session, transfer.fence_slot)
        discard(self._by_engine, transfer.engine, transfer.transfer_id)
        for peer_id, amount in transfer.reader_cost_of_peer.items():
            self._reader_share.release(peer_id, amount)

    def num_of_engine(self, engine: EngineKey) -> int:
        """Return how many live transfers the engine has."""
        return len(self._by_engine.get(engine, ()))

    @property
    def most_of_engine(self) -> int:
        """The live transfers of the engine that has most."""
        return max(map(len, self._by_engine.values()), default=0)

    def keep_reader(
        self, transfer: Transfer, peer_id: str, consumer: Consumer, acknowledges: bool
    ) -> Reader | None:
        """Return the consumer's engine among the readers; None: it is invented, or its peer has no room.

        Any holder of the reference may read while the transfer lives. A request that failed on one decode
        engine may be sent to another one, also when some ranks of the first have acknowledged.
        """
        engine = EngineKey(consumer.engine_id, consumer.generation)
        if (reader := transfer.readers.get(engine)) is not None:
            cost = int(acknowledges and consumer.rank not in reader.acknowledged)
            fits = not cost or len(reader.acknowledged) < MAX_RANKS
        else:
            cost = READER_COST + acknowledges
            fits = len(transfer.readers) < MAX_READERS
        if not fits or (cost and not self._reader_share.acquire(peer_id, cost)):
            return None
        transfer.reader_cost_of_peer[peer_id] += cost
        return transfer.readers.setdefault(engine, Reader(consumer.num_ranks))

    def charges(self) -> Iterator[Charge]:
        """Yield what the transfers and their readers are counted for."""
        for transfer in self.live.values():
            yield BLOCK_ID_BYTES, transfer.uid, transfer.charged_bytes
            yield from ((GRANTS, grant.peer_id, 1) for grant in transfer.grants.values())
            for peer_id, amount in transfer.reader_cost_of_peer.items():
                yield ACKNOWLEDGED, peer_id, amount

    def add_grant(self, transfer: Transfer, grant: Grant) -> None:
        """Put a new grant on the transfer's lease."""
        self._grant_share.add(grant.peer_id, 1)
        transfer.grants[grant.grant_id] = grant
        self.by_grant[grant.grant_id] = transfer

    def end_grant(self, grant_id: GrantId) -> Grant | None:
        """Take a grant off its lease and return it; None: it has ended before."""
        transfer = self.by_grant.pop(grant_id, None)
        if transfer is None:
            return None
        grant = transfer.grants.pop(grant_id)
        self._grant_share.release(grant.peer_id)
        return grant

    def published_by(self, session: SessionId) -> list[Transfer]:
        """Return the live transfers that a session published."""
        return list(self._by_session.get(session, {}).values())

    def in_slot(self, session: SessionId, slot: int) -> Transfer | None:
        """Return the live transfer whose word lies in that slot of the session's fence page."""
        return self._by_session.get(session, {}).get(slot)

    def of_engine(self, engine: EngineKey) -> list[Transfer]:
        """Return the live transfers of an engine."""
        return list(self._by_engine.get(engine, {}).values())


class Tombstone(NamedTuple):
    """The record of a transfer that has ended."""

    nonce: str
    why: Code
    uid: int
    ended_at: float


class EndedTransfers:
    """Keeps tombstones for `tombstone_s`.

    Where there is no room, the oldest go, once no message about them is repeated any more.
    """

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._share = context.ledger[ENDED_TRANSFERS]
        self._tombstones: dict[TransferKey, Tombstone] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._tombstones)

    def __iter__(self) -> Iterator[TransferKey]:
        return iter(self._tombstones)

    def get(self, key: TransferKey) -> Tombstone | None:
        """Return how a transfer ended; None: it has not, or that is forgotten."""
        return self._tombstones.get(key)

    def make_room(self, uid: int, what: str) -> None:
        """Have room to remember one more transfer of that user. Raise BusyError where there is none."""
        repeated_s = 2 * self._context.settings.acknowledge_for_s
        while not self._share.has_room(uid) and self._oldest_since() <= self._context.now - repeated_s:
            self._forget_oldest()
        self._share.check(uid, 1, what)

    def add(self, key: TransferKey, nonce: str, uid: int, why: Code) -> None:
        """Remember a transfer that has ended just now."""
        self._tombstones[key] = Tombstone(nonce, why, uid, self._context.now)
        self._share.add(uid, 1)
        if len(self) == 1:
            self._forget_old()

    def charges(self) -> Iterator[Charge]:
        """Yield what the tombstones are counted for."""
        return ((ENDED_TRANSFERS, tombstone.uid, 1) for tombstone in self._tombstones.values())

    def _forget_old(self) -> None:
        # One timer serves all: with one for each, 50,000 made every full garbage collection 50 ms longer.
        kept_s = self._context.settings.tombstone_s
        while self._oldest_since() + kept_s <= self._context.now:
            self._forget_oldest()
        if self._tombstones:
            self._context.timers.set("ended-transfers", self._oldest_since() + kept_s, self._forget_old)

    def _oldest_since(self) -> float:
        oldest = next(iter(self._tombstones.values()), None)
        return math.inf if oldest is None else oldest.ended_at

    def _forget_oldest(self) -> None:
        key = next(iter(self._tombstones))
        self._share.release(self._tombstones.pop(key).uid)
