"""The source's side of a transfer: publish, lease, release. `grant_server` decides who may read it.

`num_readers` is how many engines must finish before the release, not who may read: a second decode engine
takes over a request that failed half-way on the first. A publish lists every group of all stages of its
engine, and each list is checked by every rule that a rank has for its group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import EmitRecord, OverwriteFenceWord, SendToWorker
from kvxferd.core.limits.block_id_memory import (
    check_num_ids,
    incarnation_bytes,
    request_bytes,
)
from kvxferd.core.limits.checks import check_count
from kvxferd.core.limits.fair_share import Owner
from kvxferd.core.limits.table import BLOCK_ID_BYTES
from kvxferd.core.peers.requests import OpenRequest, PeerRequests
from kvxferd.core.ranks.polling import PollRequests
from kvxferd.core.ranks.rank import ASLEEP, LocalRank, MemberRank, RankRecord
from kvxferd.core.ranks.registry import LocalEngine, Registry
from kvxferd.core.ranks.session import Session
from kvxferd.core.source.transfer_table import EarlyReady, Transfer, TransferKey, TransferTable
from kvxferd.core.source.waiting import WaitingRequests
from kvxferd.core.traces import sampled_trace
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import EngineKey, GrantId, GroupName, Incarnation, Rank, SessionId, TransferId
from kvxferd.layout import BlocksByGroup, GroupKind, PackedBlocks, append_ids
from kvxferd.plan import BlockRules, check_blocks_by, check_open_blocks, covered_tokens
from kvxferd.records import ReleaseRecord
from kvxferd.wire.limits import MAX_NAME_CHARS
from kvxferd.wire.peer import TransferReleased
from kvxferd.wire.traceparent import span_id_for
from kvxferd.wire.worker import (
    Publish,
    PublishRefused,
    Released,
)


class PublishedTransfers:
    """Every transfer published on this node, from its publish to its one release."""

    def __init__(
        self,
        context: NodeContext,
        registry: Registry,
        poll_requests: PollRequests,
        peer_requests: PeerRequests,
        waiting: WaitingRequests,
    ) -> None:
        self._context = context
        self._registry = registry
        self._poll_requests = poll_requests
        self._peer_requests = peer_requests
        self._waiting = waiting
        self._block_ids = context.ledger[BLOCK_ID_BYTES]
        self.table = TransferTable(context.ledger)

    # --- publish and ready

    def publish(
        self,
        session: Session,
        engine: EngineKey,
        message: Publish,
        blocks: BlocksByGroup,
        fence_word: bytes,
    ) -> None:
        """Start a transfer's life, or refuse it."""
        former = self.table.live.get((engine, message.transfer_id))
        if (
            former is not None
            and former.session != session.session_id
            and _is_repeated(former, message, session)
        ):
            # Its client has connected anew, and the old connection's end, which releases it, is not seen yet.
            self.release(former, Code.PUBLISHER_GONE)
        try:
            transfer = self._admit(session, engine, message, blocks, fence_word)
        except KvxferdError as error:
            refused = PublishRefused(
                transfer_id=message.transfer_id,
                code=error.code,
                message=error.message,
                retry_after_s=error.retry_after_s,
            )
            self._context.emit(SendToWorker(session.session_id, refused))
            return
        self.table.add(transfer)
        self._block_ids.add(transfer.uid, transfer.charged_bytes)
        self.schedule_lease_check(transfer)
        self._waiting.wake((engine, message.transfer_id))

    def _admit(
        self,
        session: Session,
        engine_key: EngineKey,
        message: Publish,
        blocks: BlocksByGroup,
        fence_word: bytes,
    ) -> Transfer:
        engine, rank = self._registry.get(engine_key), session.own_rank
        self._check_publisher(engine_key, engine, message)
        self._check_slot(session.session_id, message)
        limit = self._context.settings.limits.max_transfers_per_engine
        full = (
            f"publish transfer {message.transfer_id}: engine {engine_key} has {limit} that are not released"
        )
        check_count(self.table.num_of_engine(engine_key), limit, full, "limits.max_transfers_per_engine")
        assert engine is not None
        incarnations = self._incarnations_of(session, engine, message)
        charged = request_bytes(blocks) + incarnation_bytes(len(engine.spec.ranks()), message.incarnations)
        self._block_ids.check(session.uid, charged, f"publish transfer {message.transfer_id}")
        has_all_blocks = self._check_blocks(engine, message, blocks, rank)
        now = self._context.now
        lease_s = message.lease_s or self._context.settings.lease_s
        return Transfer(
            engine=engine_key,
            transfer_id=message.transfer_id,
            nonce=message.nonce,
            session=session.session_id,
            uid=session.uid,
            fence_slot=message.fence_slot,
            fence_word=fence_word,
            blocks=dict(blocks),
            num_tokens=message.num_tokens,
            num_readers=max(1, message.num_readers),
            published_at=now,
            lease_expires_at=now + lease_s,
            ready={rank} if rank is not None and message.ready_tokens < 0 else set(),
            incarnations=incarnations,
            lease_s=lease_s,
            ready_tokens={rank: message.ready_tokens}
            if rank is not None and message.ready_tokens >= 0
            else {},
            covered_tokens=covered_tokens(engine.rules, blocks, message.num_tokens),
            has_all_blocks=has_all_blocks,
            charged_bytes=charged,
            traceparent=sampled_trace(self._context.settings, message.traceparent, message.nonce),
        )

    @staticmethod
    def _check_blocks(
        engine: LocalEngine, message: Publish, blocks: BlocksByGroup, rank: Rank | None
    ) -> bool:
        """Check the block lists against the groups of all ranks: each rank reads only its own groups.

        Returns whether they hold the whole request: no blocks are to be added.
        """
        check_num_ids(blocks, f"publish transfer {message.transfer_id}")
        unknown = blocks.keys() - {rule.group.name for rule in engine.rules}
        if unknown and (absent := engine.unregistered()):
            # After a restart the ranks come back one by one, in any order.
            raise EngineError(
                f"cannot publish transfer {message.transfer_id}: no rank that is registered has group "
                f"{min(unknown)!r}, and ranks {', '.join(map(str, absent))} of engine {engine.key} are not "
                "there; publish once all ranks are registered",
                Code.ENGINE_INCOMPLETE,
            )
        if message.ready_tokens == -1:
            check_blocks_by(engine.rules, blocks, message.num_tokens, "the engine's")
            return True
        nobody_extends = rank is None and engine.spec.publish_implies_ready
        if nobody_extends or not 0 <= message.ready_tokens <= message.num_tokens:
            raise EngineError(
                f"cannot publish transfer {message.transfer_id} with {message.ready_tokens} of "
                f"{message.num_tokens} tokens ready: give at most all of them, and where the engine declares "
                "`publish_implies_ready` publish on a rank"
            )
        return check_open_blocks(engine.rules, blocks, message.num_tokens)

    def add_blocks(
        self,
        session: SessionId,
        engine_key: EngineKey,
        transfer_id: TransferId,
        blocks: BlocksByGroup,
    ) -> None:
        """Add blocks to a transfer of this session. One that is over, or not there yet, changes nothing.

        A list that does not fit ends the transfer, because its ranks already write there.
        """
        engine = self._registry.get(engine_key)
        transfer = self.table.live.get((engine_key, transfer_id))
        if transfer is None or engine is None or transfer.session != session:
            return
        rules, before = engine.rules, request_bytes(transfer.blocks)
        try:
            if transfer.has_all_blocks:
                raise EngineError(f"cannot extend transfer {transfer.transfer_id}: it has all its blocks")
            _append(rules, transfer.blocks, blocks)
            check_num_ids(transfer.blocks, f"extend transfer {transfer.transfer_id}")
            charged = request_bytes(transfer.blocks) - before
            self._block_ids.check(transfer.uid, charged, f"extend transfer {transfer.transfer_id}")
            transfer.has_all_blocks = check_open_blocks(rules, transfer.blocks, transfer.num_tokens, blocks)
        except KvxferdError as error:
            # A group that no rank here has may be that of a rank which has left, or is not back yet.
            is_known = blocks.keys() <= {rule.group.name for rule in rules}
            is_absent = not is_known and bool(engine.unregistered())
            self.release(transfer, Code.RANK_LOST if is_absent else error.code)
            return
        self._block_ids.add(transfer.uid, charged)
        transfer.charged_bytes += charged
        transfer.covered_tokens = covered_tokens(rules, transfer.blocks, transfer.num_tokens)
        self._renew_lease(transfer)
        self._waiting.wake((engine_key, transfer_id))

    def _renew_lease(self, transfer: Transfer) -> None:
        """Keep a transfer that grows: its prefill runs. The timer stays, and finds the lease renewed."""
        transfer.lease_expires_at = max(transfer.lease_expires_at, self._context.now + transfer.lease_s)

    def _incarnations_of(
        self, session: Session, engine: LocalEngine, message: Publish
    ) -> Mapping[Rank, Incarnation]:
        """Return the mappings that hold the transfer's bytes, as the publisher knew them at the call.

        They are never taken from the registry: the call may be older than this daemon, and a rank may have
        slept since.
        """
        what = f"cannot publish transfer {message.transfer_id}"
        shape = engine.spec.ranks()
        named = message.incarnations
        if len(named) > len(shape) or any(len(incarnation) > MAX_NAME_CHARS for _, incarnation in named):
            raise EngineError(
                f"{what}: it names {len(named)} incarnations of {len(shape)} ranks; name each rank's once, "
                f"of {MAX_NAME_CHARS} characters at most",
                Code.RANK_INVALID,
            )
        incarnations = engine.intern_incarnations(named)
        if (rank := engine.find_remapped(incarnations)) is not None:
            self._context.emit(OverwriteFenceWord(session.session_id, message.fence_slot))
            raise EngineError(
                f"{what}: rank {rank} of engine {engine.key} sleeps, or its memory was mapped anew since "
                "`publish` was called, so the bytes are gone; publish what it computes from here on",
                Code.RANK_LOST,
            )
        own = [] if session.own_rank is None else [session.own_rank]
        needed = shape if engine.spec.publish_implies_ready else own
        unknown = [rank for rank in needed if rank not in incarnations]
        if unknown or not incarnations:
            ranks = ", ".join(map(str, unknown)) or "any"
            raise EngineError(
                f"{what}: its publisher did not know rank {ranks} of engine {engine.key} when `publish` was "
                "called; publish once all ranks are registered",
                Code.TRANSFER_NOT_READY,
            )
        return incarnations

    def _check_publisher(self, key: EngineKey, engine: LocalEngine | None, message: Publish) -> None:
        what = f"cannot publish transfer {message.transfer_id}"
        if self._context.draining:
            raise EngineError(
                f"{what}: this daemon is draining; publish after it has restarted", Code.DRAINING
            )
        if not 0 <= message.lease_s <= self._context.settings.max_lease_s:
            raise EngineError(
                f"{what}: a lease of {message.lease_s} s; "
                f"give 0 (the default) to {self._context.settings.max_lease_s:g}"
            )
        if engine is None:
            raise EngineError(
                f"{what}: no rank of engine {key} is registered here; register the ranks first",
                Code.ENGINE_INCOMPLETE,
            )
        if not self._registry.is_home(engine.spec):
            raise EngineError(
                f"{what}: engine {key} is aggregated at {engine.spec.home}; publish on that node",
                Code.NOT_HOME,
            )
        ended = self.table.tombstones.get((key, message.transfer_id))
        if ended is not None:
            # A client repeats a publish on a new connection, and the end of the old connection has released
            # it. Or it is another transfer of the same id: a late `ready` of a member, or a `Released` that
            # is still under way, would count for the new one.
            raise EngineError(
                f"{what}: it was released ({ended.why}), and its ranks know; publish under another id",
                Code.RELEASED if ended.nonce == message.nonce else Code.TRANSFER_EXISTS,
            )
        if (key, message.transfer_id) in self.table.live:
            raise EngineError(
                f"{what}: it is published already; unpublish it first, or choose another id",
                Code.TRANSFER_EXISTS,
            )

    def _check_slot(self, session: SessionId, message: Publish) -> None:
        """Refuse a fence slot that is in use: the end of one transfer would void the other.

        This limits the number of a session's transfers, too.
        """
        if (holder := self.table.in_slot(session, message.fence_slot)) is not None:
            raise EngineError(
                f"cannot publish transfer {message.transfer_id}: fence slot {message.fence_slot} is transfer "
                f"{holder.transfer_id}'s, which is not released yet",
                Code.OUT_OF_PLACE,
            )

    def rank_ready(
        self, record: RankRecord, incarnation: Incarnation, transfer_id: TransferId, ready_tokens: int = -1
    ) -> None:
        """Record that a rank has finished writing in that mapping of its memory, maybe before the publish.

        `ready_tokens`: it has written so many tokens, counted from the first; -1: all.
        If that is not its present mapping, or not the published one, the bytes are gone.
        """
        engine, rank = record.spec.key, record.spec.rank
        key: TransferKey = (engine, transfer_id)
        is_there = incarnation == record.incarnation and not record.is_asleep
        if transfer := self.table.live.get(key):
            if not (is_there and transfer.set_ready(rank, incarnation, ready_tokens)):
                self.release(transfer, Code.RANK_LOST)
                return
            if ready_tokens >= 0:
                self._renew_lease(transfer)
            self._waiting.wake(key)
            return
        if not is_there or key in self.table.tombstones:
            return
        limit = self._context.settings.limits.max_transfers_per_engine
        owner = _owner_of(record)
        if key not in self.table.early_ready and not self.table.has_room_for_ready(engine, limit, owner):
            return  # an engine that sends ready and never publishes; its transfers stay unready
        self.table.add_early_ready(key, rank, EarlyReady(incarnation, ready_tokens), owner)
        self._context.after(
            ("early-ready", key),
            self._context.settings.lease_s,
            lambda: self.table.forget_early_ready(key),
        )

    def unpublish(self, session: SessionId, engine: EngineKey, transfer_id: TransferId) -> None:
        """Release a transfer for its publisher. An unknown one has been released already."""
        transfer = self.table.live.get((engine, transfer_id))
        if transfer is not None and transfer.session == session:
            self.release(transfer, Code.UNPUBLISHED)

    def cancel(self, engine: EngineKey, transfer_id: TransferId) -> None:
        """Release a transfer for the operator. An unknown one has been released already."""
        if transfer := self.table.live.get((engine, transfer_id)):
            self.release(transfer, Code.CANCELLED)

    def session_closed(self, session: SessionId) -> None:
        """Release what the session published: no client is left that could overwrite its fence words."""
        for transfer in self.table.published_by(session):
            self.release(transfer, Code.PUBLISHER_GONE)

    def rank_lost(self, engine: EngineKey, why: Code) -> None:
        """Release what the engine published: a rank's memory is gone, or has another mapping."""
        for transfer in self.table.of_engine(engine):
            self.release(transfer, why)

    def rank_mapped(self, record: RankRecord) -> None:
        """Release what was published of another mapping of the rank's memory: the rank has (re)appeared."""
        key, rank, incarnation = record.spec.key, record.spec.rank, record.incarnation
        for transfer in self.table.of_engine(key):
            if transfer.incarnations.get(rank, incarnation) != incarnation:
                self.release(transfer, Code.RANK_LOST)
        self.table.end_early_ready(key, rank, incarnation)

    def rank_suspended(self, record: RankRecord) -> None:
        """Release what the engine published: the rank's worker takes its memory back."""
        self.rank_lost(record.spec.key, Code.SUSPENDED)
        self.table.end_early_ready(record.spec.key, record.spec.rank)

    # --- the lease

    def is_ready(self, transfer: Transfer, engine: LocalEngine) -> bool:
        """Whether every rank has finished writing the transfer's blocks."""
        if not transfer.has_all_blocks:
            return False
        if engine.spec.publish_implies_ready and not transfer.ready_tokens:
            return True
        return transfer.ready.issuperset(self._writers(transfer, engine))

    def tokens_ready(self, transfer: Transfer, engine: LocalEngine) -> int:
        """Return up to which token every rank has written the transfer."""
        return transfer.tokens_ready_on(self._writers(transfer, engine))

    @staticmethod
    def _writers(transfer: Transfer, engine: LocalEngine) -> Iterable[Rank]:
        """Return the ranks whose reports count: where the publish implies them, the publisher's alone."""
        return transfer.ready_tokens if engine.spec.publish_implies_ready else engine.spec.ranks()

    def schedule_lease_check(self, transfer: Transfer) -> None:
        """Look at the lease when it, or the first grant on it, ends. Called whenever that may be earlier."""
        key, when = (transfer.engine, transfer.transfer_id), transfer.next_expiry(self._context.now)
        self._context.timers.set(("lease", key), when, lambda: self._check_lease(transfer))

    def _check_lease(self, transfer: Transfer) -> None:
        now = self._context.now
        for grant in [g for g in transfer.grants.values() if g.expires_at <= now]:
            self.end_grant(grant.grant_id)
        if transfer.expires_at <= now:
            self.release(transfer, Code.LEASE_EXPIRED)
        else:
            self.schedule_lease_check(transfer)

    def end_grant(self, grant_id: GrantId) -> None:
        """Take a grant off its lease. Does nothing where there is none."""
        if grant := self.table.end_grant(grant_id):
            for agent in sorted(grant.agents):
                self._poll_requests.release(agent, grant_id)

    def release(self, transfer: Transfer, why: Code) -> None:
        """End the transfer: overwrite the fence word first, then report the release to its owners."""
        context = self._context
        context.emit(OverwriteFenceWord(transfer.session, transfer.fence_slot))
        for grant_id in list(transfer.grants):
            self.end_grant(grant_id)
        self._block_ids.release(transfer.uid, transfer.charged_bytes)
        if (forgotten := self.table.end(transfer, why)) is not None:
            context.timers.cancel(("tombstone", forgotten))
        key = (transfer.engine, transfer.transfer_id)
        context.timers.cancel(("lease", key))
        context.after(
            ("tombstone", key), context.settings.tombstone_s, lambda: self.table.forget_tombstone(key)
        )
        self._notify_owners(transfer, why)
        self._waiting.wake_later(key)
        context.emit(
            EmitRecord(
                ReleaseRecord(
                    transfer_id=transfer.transfer_id,
                    engine_id=transfer.engine.engine_id,
                    why=why,
                    held_s=context.now - transfer.published_at,
                    readers=transfer.reader_records(),
                    bytes=transfer.num_bytes_read,
                    traceparent=transfer.traceparent,
                    span_id=span_id_for(transfer.nonce) if transfer.traceparent else "",
                )
            )
        )

    def _notify_owners(self, transfer: Transfer, why: Code) -> None:
        engine = self._registry.get(transfer.engine)
        records = list(engine.ranks.values()) if engine else []
        sessions = {transfer.session, *(r.session for r in records if isinstance(r, LocalRank))}
        for session in sorted(sessions):
            self._context.emit(SendToWorker(session, Released(transfer_id=transfer.transfer_id, why=why)))
        members = {(r.route, r.key) for r in records if isinstance(r, MemberRank)}
        for route, key in sorted(members):
            message = TransferReleased(
                request=self._peer_requests.next_id(),
                engine_id=transfer.engine.engine_id,
                generation=transfer.engine.generation,
                transfer_id=transfer.transfer_id,
                why=why,
            )
            timeout_s = self._context.settings.acknowledge_for_s
            self._peer_requests.send(OpenRequest(route, message, timeout_s, key=key))

    def check_integrity(self) -> None:
        """Raise AssertionError where the tables contradict each other."""
        for key, transfer in self.table.live.items():
            assert key not in self.table.tombstones, f"{key} is live and ended"
            assert ("lease", key) in self._context.timers, f"{key} has no lease timer"
            self._check_memory(key, transfer)
            for grant_id, grant in transfer.grants.items():
                assert self.table.by_grant.get(grant_id) is transfer
                assert (
                    grant.expires_at
                    <= grant.granted_at + self._context.settings.max_hold_s + self._context.settings.lease_s
                )
                has_ended = grant.expires_at <= self._context.now and not self._context.is_behind
                assert not has_ended, f"grant {grant_id} of {key} has expired"
        self._check_early_ready()
        for grant_id, transfer in self.table.by_grant.items():
            assert grant_id in transfer.grants, f"grant {grant_id} is on no lease"

    def _check_early_ready(self) -> None:
        """Raise AssertionError where a rank that is here said ready early of memory that is gone."""
        for (engine_key, transfer_id), ranks in self.table.early_ready.items():
            engine = self._registry.get(engine_key)
            for rank, early in ranks.items():
                record = engine.ranks.get(rank) if engine is not None else None
                assert record is None or early.incarnation == record.incarnation, (
                    f"{transfer_id} of {engine_key}: rank {rank} was ready in another mapping"
                )

    def _check_memory(self, key: TransferKey, transfer: Transfer) -> None:
        """Raise AssertionError where the bytes of a live transfer are gone."""
        engine = self._registry.get(transfer.engine)
        for rank, record in engine.ranks.items() if engine is not None else ():
            named = transfer.incarnations.get(rank, record.incarnation)
            assert not record.is_readable or record.incarnation == named, (
                f"{key}: rank {rank} was mapped anew"
            )
            is_asleep = isinstance(record, LocalRank) and record.state in ASLEEP
            assert not is_asleep, f"{key}: rank {rank} sleeps"


def _is_repeated(former: Transfer, message: Publish, session: Session) -> bool:
    """Whether a publish has come before, on another connection of its client."""
    is_same = former.nonce == message.nonce and former.uid == session.uid
    return is_same and former.session != session.session_id


def _append(rules: BlockRules, kept: BlocksByGroup, added: Mapping[GroupName, PackedBlocks]) -> None:
    """Put the added ids behind those that are kept; of a state the last list counts."""
    for name, packed in added.items():
        before = kept.get(name)
        if before is None or not before.ids or _is_state(rules, name):
            kept[name] = packed
        else:
            kept[name] = append_ids(before, packed.ids)


def _is_state(rules: BlockRules, name: GroupName) -> bool:
    return any(group.name == name and group.kind is GroupKind.STATE for group, _ in rules)


def _owner_of(record: RankRecord) -> Owner:
    """Return whose share an early `ready` of the rank counts for: its user, or a member rank's daemon."""
    return record.uid if isinstance(record, LocalRank) else record.owner
