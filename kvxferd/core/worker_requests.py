"""The requests of a session about transfers: publish, ready, prepare, pull, cancel, abandon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToWorker
from kvxferd.core.limits.ledger import ENTRY_BYTES, Charge
from kvxferd.core.limits.table import BLOCK_ID_BYTES
from kvxferd.core.peers.peers import Peers
from kvxferd.core.peers.requests import PeerRequests
from kvxferd.core.ranks.member import Member
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.core.ranks.registry import Registry
from kvxferd.core.ranks.session import Session
from kvxferd.core.sink.grants import GrantClient
from kvxferd.core.sink.held_grant import GrantState, HeldGrant
from kvxferd.core.sink.pull import Pull
from kvxferd.core.sink.pulls import Pulls
from kvxferd.core.source.announced import report_of
from kvxferd.core.source.publishing import PublishedTransfers
from kvxferd.errors import BusyError, Code, EngineError, KvxferdError, ProtocolError
from kvxferd.ids import SessionId, Ticket, TransferId
from kvxferd.layout import BlocksByGroup
from kvxferd.plan import check_blocks
from kvxferd.wire.codec import negotiate_version
from kvxferd.wire.common import TransferRef
from kvxferd.wire.endpoint import parse_endpoint
from kvxferd.wire.limits import FENCE_SLOTS, FENCE_WORD_BYTES, MAX_DELIVERED_BY_MOVER, MAX_NAME_CHARS
from kvxferd.wire.peer import AbandonTransfer
from kvxferd.wire.traceparent import read_traceparent
from kvxferd.wire.worker import WORKER_VERSIONS, Hello, Prepare, Publish, PullRequest, Ready, Welcome

MAX_ABANDONING = 1024  # of a session, whose source has not replied
MAX_PREPARED = 1024  # of a session; each grant is renewed for minutes
MAX_PULL_S = 24 * 3600.0  # a longer deadline is a mistake in units


@dataclass(eq=False, repr=False)
class WorkerRequests:
    """Checks the requests of a session, and passes them to the part that handles them.

    Each may raise ProtocolError, which ends the session.
    """

    _context: NodeContext
    _registry: Registry
    _published: PublishedTransfers
    _grant_client: GrantClient
    _pulls: Pulls
    _peers: Peers
    _peer_requests: PeerRequests
    _member: Member
    _prepared: dict[SessionId, dict[TransferRef, HeldGrant]] = field(default_factory=dict)

    def welcome(self, session: Session, message: Hello) -> None:
        """Agree on a version. Raises ProtocolError where there is none."""
        version = negotiate_version(WORKER_VERSIONS, message.versions)
        session.greeted = True
        boot, settings = self._context.boot, self._context.settings.transfer
        welcome = Welcome(
            version=version, boot_id=boot, lease_s=settings.lease_s, max_hold_s=settings.max_hold_s
        )
        self._context.emit(SendToWorker(session.session_id, welcome))

    # --- the source's side

    def publish(self, session: Session, message: Publish, fence_word: bytes) -> None:
        """Publish a transfer. Raises KvxferdError: refused."""
        blocks, engine = session.assembly.complete(message.blocks, message.stream), session.engine
        assert engine is not None
        problem = ""
        if session.rank is None and not self._registry.may_publish(session.uid, engine.engine_id):
            problem = f"engine {engine.engine_id} is another user's"  # its ranks came after the attach
        elif len(fence_word) != FENCE_WORD_BYTES:
            problem = f"fence slot {message.fence_slot} is not within 0 .. {FENCE_SLOTS - 1}"
        elif not any(fence_word):
            # A late reader finds zeros where a mover has unmapped a page: no transfer may have that word.
            problem = f"fence slot {message.fence_slot} holds no word; write 16 random bytes there first"
        elif not (0 < len(message.transfer_id) <= MAX_NAME_CHARS):
            problem = f"the transfer id must have 1 to {MAX_NAME_CHARS} characters"
        if problem:
            text = f"cannot publish transfer {message.transfer_id[:80]}: {problem}"
            raise EngineError(text, Code.OUT_OF_PLACE)
        self._published.publish(session, engine, message, blocks, fence_word)

    def unpublish(self, session: Session, transfer_id: TransferId) -> None:
        """Release a transfer for its publisher."""
        assert session.engine is not None
        self._published.unpublish(session.session_id, session.engine, transfer_id)

    def ready(self, session: Session, message: Ready) -> None:
        """Record what the rank has written, and the blocks that its publisher adds."""
        try:
            blocks = session.assembly.complete(message.blocks, message.stream)
        except BusyError:
            self.unpublish(session, message.transfer_id)  # its blocks are not known any more
            return
        if blocks and (engine := session.engine):
            self._published.add_blocks(session.session_id, engine, message.transfer_id, blocks)
        if message.incarnation or not blocks:
            self._report_ready(session, message)

    def _report_ready(self, session: Session, message: Ready) -> None:
        rank = session.rank
        if rank is None:
            raise ProtocolError("cannot take ready: this connection is not a rank", Code.OUT_OF_PLACE)
        if not message.incarnation:
            raise ProtocolError("cannot take ready without the incarnation of the rank's memory")
        if self._registry.is_home(rank.spec):
            self._published.rank_ready(rank, message.transfer_id, report_of(message))
        else:
            self._member.report_ready(rank, message.incarnation, message.transfer_id, message.ready_tokens)

    # --- the sink's side

    def pull(self, session: Session, message: PullRequest) -> None:
        """Start a pull. Raises KvxferdError: refused."""
        if self._pulls.find(session.session_id, message.ticket) is not None:
            raise ProtocolError(f"cannot take ticket {message.ticket}: its last pull has not ended")
        blocks = session.assembly.complete(message.blocks, message.stream)
        rank, ref = session.local_rank, self._check_pull(session.local_rank, message, blocks)
        wait_s, after_tokens = message.deadline_s, -1
        if message.progressive:
            wait_s, after_tokens = self._context.settings.transfer.max_hold_s, 0
        hold = self._take_prepared(session, ref, after_tokens) or self._grant_client.acquire(
            rank, ref, wait_s, after_tokens, blocks
        )
        pull = Pull(
            pull_id=self._pulls.next_id(),
            rank=rank,
            ticket=message.ticket,
            ref=ref,
            blocks=blocks,
            num_tokens=message.num_tokens,
            deadline_s=message.deadline_s,
            received_at=self._context.now,
            held_grant=hold,
            progressive=message.progressive,
        )
        self._pulls.start(pull)

    def _check_pull(self, rank: LocalRank, message: PullRequest, blocks: BlocksByGroup) -> TransferRef:
        """Return the reference, checked. Raises KvxferdError where the pull is refused."""
        what = f"cannot pull transfer {message.ref.transfer_id[:80]}"
        if self._context.draining:
            raise EngineError(f"{what}: this daemon is draining; pull when it is back", Code.DRAINING)
        if rank.is_asleep or rank.request is not None:
            raise EngineError(f"{what}: the rank is suspended; resume it first", Code.SUSPENDED)
        if not 0 < message.deadline_s <= MAX_PULL_S:
            text = f"{what}: a deadline of {message.deadline_s} s; give 0 to {MAX_PULL_S:.0f}"
            raise EngineError(text, Code.BAD_REQUEST)
        ref = self._parse_ref(message.ref)
        check_blocks(rank.rules, blocks, message.num_tokens)
        self._pulls.source_breaker.check(rank.uid, ref, what)
        self._pulls.check_room(rank, blocks, what.removeprefix("cannot "))
        return ref

    def _parse_ref(self, ref: TransferRef) -> TransferRef:
        """Return the reference with its endpoint in the normal form, checked: it came over a router."""
        endpoint = parse_endpoint(ref.endpoint)
        if endpoint != self._context.endpoint:
            self._context.allowlist.check(endpoint)
        trace = read_traceparent(ref.traceparent) if ref.traceparent else ""
        if (endpoint, trace) == (ref.endpoint, ref.traceparent):
            return ref
        return msgspec.structs.replace(ref, endpoint=endpoint, traceparent=trace)

    def prepare(self, session: Session, message: Prepare) -> None:
        """Request the grant of a pull that may follow, unless there is no room: the pull requests its own."""
        prepared = self._prepared.setdefault(session.session_id, {})
        try:
            ref = self._parse_ref(message.ref)
        except KvxferdError:
            return  # the pull is refused for the same reason
        if self._context.draining or ref in prepared or len(prepared) >= MAX_PREPARED:
            return
        if not self._context.ledger[BLOCK_ID_BYTES].acquire(session.uid, ENTRY_BYTES):
            return
        settings = self._context.settings
        wait_s, after_tokens = settings.peer.handshake_wait_s, -1
        if message.progressive:
            wait_s, after_tokens = settings.transfer.max_hold_s, 0
        prepared[ref] = self._grant_client.acquire(session.local_rank, ref, wait_s, after_tokens)
        self._context.after(
            ("prepared", session.session_id, ref),
            settings.transfer.max_hold_s,
            lambda: self._drop_prepared(session, ref),
        )

    def _take_prepared(
        self, session: Session, ref: TransferRef, after_tokens: int | None = None
    ) -> HeldGrant | None:
        """Return the grant that was prepared, unless it was refused or has ended: a new one may succeed.

        `after_tokens`: of the pull that is to have it; one that waits for the whole serves no other.
        """
        hold = self._prepared.get(session.session_id, {}).pop(ref, None)
        if hold is None:
            return None
        self._context.ledger[BLOCK_ID_BYTES].release(session.uid, ENTRY_BYTES)
        self._context.timers.cancel(("prepared", session.session_id, hold.ref))
        # One of another rank is of a registration that failed, maybe of another layout.
        is_such = after_tokens is None or after_tokens == hold.after_tokens
        if (
            is_such
            and hold.rank is session.rank
            and hold.state not in (GrantState.REFUSED, GrantState.LAPSED)
        ):
            return hold
        self._grant_client.release(hold)
        return None

    def _drop_prepared(self, session: Session, ref: TransferRef) -> None:
        """End a grant that no pull wants. Does nothing where there is none."""
        if (hold := self._take_prepared(session, ref)) is not None:
            self._grant_client.release(hold)

    def prepared(self) -> Iterator[HeldGrant]:
        """Iterate over the grants that are prepared."""
        for prepared in self._prepared.values():
            yield from prepared.values()

    def charges(self) -> Iterator[Charge]:
        """Yield what these grants are counted for."""
        for hold in self.prepared():
            yield BLOCK_ID_BYTES, hold.rank.uid, ENTRY_BYTES + hold.charged_bytes

    def check_tickets(self, *listed: tuple[Ticket, ...]) -> None:
        """Raise ProtocolError for more tickets than there can be pulls."""
        most = max(MAX_DELIVERED_BY_MOVER, self._context.settings.limits.max_pulls_per_rank)
        if any(len(tickets) > most for tickets in listed):
            raise ProtocolError(f"cannot take so many tickets: {most} pulls may run")

    def abandon(self, session: Session, ref: TransferRef) -> None:
        """End what the session does with a transfer, and report to its source that nobody here reads it."""
        rank = session.local_rank
        try:
            ref = self._parse_ref(ref)
        except KvxferdError:
            return
        self._drop_prepared(session, ref)
        self._pulls.cancel_transfer(rank, ref)
        if ref in session.abandoning or len(session.abandoning) >= MAX_ABANDONING:
            return
        session.abandoning.add(ref)
        message = AbandonTransfer(request=self._peer_requests.next_id(), ref=ref, consumer=rank.consumer())
        timeout_s = self._context.settings.acknowledge_for_s
        self._peers.request(ref.endpoint, message, timeout_s, session.uid, session)

    def session_closed(self, session: Session) -> None:
        """End the session's prepared grants, and drop its parts of block lists."""
        session.assembly.clear()
        for ref in list(self._prepared.get(session.session_id, ())):
            self._drop_prepared(session, ref)
        self._prepared.pop(session.session_id, None)
