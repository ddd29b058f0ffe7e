"""The source's side of a transfer: publish, lease, release. `grants` decides who may read it.

`num_readers` is how many engines must finish before the release, not who may read: a second decode engine
takes over a request that failed half-way on the first. A publish lists every group of all stages of its
engine, and each list is checked by every rule that a rank has for its group.
"""

from __future__ import annotations

from enum import StrEnum

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import EmitRecord, OverwriteFenceWord, ReplyToPeer, SendToWorker
from kvxferd.core.limits.ledger import GROUP_BYTES, check_num_ids
from kvxferd.core.limits.table import BLOCK_ID_BYTES
from kvxferd.core.peers.requests import OpenRequest, PeerRequests
from kvxferd.core.ranks.polling import PollRequests
from kvxferd.core.ranks.rank import LocalRank, MemberRank, RankRecord
from kvxferd.core.ranks.registry import LocalEngine, Registry
from kvxferd.core.ranks.session import Session
from kvxferd.core.source.announced import Announcements, Report, report_of
from kvxferd.core.source.publish_checks import Admitted, PublishChecks
from kvxferd.core.source.transfer_table import (
    ALL_TOKENS,
    EndedTransfers,
    Transfer,
    TransferKey,
    TransferTable,
)
from kvxferd.core.source.waiting import WaitingRequests
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import EngineKey, GrantId, SessionId, TransferId
from kvxferd.layout import BlocksByGroup, append_ids
from kvxferd.plan import check_open_blocks
from kvxferd.records import ReleaseRecord
from kvxferd.wire.peer import RankReady, RequestDone, TransferReleased
from kvxferd.wire.traceparent import span_id_for
from kvxferd.wire.worker import Publish, Released


class TransferState(StrEnum):
    """Where the id of a transfer is. What was announced or has ended is forgotten in time: UNUSED again."""

    UNUSED = "unused"
    ANNOUNCED = "announced"  # a rank has written bytes of it
    PUBLISHED = "published"  # it may be read as far as its ranks have written it
    ENDED = "ended"  # its word is overwritten, and its owners have received `Released`


class TransferEvent(StrEnum):
    """What happens to a transfer."""

    REPORT = "report"  # of a rank, how far it has written it
    PUBLISH = "publish"
    RELEASE = "release"  # read by all, abandoned, withdrawn, lapsed, or its memory or publisher is gone


# A pair that is not in the table is a bug: a publish that it does not allow has been refused before.
TRANSITIONS: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (TransferState.UNUSED, TransferEvent.REPORT): TransferState.ANNOUNCED,
    (TransferState.UNUSED, TransferEvent.PUBLISH): TransferState.PUBLISHED,
    (TransferState.ANNOUNCED, TransferEvent.REPORT): TransferState.ANNOUNCED,
    (TransferState.ANNOUNCED, TransferEvent.PUBLISH): TransferState.PUBLISHED,
    (TransferState.PUBLISHED, TransferEvent.REPORT): TransferState.PUBLISHED,
    (TransferState.PUBLISHED, TransferEvent.RELEASE): TransferState.ENDED,
    (TransferState.ENDED, TransferEvent.REPORT): TransferState.ENDED,  # it is repeated, or late
}


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
        self.announced = Announcements(context)
        self.ended = EndedTransfers(context)
        self._checks = PublishChecks(context, registry, self.table, self.ended)

    # --- publish and ready

    def publish(
        self, session: Session, engine: EngineKey, message: Publish, blocks: BlocksByGroup, fence_word: bytes
    ) -> None:
        """Start a transfer's life. Raises KvxferdError: refused."""
        former = self.table.live.get((engine, message.transfer_id))
        if (
            former is not None
            and (former.nonce, former.uid) == (message.nonce, session.uid)
            and former.session != session.session_id
        ):
            # Its client has connected anew, and the old connection's end, which releases it, is not seen yet.
            self.release(former, Code.PUBLISHER_GONE)
        try:
            admitted = self._checks.admit(session, engine, message, blocks)
        except KvxferdError as error:
            if error.code is Code.RANK_LOST:  # the bytes are gone, and no reader may prove them
                self._context.emit(OverwriteFenceWord(session.session_id, message.fence_slot))
            raise
        transfer = self._new_transfer(session, message, blocks, fence_word, admitted)
        self._next_state(transfer.key, TransferEvent.PUBLISH)
        for rank, report in self.announced.take(transfer.key).items():
            # A rank that is away may have written in another mapping than the one that is published.
            if transfer.incarnations.get(rank, report.incarnation) == report.incarnation:
                transfer.set_ready(rank, report.incarnation, report.num_tokens)
        self.table.add(transfer)
        self._block_ids.add(transfer.uid, transfer.charged_bytes)
        self.schedule_lease_check(transfer)
        self._waiting.wake(transfer.key)

    def _new_transfer(
        self, session: Session, message: Publish, blocks: BlocksByGroup, fence_word: bytes, admitted: Admitted
    ) -> Transfer:
        now, settings, rank = self._context.now, self._context.settings, session.own_rank
        lease_s = message.lease_s or settings.transfer.lease_s
        num_ready = ALL_TOKENS if message.ready_tokens < 0 else message.ready_tokens
        return Transfer(
            engine=admitted.engine.key,
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
            ready_tokens={} if rank is None else {rank: num_ready},
            incarnations=admitted.incarnations,
            lease_s=lease_s,
            is_growing=message.ready_tokens >= 0,
            charged_bytes=admitted.charged_bytes,
            traceparent=settings.sampled_trace(message.traceparent, message.nonce),
        )

    def add_blocks(
        self, session: SessionId, engine_key: EngineKey, transfer_id: TransferId, blocks: BlocksByGroup
    ) -> None:
        """Add blocks to a transfer of this session. One that is over, or not there yet, changes nothing.

        A list that does not fit ends the transfer, because its ranks already write there.
        """
        engine, transfer = self._registry.get(engine_key), self.table.live.get((engine_key, transfer_id))
        if transfer is None or engine is None or transfer.session != session:
            return
        what = f"extend transfer {transfer_id}"
        try:
            charged = _append(engine, transfer, blocks)
            check_num_ids(transfer.blocks, what)
            self._block_ids.check(transfer.uid, charged, what)
            check_open_blocks(engine.rules, transfer.blocks, transfer.num_tokens, blocks)
        except KvxferdError as error:
            # A group that no rank here has may be that of a rank which has left, or is not back yet.
            is_absent = not blocks.keys() <= engine.list_rules.keys() and bool(engine.unregistered())
            self.release(transfer, Code.RANK_LOST if is_absent else error.code)
            return
        self._block_ids.add(transfer.uid, charged)
        transfer.charged_bytes += charged
        self._renew_lease(transfer)
        self._waiting.wake(transfer.key)

    def _renew_lease(self, transfer: Transfer) -> None:
        """Have the lease run anew: the prefill runs, or a reader has failed. The timer finds it renewed."""
        transfer.lease_expires_at = max(transfer.lease_expires_at, self._context.now + transfer.lease_s)

    def rank_ready(self, record: RankRecord, transfer_id: TransferId, report: Report) -> bool:
        """Record what a rank has written, maybe before the publish; False where there is no room for that.

        If that is not its present mapping, the bytes are gone. A live transfer is of the present one.
        """
        rank, key = record.spec.rank, (record.spec.key, transfer_id)
        is_there = report.incarnation == record.incarnation
        state = self._next_state(key, TransferEvent.REPORT)
        if state is TransferState.ENDED or self.announced.is_late(key, report):
            return True
        if state is TransferState.ANNOUNCED:
            owner = record.uid if isinstance(record, LocalRank) else record.owner
            return not is_there or self.announced.add(key, rank, report, owner)
        transfer = self.table.live[key]
        if not is_there:
            self.release(transfer, Code.RANK_LOST)
            return True
        before = transfer.ready_tokens.get(rank, -1)
        transfer.set_ready(rank, report.incarnation, report.num_tokens)
        if report.num_tokens < ALL_TOKENS and transfer.ready_tokens[rank] > before:
            self._renew_lease(transfer)
        self._waiting.wake(key)
        return True

    def member_ready(self, route: bytes, member: MemberRank, message: RankReady) -> None:
        """Record what a member's rank has written. A repeated request changes nothing.

        A transfer that has ended has its tombstone for longer than a member repeats a request, and
        `Announcements` has the requests about one that was never published.
        """
        report = report_of(message, (member.boot, message.request))
        if self.rank_ready(member, message.transfer_id, report):
            self._context.emit(ReplyToPeer(route, RequestDone(request=message.request)))  # else sent again

    def _next_state(self, key: TransferKey, event: TransferEvent) -> TransferState:
        """Return the state after the event. A KeyError is a bug of the caller."""
        if key in self.table.live:
            return TRANSITIONS[TransferState.PUBLISHED, event]
        if self.ended.get(key) is not None:
            return TRANSITIONS[TransferState.ENDED, event]
        is_announced = key in self.announced
        return TRANSITIONS[TransferState.ANNOUNCED if is_announced else TransferState.UNUSED, event]

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
        """Release what the engine published: a rank's memory is gone, or its worker takes it back."""
        for transfer in self.table.of_engine(engine):
            self.release(transfer, why)

    def rank_mapped(self, record: RankRecord) -> None:
        """Release what was published of another mapping of the rank's memory: the rank has (re)appeared."""
        key, rank, incarnation = record.spec.key, record.spec.rank, record.incarnation
        for transfer in self.table.of_engine(key):
            if transfer.incarnations.get(rank, incarnation) != incarnation:
                self.release(transfer, Code.RANK_LOST)
        self.announced.rank_changed(key, rank, incarnation)

    # --- the lease

    def schedule_lease_check(self, transfer: Transfer) -> None:
        """Look at the lease when it, or the first grant on it, ends. Called whenever that may be earlier.

        It begins with the publish, for `lease_s`, and runs anew with each report of progress and each grant
        that is returned (`_renew_lease`). Until all is written, grants keep nothing, and it ends for those
        who wait, too; afterwards it ends with the last grant on it (`Transfer.expires_at`).
        """
        when = transfer.next_expiry(self._context.now)
        self._context.timers.set(("lease", transfer.key), when, lambda: self._check_lease(transfer))

    def _check_lease(self, transfer: Transfer) -> None:
        now = self._context.now
        for grant in [g for g in transfer.grants.values() if g.expires_at <= now]:
            self.end_grant(grant.grant_id)
        if transfer.expires_at(self._is_written(transfer)) <= now:
            self.release(transfer, Code.LEASE_EXPIRED)
        else:
            self.schedule_lease_check(transfer)

    def return_grant(self, grant_id: GrantId) -> None:
        """End the grant of a reader that has failed: the lease runs anew, for another reader.

        Not for ever: readers that come and fail hold a transfer no longer than one that stays.
        """
        transfer, now, settings = self.table.by_grant.get(grant_id), self._context.now, self._context.settings
        self.end_grant(grant_id)
        if transfer is None or now >= transfer.published_at + settings.transfer.max_hold_s:
            return
        if self._is_written(transfer):  # else its engine's progress alone renews it
            self._renew_lease(transfer)

    def _is_written(self, transfer: Transfer) -> bool:
        engine = self._registry.get(transfer.engine)
        return engine is not None and transfer.is_ready(engine)

    def end_grant(self, grant_id: GrantId) -> None:
        """Take a grant off its lease. Does nothing where there is none."""
        if grant := self.table.end_grant(grant_id):
            for agent in sorted(grant.agents):
                self._poll_requests.release(agent, grant_id)

    def release(self, transfer: Transfer, why: Code) -> None:
        """End the transfer: overwrite the fence word first, then report the release to its owners."""
        context = self._context
        self._next_state(transfer.key, TransferEvent.RELEASE)
        context.emit(OverwriteFenceWord(transfer.session, transfer.fence_slot))
        for grant_id in list(transfer.grants):
            self.end_grant(grant_id)
        self._block_ids.release(transfer.uid, transfer.charged_bytes)
        self.table.remove(transfer)
        self.ended.add(transfer.key, transfer.nonce, transfer.uid, why)
        context.timers.cancel(("lease", transfer.key))
        self._notify_owners(transfer, why)
        self._waiting.wake(transfer.key)
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
        sessions = {transfer.session, *(r.session for r in (engine.local_ranks() if engine else ()))}
        for session in sorted(sessions):
            self._context.emit(SendToWorker(session, Released(transfer_id=transfer.transfer_id, why=why)))
        records = engine.ranks.values() if engine else ()
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
        settings = self._context.settings.transfer
        for key, transfer in self.table.live.items():
            assert self.ended.get(key) is None, f"{key} is live and ended"
            assert ("lease", key) in self._context.timers, f"{key} has no lease timer"
            self._check_memory(key, transfer)
            for grant_id, grant in transfer.grants.items():
                assert self.table.by_grant.get(grant_id) is transfer
                assert grant.expires_at <= grant.granted_at + settings.max_hold_s + settings.lease_s
                has_ended = grant.expires_at <= self._context.now and not self._context.is_behind
                assert not has_ended, f"grant {grant_id} of {key} has expired"
        self.announced.check_integrity(self._registry)
        for grant_id, transfer in self.table.by_grant.items():
            assert grant_id in transfer.grants, f"grant {grant_id} is on no lease"

    def _check_memory(self, key: TransferKey, transfer: Transfer) -> None:
        """Raise AssertionError where the bytes of a live transfer are gone."""
        engine = self._registry.get(transfer.engine)
        for rank, record in engine.ranks.items() if engine is not None else ():
            named = transfer.incarnations.get(rank, record.incarnation)
            assert not record.is_readable or record.incarnation == named, (
                f"{key}: rank {rank} was mapped anew"
            )
            assert not record.is_asleep, f"{key}: rank {rank} sleeps"


def _append(engine: LocalEngine, transfer: Transfer, added: BlocksByGroup) -> int:
    """Put the added ids behind those kept, of a state in their place. Return by how many bytes it has grown.

    Raises EngineError where nothing may be added.
    """
    num_bytes, kept, list_rules = 0, transfer.blocks, engine.list_rules
    states = {name for name in added if (rules := list_rules.get(name)) is not None and rules.is_state}
    # Of a list that is whole the checks find that it becomes too long.
    if not transfer.is_growing or (states and transfer.has_all_blocks(engine)):
        raise EngineError(f"cannot extend transfer {transfer.transfer_id}: it has all its blocks")
    for name, packed in added.items():
        before = kept.get(name)
        num_before = -GROUP_BYTES if before is None else len(before.ids)
        if before is None or not before.ids or name in states:
            kept[name] = packed
        else:
            kept[name] = append_ids(before, packed.ids)
        num_bytes += len(kept[name].ids) - num_before
    return num_bytes
