"""The source's side of grants: requests that wait, grants, renewals, returns and acknowledgements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import CountServed, ReplyToPeer
from kvxferd.core.limits.ledger import check_count
from kvxferd.core.limits.table import GRANTS
from kvxferd.core.peers.routes import PeerRoutes
from kvxferd.core.ranks.polling import PollRequests
from kvxferd.core.ranks.registry import LocalEngine, Registry
from kvxferd.core.source.fence_pages import FencePages, MappedFencePage
from kvxferd.core.source.publishing import PublishedTransfers
from kvxferd.core.source.transfer_table import Grant, Transfer, TransferKey
from kvxferd.core.source.waiting import Obstacle, WaitingRequest, WaitingRequests, kept_bytes
from kvxferd.errors import Code
from kvxferd.ids import GrantId, GroupName
from kvxferd.layout import BlocksByGroup, num_id_bytes
from kvxferd.records import ServedRecord
from kvxferd.wire.common import TransferRef
from kvxferd.wire.limits import FENCE_WORD_BYTES
from kvxferd.wire.peer import (
    AbandonTransfer,
    Acknowledge,
    GrantReply,
    GrantRequest,
    GrantsRenewed,
    ReleaseGrant,
    RenewGrants,
    RequestDone,
)

# Each rank of a consumer engine has one grant on a transfer, and the largest engine has 4,096. The end of the
# first one is looked for among all of them, whenever one comes.
MAX_GRANTS_PER_TRANSFER = 4096

# Of the block ids of one reply: a request of two million tokens at 16 a block. More come in other replies.
MAX_PAGE_BYTES = 512 << 10

# How long the question of a progressive pull waits: longer than any prefill.
MAX_PREFILL_S = 3600.0

# Of one acknowledgement of a transfer none of whose ranks is here: 1 TiB, more than a node's memory.
MAX_BYTES_UNCHECKED = 1 << 40


@dataclass(eq=False, repr=False)
class GrantServer:
    """Replies to every request for a grant, at once or when what it waits for has happened."""

    _context: NodeContext
    _registry: Registry
    _published: PublishedTransfers
    _waiting: WaitingRequests
    _poll_requests: PollRequests
    _fence_pages: FencePages
    _peer_routes: PeerRoutes

    # --- requests

    def acquire(self, route: bytes, message: GrantRequest, key: str = "") -> None:
        """Reply at once, or when the transfer is published and ready, and its movers poll."""
        ref, consumer, agents = message.ref, message.consumer, [agent for _, agent in message.reads]
        names = (message.grant, ref.endpoint, *ref.engine, ref.transfer_id, ref.nonce)
        consumer_names = (consumer.engine_id, consumer.generation)
        request = WaitingRequest(
            name=_scoped_grant_id(message.grant, key),
            peer_id=key or route.hex(),
            route=route,
            message=message,
            wanted=f"grant transfer {ref.transfer_id}",
            num_bytes=kept_bytes(*names, *consumer_names, *agents, *message.from_tokens),
            waits_for=frozenset([ref.engine_id, _key_of(ref)]),
            reply=self._reply,
        )
        self._waiting.receive(request)

    def _reply(self, request: WaitingRequest[GrantRequest]) -> Obstacle | None:
        """Grant the request, or return why it must wait."""
        message = request.message
        transfer = self._published.table.live.get(_key_of(message.ref))
        engine = self._registry.get(message.ref.engine)
        if obstacle := self._obstacle(request, transfer, engine):
            return obstacle
        assert transfer is not None and engine is not None
        place, wait_s = self._fence_pages.get(transfer.session), self._wait_limit_s(message)
        if place is None:
            return Obstacle(Code.MOVER_LOST, "no mover serves its fence page yet", wait_s)
        agents = frozenset([place.agent, *(agent for _, agent in message.reads)])
        if not self._waiting.poll(request, agents):
            return Obstacle(Code.MOVER_LOST, "its movers do not answer", wait_s)
        self._grant(request, transfer)
        self._send_grant(request, transfer, engine, place)
        return None

    def _obstacle(
        self, request: WaitingRequest[GrantRequest], transfer: Transfer | None, engine: LocalEngine | None
    ) -> Obstacle | None:
        """Return why the request cannot be granted, as far as its movers do not matter. Raises BusyError."""
        message, ref = request.message, request.message.ref
        if transfer is None:
            tombstone = self._published.ended.get(_key_of(ref))
            if tombstone is not None and tombstone.nonce == ref.nonce:
                if tombstone.why is Code.LEASE_EXPIRED:
                    why = "its lease ran out: no reader renewed it, and its engine reported no more tokens"
                    return Obstacle(Code.LEASE_EXPIRED, f"{why}; its blocks may hold others")
                why = f"it was released ({tombstone.why}); its blocks may hold others"
                return Obstacle(Code.RELEASED, why)
        if obstacle := self._engine_obstacle(message, engine):
            return obstacle
        if transfer is None:
            wait_s = self._context.settings.transfer.unknown_wait_s
            why = f"engine {ref.engine} has published none of that id"
            if message.after_tokens >= 0:  # progressive
                wait_s = self._wait_limit_s(message)
            return Obstacle(Code.TRANSFER_UNKNOWN, why, wait_s)
        assert engine is not None
        return self._transfer_obstacle(request, transfer, engine)

    def _engine_obstacle(self, message: GrantRequest, engine: LocalEngine | None) -> Obstacle | None:
        ref = message.ref
        if (successor := self._registry.successor(ref.engine)) is not None:
            why = f"engine {ref.engine} has been replaced by {successor}; route anew"
            return Obstacle(Code.GENERATION_STALE, why)
        if engine is None:
            why = f"no rank of engine {ref.engine} is registered here"
            return Obstacle(Code.ENGINE_UNKNOWN, why, self._context.settings.transfer.unknown_wait_s)
        if lacking := engine.missing():
            why = f"ranks {', '.join(map(str, lacking))} of engine {ref.engine} are not there"
            return Obstacle(Code.ENGINE_INCOMPLETE, why, self._wait_limit_s(message))
        for rank, agent in message.reads:
            record = engine.ranks.get(rank)
            if record is None or record.agent != agent:
                return Obstacle(Code.BINDING_STALE, f"rank {rank} has another mover; fetch the engine again")
        return None

    def _transfer_obstacle(
        self, request: WaitingRequest[GrantRequest], transfer: Transfer, engine: LocalEngine
    ) -> Obstacle | None:
        message, grant = request.message, GrantId(str(request.name))
        if transfer.nonce != message.ref.nonce:
            why = "the reference's nonce is not the transfer's; hand on what publish() returned"
            return Obstacle(Code.NONCE_WRONG, why)
        if self._published.table.by_grant.get(grant, transfer) is not transfer:
            why = f"grant {message.grant[:80]} is on another transfer; choose a new name"
            return Obstacle(Code.OUT_OF_PLACE, why)
        if grant not in transfer.grants:
            num_grants = len(transfer.grants)
            full = f"{request.wanted}: it has {num_grants} grants"
            check_count(num_grants, MAX_GRANTS_PER_TRANSFER, full, GRANTS.name)
            self._context.ledger[GRANTS].check(request.peer_id, 1, request.wanted)
        if engine.find_remapped(transfer.incarnations) is not None:  # it was released for that, or is now
            return Obstacle(Code.RANK_LOST, "a rank's memory was mapped anew since it was published")
        if not self._is_readable(message, transfer, engine):
            unready = ", ".join(map(str, transfer.unready(engine.spec)))
            why = f"ranks {unready} have not said ready" if unready else "its publisher has yet to add blocks"
            return Obstacle(Code.TRANSFER_NOT_READY, why, self._wait_limit_s(message))
        return None

    @staticmethod
    def _is_readable(message: GrantRequest, transfer: Transfer, engine: LocalEngine) -> bool:
        """Whether the reader can go on: with the whole, or with more than it has."""
        is_ready = transfer.is_ready(engine)
        return is_ready or 0 <= message.after_tokens < transfer.tokens_ready(engine)

    def _wait_limit_s(self, message: GrantRequest) -> float:
        is_progressive = message.after_tokens >= 0
        longest_s = MAX_PREFILL_S if is_progressive else self._context.settings.peer.handshake_wait_s
        return min(message.wait_s, longest_s)

    def _grant(self, request: WaitingRequest[GrantRequest], transfer: Transfer) -> None:
        """Put the grant on the transfer's lease, or renew it: for `max_hold_s` and one lease in all."""
        now, settings, grant_id = self._context.now, self._context.settings, GrantId(str(request.name))
        grant = transfer.grants.get(grant_id)
        if grant is None:
            grant = Grant(
                grant_id,
                agents=frozenset(),
                granted_at=now,
                peer_id=request.peer_id,
                reader=request.message.consumer.engine_id,
                peer=self._peer_routes.endpoint_of(request.route),
            )
            self._published.table.add_grant(transfer, grant)
        for agent in sorted(request.agents):
            self._poll_requests.acquire(agent, grant_id)
        for agent in sorted(grant.agents - request.agents):
            self._poll_requests.release(agent, grant_id)
        ends_at = min(now, grant.granted_at + settings.transfer.max_hold_s) + settings.transfer.lease_s
        grant.agents, grant.expires_at = request.agents, max(grant.expires_at, ends_at)
        self._published.schedule_lease_check(transfer)

    def _send_grant(
        self,
        request: WaitingRequest[GrantRequest],
        transfer: Transfer,
        engine: LocalEngine,
        place: MappedFencePage,
    ) -> None:
        """Send the grant with the first of the wanted block ids."""
        message = request.message
        self._waiting.remove(request)
        blocks, has_more = _page(transfer, engine, message.from_tokens)
        is_ready = transfer.is_ready(engine)
        granted = GrantReply(
            request=message.request,
            grant=message.grant,
            blocks=blocks,
            num_tokens=transfer.num_tokens,
            lease_s=self._context.settings.transfer.lease_s,
            fence_agent=place.agent,
            fence_address=place.address + transfer.fence_slot * FENCE_WORD_BYTES,
            fence_word=transfer.fence_word,
            fence_metadata=place.metadata,
            has_more=has_more,
            ready_tokens=-1 if is_ready else transfer.tokens_ready(engine),
        )
        self._context.emit(ReplyToPeer(request.route, granted), num_id_bytes(blocks))

    # --- renewal and end

    def renew(self, route: bytes, message: RenewGrants, key: str = "") -> None:
        """Extend the grants that live, and reply with those that have ended."""
        ended = []
        settings, now = self._context.settings.transfer, self._context.now
        for grant_id in message.grants:
            name = _scoped_grant_id(grant_id, key)
            transfer = self._published.table.by_grant.get(name)
            if transfer is None:
                ended.append(grant_id)
                continue
            grant = transfer.grants[name]
            before = grant.expires_at
            grant.expires_at = min(now + settings.lease_s, grant.granted_at + settings.max_hold_s)
            if grant.expires_at < before:
                self._published.schedule_lease_check(transfer)
        self._context.emit(ReplyToPeer(route, GrantsRenewed(request=message.request, ended=tuple(ended))))

    def release(self, route: bytes, message: ReleaseGrant, key: str = "") -> None:
        """End the grant of a pull that failed, or never came."""
        grant = _scoped_grant_id(message.grant, key)
        if request := self._waiting.get(grant):
            self._waiting.refuse(request, Code.CANCELLED, "its reader gave the grant back before it had it")
        self._published.return_grant(grant)
        self._context.emit(ReplyToPeer(route, RequestDone(request=message.request)))

    def acknowledge(self, route: bytes, message: Acknowledge, key: str = "") -> None:
        """Record that a consumer rank has the bytes. The last one completes the transfer."""
        transfer, consumer = self._find_transfer(message.ref), message.consumer
        if transfer is not None and (
            reader := self._published.table.keep_reader(
                transfer, key or route.hex(), consumer, acknowledges=True
            )
        ):
            grant = _scoped_grant_id(message.grant, key)
            if self._published.table.by_grant.get(grant) is transfer:
                self._published.end_grant(grant)
            if consumer.rank not in reader.acknowledged:  # else it is repeated until it is answered
                num_bytes = min(message.bytes, self._max_bytes_of(transfer))
                peer = self._peer_routes.endpoint_of(route)
                reader.acknowledge(consumer.rank, num_bytes, peer)
                served = ServedRecord(
                    source=transfer.engine.engine_id, sink=consumer.engine_id, peer=peer, bytes=num_bytes
                )
                self._context.emit(CountServed(served))
            if transfer.is_read_by_all:
                self._published.release(transfer, Code.COMPLETED)
        self._context.emit(ReplyToPeer(route, RequestDone(request=message.request)))

    def _max_bytes_of(self, transfer: Transfer) -> int:
        """Return more bytes than one rank can read of the transfer: a peer's figure is limited by it."""
        engine = self._registry.get(transfer.engine)
        local = [rank.bytes_of(transfer.blocks) for rank in engine.local_ranks()] if engine else []
        return max(local) * len(engine.ranks) if engine and local else MAX_BYTES_UNCHECKED

    def abandon(self, route: bytes, message: AbandonTransfer, key: str = "") -> None:
        """Record that a consumer engine reads no more of the transfer."""
        transfer, table = self._find_transfer(message.ref), self._published.table
        if transfer is not None and (
            reader := table.keep_reader(transfer, key or route.hex(), message.consumer, acknowledges=False)
        ):
            reader.abandoned = True
            if transfer.is_read_by_all:
                self._published.release(transfer, Code.ABANDONED)
        self._context.emit(ReplyToPeer(route, RequestDone(request=message.request)))

    def _find_transfer(self, ref: TransferRef) -> Transfer | None:
        """Return the live transfer of the reference; None where the nonce is another one."""
        transfer = self._published.table.live.get((ref.engine, ref.transfer_id))
        return transfer if transfer is not None and transfer.nonce == ref.nonce else None


def _scoped_grant_id(grant: GrantId, key: str) -> GrantId:
    """Return the grant's name among those of all peers. With CURVE a peer can name only its own grants."""
    return GrantId(f"{key}/{grant}") if key else grant


def _key_of(ref: TransferRef) -> TransferKey:
    return ref.engine, ref.transfer_id


def _page(
    transfer: Transfer, engine: LocalEngine, from_tokens: Mapping[GroupName, int]
) -> tuple[BlocksByGroup, bool]:
    """Return ids from these tokens on, as many as a reply has, and whether there are more."""
    page: BlocksByGroup = {}
    left, has_more = MAX_PAGE_BYTES, False
    for name, rules in engine.list_rules.items():
        if name not in from_tokens or name not in transfer.blocks:
            continue
        listed = transfer.blocks[name]
        page[name] = rules.window(listed, from_tokens[name], max_ids=left // 4)
        left -= len(page[name].ids)
        has_more |= not rules.is_state and rules.geometry.end_of(page[name]) < rules.geometry.end_of(listed)
    return page, has_more
