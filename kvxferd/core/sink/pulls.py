"""Pulls of local ranks, from the request to the one terminal event, and to the end of any doubt.

How a pull works. Names in backticks are messages, modules, methods, settings or fields.

1. The worker sends `Prepare` as soon as it has a reference, and `PullRequest` when it has blocks: a ticket,
   the reference, its own block ids, a deadline. `worker_requests` checks the limits, and starts the pull with
   the prepared grant or a new one. The pull is WAITING.
2. `grants` sends `ManifestRequest` to the source's daemon, behind a hello where it is the first
   message, unless it has the engine's manifest, and makes the plan from both layouts. Then it sends
   `GrantRequest` with the agents that will be read. The source's daemon sends `GrantReply`, with its block
   ids and the fence word, when the transfer is published and ready and those agents' movers poll. Otherwise
   it replies `PeerRefused`, and the pull fails. A grant is renewed until its pull ends, for `max_hold_s` at
   most.
3. `advance` does what a waiting pull needs next (`need_of`), whenever anything that it waits for has changed.
   At last it gives the pull to the rank's mover: the plan, the remote agents, both lists of block ids, and
   `StartPull`. The pull is POSTED. A rank without a mover posts its pulls after the next bind. A pull without
   block ids is delivered at once.
4. The mover reads the runs, and the fence word after them. It sends `PullDone` with one of three outcomes,
   which `mover_done` handles:

   * The word is unchanged: the bytes are the published ones. The worker gets `TicketDelivered`, from the
     mover itself where they share a delivery socket, otherwise from here. The source's daemon gets
     `Acknowledge`. After the last one it overwrites the word and sends `Released` to the publisher and to the
     ranks of its engine.
   * The word has changed: the source took its blocks back. The worker gets `TicketFailed` with the code
     `released` and `safe_to_reuse`, and the source's daemon gets `ReleaseGrant`.
   * The word was not read, because a read failed or the pull was aborted. If every posted read is terminal,
     a failure of the transport is read once more, its grant asked for again (`_retry`), and any other end is
     `TicketFailed` with `safe_to_reuse`. If not, the worker gets `TicketFailed` with `safe_to_reuse=False`,
     and the pull is IN_DOUBT.

5. A pull IN_DOUBT keeps its blocks in quarantine until the mover sends `PullQuiesced` or a late `PullDone`,
   or is dead. Then the worker gets `TicketQuiesced`, and the source's daemon `ReleaseGrant`. After
   `quiesce_s`, or at once where the mover cannot end the doubt, the mover is retired: another one serves the
   rank, and this one is killed when its other pulls and its readers have ended, or after `RETIRED_S`
   (`Movers.retire`).

What ends a pull from outside:

* `Cancel`: a WAITING pull fails at once. For a POSTED one the mover gets `AbortPull`, and the pull is
  STOPPING until `PullDone`; it may still be delivered.
* The deadline (`Pull.deadline_by`): a WAITING pull fails. For a POSTED or STOPPING one the mover gets
  `AbortPull`, and has `LAST_WORD_S` for what it knows: the pull is delivered, or proved to be over. Without
  its word the pull is IN_DOUBT, because its reads are not known to be over.
* The mover dies: nothing that it posted writes any more. A POSTED pull with time left is WAITING for the
  next mover; a pull survives the deaths of two movers. With a delivery socket the dead mover may have
  sent `TicketDelivered`, so the worker gets `PullsInterrupted`, and its `PullsResumed` lists the pulls that
  arrived and those to read again. Other pulls fail, and those IN_DOUBT are quiesced.
* The rank is suspended: its WAITING pulls fail, its movers are killed, and none of its pulls waits again:
  for its engine all have ended with `Suspended`. The worker is gone: its pulls are dropped without an
  event, and their grants returned or, where they were delivered, acknowledged.

So the worker gets exactly one of `TicketDelivered` and `TicketFailed` for a pull, and `TicketQuiesced` after
a `TicketFailed` with `safe_to_reuse=False`. The legal moves are `TRANSITIONS` in pull.py;
docs/architecture.md draws the messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToMover, SendToWorker
from kvxferd.core.limits.ledger import Charge, check_count, check_num_ids, request_bytes
from kvxferd.core.limits.table import BLOCK_ID_BYTES, INFLIGHT_BYTES
from kvxferd.core.ranks.movers import Movers
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.core.sink.grants import GrantClient
from kvxferd.core.sink.held_grant import UNSETTLED, GrantState, HeldGrant
from kvxferd.core.sink.pull import (
    NOTHING_READ,
    Need,
    Piece,
    Pull,
    PullPhase,
    PullTrigger,
    add_piece,
    limited,
    need_of,
    pieces_read,
    record_whole,
    tokens_to_wait_for,
)
from kvxferd.core.sink.pull_records import describe_read, describe_wait, emit_record, emit_refused, phases_of
from kvxferd.core.sink.stalled_sources import SourceBreaker
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import AgentName, GroupName, MoverId, PullId, SessionId, Ticket
from kvxferd.layout import BlocksByGroup, PackedBlocks, num_id_bytes
from kvxferd.plan import check_request
from kvxferd.records import PHASES
from kvxferd.wire.block_id_parts import split_block_ids
from kvxferd.wire.common import Message, Refusal, TransferRef
from kvxferd.wire.mover import (
    AbortPull,
    FenceLocation,
    PullOutcome,
    PullProgress,
    ReportPull,
    StartPull,
)
from kvxferd.wire.worker import (
    PullRequest,
    PullsInterrupted,
    PullsResumed,
    TicketDelivered,
    TicketFailed,
    TicketQuiesced,
)

# A retry with less time than this would end at its deadline, in doubt instead of safely failed.
MIN_RETRY_S = 0.25
# A mover that is there replies within a millisecond. What it has said before the deadline may not be read
# yet, where this daemon was busy, or stood still.
LAST_WORD_S = 1 / 16
# A retry that has no grant after this time fails: the source is gone for now.
RETRY_WITHIN_S = 2.0
# A pull that kills each mover that reads it must not use up the node's movers. Its own mover and the next may
# both be killed because of other pulls in doubt.
MAX_MOVERS_LOST = 2


class Pulls:
    """Every pull of a local rank that is not over: it waits, is read, or may still be written."""

    def __init__(self, context: NodeContext, grant_client: GrantClient, movers: Movers) -> None:
        self._context = context
        self._grant_client = grant_client
        grant_client.on_changed = self.grant_changed
        self._movers = movers
        self._block_ids = context.ledger[BLOCK_ID_BYTES]
        self._inflight_bytes = context.ledger[INFLIGHT_BYTES]
        self._pulls: dict[PullId, Pull] = {}
        # The same pulls by session and ticket: a session with few pulls does not pay for those of others.
        self._by_session: dict[SessionId, dict[Ticket, Pull]] = {}
        self._last_id = 0
        self._last_interruption = 0
        self.source_breaker = SourceBreaker(context)

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def most_of_rank(self) -> int:
        """Return the pulls of the rank that has most."""
        return max(map(len, self._by_session.values()), default=0)

    def next_id(self) -> PullId:
        """Return a pull number that was never used before."""
        self._last_id += 1
        return PullId(self._last_id)

    def check_room(self, rank: LocalRank, blocks: Mapping[GroupName, PackedBlocks], what: str) -> None:
        """Raise KvxferdError if one more pull, into these blocks, passes a limit."""
        check_num_ids(blocks, what)
        running = len(self._by_session.get(rank.session, ()))
        check_count(
            running,
            self._context.settings.limits.max_pulls_per_rank,
            f"{what}: {running} pulls of this rank have not ended",
            "limits.max_pulls_per_rank",
        )
        if self._inflight_bytes.held_by(rank.uid):  # a user's only pull may be of any size
            self._inflight_bytes.check(rank.uid, rank.bytes_of(blocks), what)
        self._block_ids.check(rank.uid, request_bytes(blocks), what)

    def start(self, pull: Pull) -> None:
        """Start a pull whose grant has been requested."""
        self._pulls[pull.pull_id] = pull
        self._by_session.setdefault(pull.rank.session, {})[pull.ticket] = pull
        self._inflight_bytes.add(pull.rank.uid, pull.local_bytes)
        self._block_ids.add(pull.rank.uid, request_bytes(pull.blocks))
        self._set_deadline(pull)
        pull.held_grant.pull = pull.pull_id
        self.grant_changed(pull.held_grant)

    def record_refused(self, rank: LocalRank, request: PullRequest, error: KvxferdError) -> None:
        """Record a request that starts no pull: its engine hears that it failed; an operator, too."""
        emit_refused(self._context, self.next_id(), rank, request, error)

    # --- from the grant to the mover

    def grant_changed(self, hold: HeldGrant) -> None:
        """Go on with a pull whose grant is held or refused now, or has more tokens to read, or none."""
        pull = self._pulls.get(hold.pull)
        if pull is None or hold.state in UNSETTLED:
            return
        pull.phases_s["handshake"] = max(0.0, hold.learnt_at - pull.received_at)
        pull.phases_s["grant"] = max(0.0, hold.settled_at - max(hold.learnt_at, pull.received_at))
        self._context.timers.cancel(("retry", pull.pull_id))
        if hold.granted is not None:
            if hold.granted.fence_word != pull.fence_word:
                pull.fence_word, pull.tokens_read, pull.read = hold.granted.fence_word, 0, NOTHING_READ
                pull.whole_at, pull.with_movers_s = None, 0.0
            if pull.progressive:
                record_whole(pull, self._context.now)
                self._set_deadline(pull)
        self.advance(pull)

    def advance(self, pull: Pull) -> None:
        """Do what a waiting pull needs next, unless somebody else has the next word.

        Called whenever anything that it waits for has changed: nothing is stored about what comes next.
        """
        if pull.phase is not PullPhase.WAITING:
            return
        match need_of(pull, self._movers):
            case Piece() as piece:
                self._read(pull, piece)
            case Need.TOKENS:
                self._await_tokens(pull)
            case Need.LAPSED:
                lapsed = _refusal(pull, Code.RELEASED, "its grant ended while it waited; pull again")
                self._ask_again(pull, _mover_lost(pull) if pull.num_movers_lost else lapsed)
            case Need.REFUSED:
                assert pull.held_grant.refusal is not None
                self._fail(pull, PullTrigger.REFUSE, pull.held_grant.refusal)
            case Need.WORKER | Need.GRANT | Need.MOVER:
                pass

    def advance_all(self, rank: LocalRank) -> None:
        """Go on with the pulls that wait for the rank's mover: it has one again."""
        for pull in self._pulls_of(rank):
            self.advance(pull)

    def _read(self, pull: Pull, piece: Piece) -> None:
        """Give a piece to the rank's mover; one without block ids is there at once."""
        hold = pull.held_grant
        assert hold.reads is not None and pull.rank.mover is not None
        try:
            remote = hold.reads.source_lists.windows(hold.blocks, piece.blocks, piece.end)
            check_request(hold.reads.plan, piece.blocks, remote, piece.end)
            self._grant_client.preload(hold)
        except KvxferdError as error:
            pull.failed_phase = "plan"
            self._fail(pull, PullTrigger.REFUSE, Refusal(error.code, error.message))
            return
        if num_id_bytes(piece.blocks):
            pull.transition(PullTrigger.POST)
            pull.mover, pull.piece = pull.rank.mover, piece
            pull.report_requested, pull.progress = False, None
            pull.posted_at = self._context.now
            if pull.progressive:
                self._set_deadline(pull)
            self._start_on_mover(pull.mover, pull, remote)
            if not piece.is_last:
                self._request_more(pull, piece.end)  # so that the answer is there when the piece is
        elif piece.is_last:
            self._deliver(pull, PullOutcome(delivered=True))
        else:
            pull.tokens_read = piece.end
            self.advance(pull)

    def _start_on_mover(self, mover: MoverId, pull: Pull, listed: BlocksByGroup) -> None:
        """Send a piece to its mover. `listed`: what it needs of the source's lists."""
        hold = pull.held_grant
        assert hold.reads is not None and hold.granted is not None
        # Two block lists are sent, each of which may need parts: one stream each.
        stream = 2 * pull.pull_id
        piece = pull.piece
        assert piece is not None
        local_parts, local = split_block_ids(piece.blocks, stream)
        remote_parts, remote = split_block_ids(listed, stream + 1)
        for part in (*local_parts, *remote_parts):
            self._context.emit(SendToMover(mover, part))
        start = StartPull(
            pull=pull.pull_id,
            plan=hold.reads.plan.digest,
            sources=hold.sources,
            local=local,
            remote=remote,
            num_tokens=piece.end,
            fence=FenceLocation(
                hold.granted.fence_agent, hold.granted.fence_address, hold.granted.fence_word
            ),
            stream=stream,
            ticket=pull.ticket if piece.is_last else None,  # the worker is told of the last one's end
            before=pieces_read(pull.read) if piece.is_last else None,
        )
        self._context.emit(SendToMover(mover, start))

    # --- pieces of a progressive pull

    def _await_tokens(self, pull: Pull) -> None:
        """Wait until the source has more to read, or all; it may have said already that it will not."""
        hold = pull.held_grant
        if (refusal := hold.more_refusal) is None:
            self._request_more(pull, pull.tokens_read)
        elif refusal.code is Code.BINDING_STALE and not pull.retried:
            pull.retried = True
            self._grant_client.forget_engine(hold)
            self._ask_again(pull, refusal)
        else:
            self._fail(pull, PullTrigger.REFUSE, refusal)

    def _request_more(self, pull: Pull, tokens: int) -> None:
        """Ask for more than so many tokens, unless that is asked already."""
        hold = pull.held_grant
        if not hold.awaits_more and hold.state is GrantState.HELD:
            waits_until = pull.received_at + self._context.settings.transfer.max_hold_s
            left_s = max(0.0, waits_until - self._context.now)
            self._grant_client.request_more(hold, tokens_to_wait_for(pull, tokens), left_s)

    def _piece_read(self, pull: Pull, mover: MoverId, piece: Piece, outcome: PullOutcome) -> None:
        """Go on behind a piece whose bytes are there, and whose word was right after the last of them."""
        if pull.late or pull.rank.is_asleep or not pull.can(PullTrigger.CONTINUE):
            why = "the rank was suspended; resume it, then pull again"
            self._fail(pull, PullTrigger.FINISH, _refusal(pull, Code.SUSPENDED, why))
            return
        pull.transition(PullTrigger.CONTINUE)
        pull.mover, pull.piece, pull.outcome = None, None, None
        pull.tokens_read, pull.read = piece.end, add_piece(pull.read, outcome)
        pull.with_movers_s += self._context.now - pull.posted_at
        self._set_deadline(pull)
        self._movers.reconsider(mover)
        self.advance(pull)

    # --- how it ends

    def mover_done(self, pull_id: PullId, mover: MoverId, outcome: PullOutcome) -> None:
        """Handle the mover's report of a pull's end: deliver it, fail it, or read it once more."""
        pull = self._pulls.get(pull_id)
        if pull is None or pull.mover != mover:
            return
        outcome = pull.outcome = limited(outcome)
        refusal = Refusal(outcome.code or Code.TRANSPORT, outcome.message)
        with_mover_s = self._context.now - pull.posted_at
        pull.phases_s |= phases_of(add_piece(pull.read, outcome), pull.with_movers_s + with_mover_s)
        if outcome.delivered and pull.piece is not None and not pull.piece.is_last:
            self._piece_read(pull, mover, pull.piece, outcome)
        elif outcome.delivered:
            self._deliver(pull, outcome)
        elif outcome.finished or not outcome.started:
            if self._can_retry(pull, outcome):
                self._retry(pull, mover, outcome.agent, refusal)
                return
            self._fail(pull, PullTrigger.FINISH, refusal)
        elif pull.can(PullTrigger.FAULT):
            self._fail(pull, PullTrigger.FAULT, refusal)
            if not outcome.quiesced_follows:
                self._retire_mover(pull, mover)
        if outcome.agent is not None and outcome.code is Code.TRANSPORT:
            self._invalidate_remote(pull.held_grant, mover, outcome.agent)

    def _can_retry(self, pull: Pull, outcome: PullOutcome) -> bool:
        """Whether a failed read is tried again instead of reported. Only where nothing writes any more."""
        return outcome.code is Code.TRANSPORT and not pull.retried and self._may_wait_again(pull)

    def _may_wait_again(self, pull: Pull) -> bool:
        """Whether a pull that its mover has, and of which nothing writes any more, may be read once more."""
        has_time = pull.deadline - self._context.now > MIN_RETRY_S
        return has_time and pull.can(PullTrigger.RETRY) and not pull.rank.is_asleep

    def _retry(self, pull: Pull, mover: MoverId, agent: AgentName | None, refusal: Refusal) -> None:
        """Read once more, with a new manifest, grant and connection: the source may have been replaced."""
        pull.transition(PullTrigger.RETRY)
        pull.retried, pull.mover = True, None
        if agent is not None:
            self._invalidate_remote(pull.held_grant, mover, agent)
        self._ask_again(pull, refusal)
        self._movers.reconsider(mover)

    def _ask_again(self, pull: Pull, refusal: Refusal) -> None:
        """Ask for the grant again. Without it after a while, or without time for it, the pull is refused."""
        left_s = pull.deadline - self._context.now
        if left_s <= MIN_RETRY_S:
            self._fail(pull, PullTrigger.REFUSE, refusal)
            return
        self._context.after(
            ("retry", pull.pull_id),
            min(RETRY_WITHIN_S, left_s - MIN_RETRY_S / 2),
            lambda: self._fail(pull, PullTrigger.REFUSE, refusal),
        )
        self._grant_client.ask_again(pull.held_grant, left_s, 0 if pull.progressive else -1)

    def mover_quiesced(self, pull_id: PullId, mover: MoverId) -> None:
        """End the doubt: the mover reports that every posted read of the pull is terminal."""
        pull = self._pulls.get(pull_id)
        if pull is not None and pull.mover == mover and pull.phase is PullPhase.IN_DOUBT:
            self._fail(pull, PullTrigger.FINISH, Refusal(Code.TRANSPORT, ""))

    def mover_died(self, mover: MoverId) -> None:
        """Fail the dead mover's pulls, or have the next one read them: its posted reads write no more."""
        interrupted: dict[SessionId, list[Ticket]] = {}
        self._last_interruption += 1
        for pull in [p for p in self._pulls.values() if p.mover == mover]:
            if pull.delivered_by_mover:
                self._deliver(pull, PullOutcome(delivered=True, sent_to_worker=True))
            elif pull.num_movers_lost >= MAX_MOVERS_LOST or not self._may_wait_again(pull):
                self._fail(pull, PullTrigger.FINISH, _mover_lost(pull))
            else:
                self._wait_for_next_mover(pull)
                if pull.interruption:
                    interrupted.setdefault(pull.rank.session, []).append(pull.ticket)
        for session, tickets in interrupted.items():
            self._context.emit(
                SendToWorker(
                    session, PullsInterrupted(number=self._last_interruption, tickets=tuple(tickets))
                )
            )

    def _wait_for_next_mover(self, pull: Pull) -> None:
        """Have the pull wait for its rank's next mover.

        The dead mover may have sent `TicketDelivered` to the worker alone, and the engine may use the blocks:
        only the worker knows.
        """
        pull.transition(PullTrigger.RETRY)
        pull.num_movers_lost += 1
        pull.mover = None
        assert pull.piece is not None
        pull.interruption = self._last_interruption if pull.piece.is_last else 0
        self.advance(pull)

    def resume_interrupted(self, rank: LocalRank, message: PullsResumed) -> None:
        """Continue the pulls of one interruption, as the worker reports which have not ended for it."""
        again, arrived = set(message.tickets), set(message.arrived)
        interrupted = [p for p in self._pulls_of(rank) if p.interruption and p.interruption == message.number]
        for pull in interrupted:
            pull.interruption = 0
            if pull.ticket in arrived:
                self._deliver(pull, PullOutcome(delivered=True, sent_to_worker=True))
            elif pull.ticket not in again:
                self._fail(pull, PullTrigger.REFUSE, _mover_lost(pull))
            else:
                self.advance(pull)

    def runs_on(self, mover: MoverId) -> bool:
        """Whether the mover has a pull that is not in doubt."""
        running = (PullPhase.POSTED, PullPhase.STOPPING)
        return any(pull.mover == mover and pull.phase in running for pull in self._pulls.values())

    def _deliver(self, pull: Pull, outcome: PullOutcome) -> None:
        if pull.transition(PullTrigger.DELIVER) is PullPhase.QUIESCED:
            self._finish_quiesced(pull)
            return
        assert pull.phase is PullPhase.DELIVERED
        total = add_piece(pull.read, outcome)
        if not outcome.sent_to_worker:
            self._send_to_worker(
                pull,
                TicketDelivered(ticket=pull.ticket, bytes=total.bytes, runs=total.runs, wire_s=total.wire_s),
            )
        self._remove(pull)
        self._grant_client.acknowledge(pull.held_grant, total.bytes, pull)

    def acknowledged(self, pull: Pull, delivered_at: float) -> None:
        """Report a delivery: its source has replied, or is given up."""
        took_s = self._context.now - delivered_at
        emit_record(self._context, pull, "delivered", None, "", delivered_at, took_s)

    def _fail(self, pull: Pull, trigger: PullTrigger, refusal: Refusal) -> None:
        was_stopping = pull.phase is PullPhase.STOPPING
        pull.failed_phase = pull.failed_phase or pull.record_phase
        phase = pull.transition(trigger)
        if phase is PullPhase.QUIESCED:
            self._finish_quiesced(pull)
            return
        if was_stopping and phase is PullPhase.FAILED:
            refusal = _cancelled(pull)
        if pull.late:
            refusal = Refusal(Code.DEADLINE, pull.late)
        failed = TicketFailed(
            ticket=pull.ticket,
            code=refusal.code,
            message=refusal.message,
            safe_to_reuse=pull.is_safe_to_reuse,
            retry_after_s=refusal.retry_after_s,
        )
        self._send_to_worker(pull, failed)
        outcome = "cancelled" if refusal.code is Code.CANCELLED else "failed"
        emit_record(self._context, pull, outcome, refusal.code, refusal.message, self._context.now)
        if phase is PullPhase.FAILED:
            self._remove(pull)
            self._grant_client.release(pull.held_grant)
            return
        assert phase is PullPhase.IN_DOUBT and pull.mover is not None
        mover = pull.mover
        retire = partial(self._retire_mover, pull, mover)
        self._context.after(("ends", pull.pull_id), self._context.settings.quiesce_s, retire)
        self._movers.reconsider(mover)

    def _retire_mover(self, pull: Pull, mover: MoverId) -> None:
        """Retire the mover: only its death ends the doubt. Its other pulls end first."""
        if self._movers.accepts_pulls(mover):
            self.source_breaker.record_stall(pull.rank.uid, pull.ref)
        self._movers.retire(mover)

    def _finish_quiesced(self, pull: Pull) -> None:
        self._send_to_worker(pull, TicketQuiesced(ticket=pull.ticket))
        self._remove(pull)
        self._grant_client.release(pull.held_grant)

    def _remove(self, pull: Pull) -> None:
        del self._pulls[pull.pull_id]
        tickets = self._by_session[pull.rank.session]
        del tickets[pull.ticket]
        if not tickets:
            del self._by_session[pull.rank.session]
        self._inflight_bytes.release(pull.rank.uid, pull.local_bytes)
        self._block_ids.release(pull.rank.uid, request_bytes(pull.blocks))
        pull.blocks = {}  # its acknowledgement may be repeated for two minutes
        self._context.timers.cancel(("ends", pull.pull_id))
        self._context.timers.cancel(("retry", pull.pull_id))
        self._movers.reconsider(pull.mover)

    def mark_delivered_by_mover(self, rank: LocalRank, tickets: tuple[Ticket, ...]) -> None:
        """Record deliveries that the mover reported to the worker, whose report here may never come."""
        for ticket in tickets:
            if (pull := self.find(rank.session, ticket)) is None:
                continue
            # For an engine that has received `TicketFailed`, it was no delivery.
            if pull.phase in (PullPhase.POSTED, PullPhase.STOPPING):
                pull.delivered_by_mover = True
            elif pull.interruption:
                self._deliver(pull, PullOutcome(delivered=True, sent_to_worker=True))

    def find(self, session: SessionId, ticket: Ticket) -> Pull | None:
        """Return the session's pull of that ticket; None: it is over, or has never been."""
        return self._by_session.get(session, {}).get(ticket)

    def _pulls_of(self, rank: LocalRank) -> list[Pull]:
        return list(self._by_session.get(rank.session, {}).values())

    # --- cancel, deadline, loss of the rank

    def cancel(self, rank: LocalRank, ticket: Ticket) -> None:
        """Cancel a pull for its engine. An unknown ticket has ended already."""
        if (pull := self.find(rank.session, ticket)) is not None:
            self._cancel(pull)

    def cancel_pull(self, number: PullId) -> None:
        """Cancel a pull for the operator. An unknown number has ended already."""
        if pull := self._pulls.get(number):
            self._cancel(pull)

    def can_cancel(self, number: PullId) -> bool:
        """Whether that pull has neither ended nor been cancelled."""
        return (pull := self._pulls.get(number)) is not None and pull.can(PullTrigger.CANCEL)

    def cancel_transfer(self, rank: LocalRank, ref: TransferRef) -> None:
        """Cancel the rank's pulls of a transfer that its engine abandons."""
        for pull in [p for p in self._pulls_of(rank) if p.ref == ref]:
            self._cancel(pull)

    def _cancel(self, pull: Pull) -> None:
        if pull.phase is PullPhase.WAITING:
            self._fail(pull, PullTrigger.CANCEL, _cancelled(pull))
        elif pull.can(PullTrigger.CANCEL):
            pull.transition(PullTrigger.CANCEL)
            assert pull.mover is not None
            self._context.emit(SendToMover(pull.mover, AbortPull(pull=pull.pull_id)))

    def _notice_s(self, pull: Pull) -> float:
        return min(self._context.settings.deadline_notice_s, pull.deadline_s / 5)

    def _set_deadline(self, pull: Pull) -> None:
        """Keep the pull's deadline as it is now, unless it is over. Most pulls end before it is due."""
        if pull.phase is PullPhase.IN_DOUBT or pull.late:
            return
        deadline = pull.deadline_by(self._context.settings.transfer.max_hold_s)
        if deadline != pull.deadline:
            pull.deadline = deadline
            notice_at = deadline - self._notice_s(pull)
            self._context.timers.set(("ends", pull.pull_id), notice_at, lambda: self._before_deadline(pull))

    def _before_deadline(self, pull: Pull) -> None:
        """Ask the one that the pull waits for whether it is there, so that the failure can name it."""
        self._context.timers.set(("ends", pull.pull_id), pull.deadline, lambda: self._expire(pull))
        if pull.deadline - self._context.now <= self._notice_s(pull) / 2:
            return  # this daemon is late itself: nobody can reply in time
        if pull.phase is PullPhase.WAITING:
            self._grant_client.ask_why(pull.held_grant)
        elif pull.phase is PullPhase.POSTED and pull.mover is not None and not pull.rank.resident:
            pull.report_requested = True
            self._context.emit(SendToMover(pull.mover, ReportPull(pull=pull.pull_id)))

    def record_progress(self, mover: MoverId, message: PullProgress) -> None:
        """Keep what the mover reports of a pull whose deadline is near."""
        pull = self._pulls.get(message.pull)
        if pull is not None and pull.mover == mover and pull.report_requested and message.phase in PHASES:
            pull.progress = message

    def _expire(self, pull: Pull) -> None:
        waited = f"its deadline of {pull.deadline_s:.1f} s passed"
        if pull.progressive and pull.whole_at is None and pull.phase is PullPhase.WAITING:
            waited = f"it was not ready within {pull.deadline - pull.received_at:.1f} s (transfer.max_hold_s)"
        pull.silent, where = self.describe(pull)
        if pull.phase is PullPhase.WAITING:
            self._fail(pull, PullTrigger.EXPIRE, _refusal(pull, Code.DEADLINE, f"{waited} {where}"))
            return
        assert pull.mover is not None
        if pull.progress is not None:
            pull.failed_phase = pull.progress.phase
        pull.late = _refusal(pull, Code.DEADLINE, f"{waited} while it was read: {where}").message
        self._context.emit(SendToMover(pull.mover, AbortPull(pull=pull.pull_id)))
        doubt = partial(self._fail, pull, PullTrigger.EXPIRE, Refusal(Code.DEADLINE, pull.late))
        self._context.after(("ends", pull.pull_id), LAST_WORD_S, doubt)

    def describe(self, pull: Pull) -> tuple[str, str]:
        """Return whom a pull waits for that has not ended, and the sentence for people."""
        if pull.phase is PullPhase.WAITING:
            return describe_wait(pull, need_of(pull, self._movers), self._grant_client)
        return describe_read(pull)

    def refuse_waiting(self, rank: LocalRank, code: Code, message: str) -> None:
        """Refuse the rank's pulls that no mover has."""
        for pull in [p for p in self._pulls_of(rank) if p.phase is PullPhase.WAITING]:
            self._fail(pull, PullTrigger.REFUSE, _refusal(pull, code, message))

    def rank_gone(self, rank: LocalRank) -> None:
        """Drop the rank's pulls: its worker is gone, and its mover is being killed."""
        for pull in self._pulls_of(rank):
            self._remove(pull)
            if pull.delivered_by_mover and pull.phase is not PullPhase.IN_DOUBT:
                self._grant_client.acknowledge(pull.held_grant, 0)
            else:
                self._grant_client.release(pull.held_grant)

    # --- messages and records

    def _send_to_worker(self, pull: Pull, message: Message) -> None:
        self._context.emit(SendToWorker(pull.rank.session, message))

    def _invalidate_remote(self, hold: HeldGrant, mover: MoverId, agent: AgentName) -> None:
        """Forget a remote agent that failed. Its metadata stays loaded while other pulls use the mover."""
        self._grant_client.forget_engine(hold)
        if not any(pull.mover == mover for pull in self._pulls.values()):
            self._movers.drop_remote(mover, agent)

    def running(self) -> list[Pull]:
        """Return the pulls that are not over, those in doubt too."""
        return list(self._pulls.values())

    def charges(self) -> Iterator[Charge]:
        """Yield what the pulls and their grants are counted for."""
        for pull in self._pulls.values():
            yield INFLIGHT_BYTES, pull.rank.uid, pull.local_bytes
            yield BLOCK_ID_BYTES, pull.rank.uid, request_bytes(pull.blocks) + pull.held_grant.charged_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError where the tables contradict each other."""
        indexed = [pull.pull_id for pulls in self._by_session.values() for pull in pulls.values()]
        assert sorted(indexed) == sorted(self._pulls), "pulls are not found by their session and ticket"
        for pull in self._pulls.values():
            assert not pull.is_safe_to_reuse, f"pull {pull.pull_id} is over but still listed"
            assert (pull.mover is None) == (pull.phase is PullPhase.WAITING), (
                f"pull {pull.pull_id}: {pull.phase}"
            )
            assert pull.phase is not PullPhase.WAITING or not pull.rank.is_asleep, (
                f"pull {pull.pull_id} waits, and would be read into memory that its rank has taken back"
            )
            if pull.phase is not PullPhase.IN_DOUBT:
                assert ("ends", pull.pull_id) in self._context.timers, f"pull {pull.pull_id} has no deadline"


def _refusal(pull: Pull, code: Code, why: str) -> Refusal:
    return Refusal(code, f"cannot pull transfer {pull.ref.transfer_id}: {why}")


def _mover_lost(pull: Pull) -> Refusal:
    return _refusal(pull, Code.MOVER_LOST, "the rank's mover died; pull again")


def _cancelled(pull: Pull) -> Refusal:
    return Refusal(Code.CANCELLED, f"transfer {pull.ref.transfer_id}: the pull was cancelled")
