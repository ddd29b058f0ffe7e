"""The source's side of grants: requests that wait, grants, renewals, returns and acknowledgements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import CountServed, ReplyToPeer
from kvxferd.core.limits.checks import check_count
from kvxferd.core.peers.routes import PeerRoutes
from kvxferd.core.ranks.polling import PollRequests
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.core.ranks.registry import LocalEngine, Registry
from kvxferd.core.source.fence_pages import FencePages, MappedFencePage
from kvxferd.core.source.parked_requests import ParkedRequests
from kvxferd.core.source.publishing import PublishedTransfers
from kvxferd.core.source.transfer_table import Grant, Transfer, TransferKey
from kvxferd.core.tables import decrease, discard
from kvxferd.errors import Code, EngineError, KvxferdError, count_busy_refusal
from kvxferd.ids import AgentName, EngineKey, GrantId, GroupName
from kvxferd.layout import BlocksByGroup, num_id_bytes
from kvxferd.records import ServedRecord
from kvxferd.wire.common import TransferRef
from kvxferd.wire.limits import FENCE_WORD_BYTES, MAX_ENDPOINT_CHARS, MAX_NAME_CHARS, MAX_RANKS
from kvxferd.wire.peer import (
    AbandonTransfer,
    Acknowledge,
    GrantReply,
    GrantRequest,
    GrantsRenewed,
    PeerRefused,
    ReleaseGrant,
    RenewGrants,
    RequestDone,
    refusal_of,
)

# 64 ranks' agents of 20 characters are 1,280; all of the largest engine's are 80 KiB. Of the 32,768 requests
# that may wait (`limits.max_waiting`) 256 may be large, 64 of one peer: 32 MiB, and 256 MiB of the others.
MAX_REQUEST_CHARS, LARGE_REQUEST_CHARS, MAX_LARGE_REQUESTS, MAX_LARGE_REQUESTS_PER_PEER = (
    128 << 10,
    8 << 10,
    256,
    64,
)
# Each rank of a consumer engine has one grant on a transfer, and the largest engine has 4,096. One key may be
# that of a few nodes: 1,024 are 8 of them with `limits.max_ranks`. With names of 256 characters a grant takes
# 1.5 KiB: 6 MiB a transfer, and 1.5 MiB of one peer, where a hostile one had 60,000 grants and 90 MiB.
MAX_GRANTS_PER_TRANSFER, MAX_GRANTS_PER_PEER = 4096, 1024
# Engines that acknowledge or abandon one transfer. A request is routed to a handful.
MAX_READERS = 256

# Of the block ids of one reply: a request of two million tokens at 16 a block. More come in other replies.
MAX_PAGE_BYTES = 512 << 10

# How long the question of a progressive pull waits: longer than any prefill.
MAX_PREFILL_S = 3600.0

# Of one acknowledgement of a transfer none of whose ranks is here: 1 TiB, more than a node's memory.
MAX_BYTES_UNCHECKED = 1 << 40


@dataclass(slots=True)
class _PendingGrant:
    """A request for a grant that has no reply yet."""

    grant: GrantId  # the name by `_scoped_grant_id`
    peer_id: str  # the peer's key, or its route
    route: bytes
    message: GrantRequest
    transfer: TransferKey  # that the message names; kept, because five methods need it
    requested_at: float
    agents: frozenset[AgentName] = frozenset()  # that poll for it, or were requested to
    why: str = ""  # it waits


@dataclass(frozen=True, slots=True)
class _Obstacle:
    """Why a request cannot be granted now. It is refused once it has waited `wait_s`."""

    code: Code
    message: str
    wait_s: float = 0.0


class GrantServer(ParkedRequests[GrantId, _PendingGrant]):
    """Replies to every request for a grant, at once or when what it waits for has happened."""

    def __init__(
        self,
        context: NodeContext,
        registry: Registry,
        published: PublishedTransfers,
        poll_requests: PollRequests,
        fence_pages: FencePages,
        peer_routes: PeerRoutes,
    ) -> None:
        super().__init__(context, "asks-due")
        self._peer_routes = peer_routes
        self._registry = registry
        self._published = published
        self._poll_requests = poll_requests
        self._fence_pages = fence_pages
        # A publish concerns the requests for that transfer, a mover that polls the requests that read from
        # it, and no others: thousands may wait for transfers that are being computed.
        self._pending_by_transfer: dict[TransferKey, dict[GrantId, None]] = {}
        self._pending_by_agent: dict[AgentName, dict[GrantId, None]] = {}
        self._large: dict[GrantId, None] = {}  # those that name many agents
        self._num_large_of_peer: Counter[str] = Counter()

    # --- requests

    def acquire(self, route: bytes, message: GrantRequest, key: str = "") -> None:
        """Reply at once, or when the transfer is published and ready, and its movers poll."""
        grant = _scoped_grant_id(message.grant, key)
        pending = self._pending.get(grant)
        is_repeated = pending is not None and pending.message.request == message.request
        peer_id = pending.peer_id if pending else key or route.hex()
        try:
            is_large = _is_large(message)
            if is_large and grant not in self._large:
                self._check_large(peer_id)  # a request that is sent again may have become a large one
            if pending is None:
                self._check_waiting(peer_id)
        except KvxferdError as error:
            self._context.emit(ReplyToPeer(route, refusal_of(message.request, error)))
            return
        if pending is None:
            key_of_transfer = (message.ref.engine, message.ref.transfer_id)
            pending = _PendingGrant(grant, peer_id, route, message, key_of_transfer, self._context.now)
            self._park(grant, pending, peer_id)
        else:
            self._unindex_message(pending)
            self._note_sent(grant)
            pending.route, pending.message = route, message  # sent again: the last route is the live one
            pending.transfer = (message.ref.engine, message.ref.transfer_id)
        if is_large:
            self._large[grant] = None
            self._num_large_of_peer[peer_id] += 1
        self._pending_by_transfer.setdefault(pending.transfer, {})[grant] = None
        self._pending_by_engine.setdefault(message.ref.engine_id, {})[grant] = None
        self._consider(pending)
        if is_repeated:
            self._reply_still_waiting(grant, route, message.request)

    def _check_large(self, peer_id: str) -> None:
        what = "wait for a grant that names so many agents: too many such questions wait"
        check_count(len(self._large), MAX_LARGE_REQUESTS, what, "not a setting")
        check_count(
            self._num_large_of_peer[peer_id], MAX_LARGE_REQUESTS_PER_PEER, what, "of one asker; not a setting"
        )

    def reconsider_transfer(self, key: TransferKey) -> None:
        """Consider the transfer's requests again: it was published, or a rank is ready with it."""
        self._reconsider_all(self._pending_by_transfer.get(key, {}))

    def transfer_released(self, key: TransferKey) -> None:
        """Refuse the requests that wait for the transfer."""
        if key in self._pending_by_transfer:
            self._context.after(("asks-released", key), 0.0, lambda: self.reconsider_transfer(key))

    def reconsider_agent(self, agent: AgentName) -> None:
        """Consider the requests that read from the agent again: its mover polls."""
        self._reconsider_all(self._pending_by_agent.get(agent, {}))

    def _consider(self, pending: _PendingGrant) -> None:
        transfer = self._published.table.live.get(pending.transfer)
        found = self._obstacle(pending, transfer)
        if not isinstance(found, _Obstacle):
            assert transfer is not None
            self._grant(pending, transfer, found)
            return
        if self._is_given_up(pending.grant):
            self._remove(pending)
            return
        left_s = pending.requested_at + found.wait_s - self._context.now
        if left_s > 0:
            pending.why = found.message
            self._look_again(
                ("request", pending.grant), pending.grant, left_s, lambda: self._consider(pending)
            )
            return
        self._refuse(pending, found.code, found.message)

    def _refuse(self, pending: _PendingGrant, code: Code, message: str) -> None:
        self._remove(pending)
        refused = PeerRefused(request=pending.message.request, code=code, message=message)
        self._context.emit(ReplyToPeer(pending.route, refused))

    def _remove(self, pending: _PendingGrant) -> None:
        self._unpark(pending.grant, pending.peer_id)
        self._unindex_message(pending)
        for agent in sorted(pending.agents):
            discard(self._pending_by_agent, agent, pending.grant)
        self._context.timers.cancel(("request", pending.grant))
        transfer = self._published.table.by_grant.get(pending.grant)
        kept = transfer.grants[pending.grant].agents if transfer else frozenset()
        for agent in sorted(pending.agents - kept):
            self._poll_requests.release(agent, pending.grant)

    def _unindex_message(self, pending: _PendingGrant) -> None:
        if pending.grant in self._large:
            del self._large[pending.grant]
            decrease(self._num_large_of_peer, pending.peer_id)
        discard(self._pending_by_transfer, pending.transfer, pending.grant)
        discard(self._pending_by_engine, pending.message.ref.engine_id, pending.grant)

    def _obstacle(self, pending: _PendingGrant, transfer: Transfer | None) -> _Obstacle | MappedFencePage:
        """Return why the request cannot be granted, or where its fence page lies if it can."""
        engine_key, _ = pending.transfer
        if transfer is None and self._is_released(pending.message.ref):
            return self._missing_transfer_obstacle(pending.message)
        engine = self._registry.get(engine_key)
        if obstacle := self._engine_obstacle(pending.message, engine, engine_key):
            return obstacle
        if transfer is None:
            return self._missing_transfer_obstacle(pending.message)
        assert engine is not None
        return self._transfer_obstacle(pending, transfer, engine)

    def _engine_obstacle(
        self, message: GrantRequest, engine: LocalEngine | None, key: EngineKey
    ) -> _Obstacle | None:
        ref = message.ref
        what = f"cannot grant transfer {ref.transfer_id}"
        if self._registry.is_superseded(key):
            newest = self._registry.newest(ref.engine_id)
            return _Obstacle(
                Code.GENERATION_STALE,
                f"{what}: engine {ref.engine} has been replaced by {newest}; route anew",
            )
        if engine is None:
            return _Obstacle(
                Code.ENGINE_UNKNOWN,
                f"{what}: no rank of engine {ref.engine} is registered here",
                self._context.settings.unknown_wait_s,
            )
        if lacking := engine.missing():
            ranks = ", ".join(map(str, lacking))
            return _Obstacle(
                Code.ENGINE_INCOMPLETE,
                f"{what}: ranks {ranks} of engine {ref.engine} are not there",
                self._wait_limit_s(message),
            )
        for rank, agent in message.reads:
            record = engine.ranks.get(rank)
            if record is None or record.agent != agent:
                return _Obstacle(
                    Code.BINDING_STALE, f"{what}: rank {rank} has another mover; fetch the engine again"
                )
        return None

    def _is_released(self, ref: TransferRef) -> bool:
        tombstone = self._published.table.tombstones.get((ref.engine, ref.transfer_id))
        return tombstone is not None and tombstone.nonce == ref.nonce

    def _missing_transfer_obstacle(self, message: GrantRequest) -> _Obstacle:
        ref = message.ref
        what = f"cannot grant transfer {ref.transfer_id}"
        if self._is_released(ref):
            tombstone = self._published.table.tombstones[ref.engine, ref.transfer_id]
            return _Obstacle(
                Code.RELEASED, f"{what}: it was released ({tombstone.why}); its blocks may hold others"
            )
        return _Obstacle(
            Code.TRANSFER_UNKNOWN,
            f"{what}: engine {ref.engine} has published none of that id",
            self._context.settings.unknown_wait_s
            if message.after_tokens < 0
            else self._wait_limit_s(message),
        )

    def _transfer_obstacle(
        self, pending: _PendingGrant, transfer: Transfer, engine: LocalEngine
    ) -> _Obstacle | MappedFencePage:
        message = pending.message
        what = f"cannot grant transfer {transfer.transfer_id}"
        if transfer.nonce != message.ref.nonce:
            return _Obstacle(Code.NONCE_WRONG, f"{what}: the reference's nonce is not the transfer's")
        if self._published.table.by_grant.get(pending.grant, transfer) is not transfer:
            return _Obstacle(
                Code.OUT_OF_PLACE,
                f"{what}: grant {message.grant[:80]} is on another transfer; choose a new name",
            )
        if pending.grant not in transfer.grants and (
            len(transfer.grants) >= MAX_GRANTS_PER_TRANSFER
            or transfer.num_grants_of_peer[pending.peer_id] >= MAX_GRANTS_PER_PEER
        ):
            count_busy_refusal("grants_per_transfer")
            return _Obstacle(
                Code.BUSY,
                f"{what}: it has {len(transfer.grants)} grants; {MAX_GRANTS_PER_TRANSFER} are the limit, and "
                f"{MAX_GRANTS_PER_PEER} of one asker",
            )
        if engine.find_remapped(transfer.incarnations) is not None:  # it was released for that, or is now
            return _Obstacle(
                Code.RANK_LOST, f"{what}: a rank's memory was mapped anew since it was published"
            )
        if not self._is_readable(message, transfer, engine):
            unready = ", ".join(str(r) for r in engine.spec.ranks() if r not in transfer.ready)
            return _Obstacle(
                Code.TRANSFER_NOT_READY,
                f"{what}: ranks {unready} have not said ready",
                self._wait_limit_s(message),
            )
        place = self._fence_pages.get(transfer.session)
        if place is None:
            return _Obstacle(
                Code.MOVER_LOST, f"{what}: no mover serves its fence page yet", self._wait_limit_s(message)
            )
        agents = frozenset([place.agent, *(agent for _, agent in message.reads)])
        for agent in sorted(agents - pending.agents):
            self._poll_requests.acquire(agent, pending.grant)
            self._pending_by_agent.setdefault(agent, {})[pending.grant] = None
        for agent in sorted(pending.agents - agents):
            self._poll_requests.release(agent, pending.grant)
            discard(self._pending_by_agent, agent, pending.grant)
        pending.agents = agents
        if not all(map(self._poll_requests.is_polling, agents)):
            return _Obstacle(
                Code.MOVER_LOST, f"{what}: its movers do not answer", self._wait_limit_s(message)
            )
        return place

    def _is_readable(self, message: GrantRequest, transfer: Transfer, engine: LocalEngine) -> bool:
        """Whether the reader can go on: with the whole, or with more than it has."""
        if self._published.is_ready(transfer, engine):
            return True
        return 0 <= message.after_tokens < self._published.tokens_ready(transfer, engine)

    def _wait_limit_s(self, message: GrantRequest) -> float:
        is_progressive = message.after_tokens >= 0
        longest_s = MAX_PREFILL_S if is_progressive else self._context.settings.handshake_wait_s
        return min(message.wait_s, longest_s)

    def _grant(self, pending: _PendingGrant, transfer: Transfer, place: MappedFencePage) -> None:
        message, now = pending.message, self._context.now
        settings, known = self._context.settings, transfer.grants.get(pending.grant)
        granted_at = known.granted_at if known else now
        for agent in sorted(known.agents - pending.agents) if known else ():
            self._poll_requests.release(agent, pending.grant)
        grant = Grant(
            grant_id=pending.grant,
            peer_id=known.peer_id if known else pending.peer_id,
            consumer=message.consumer,
            agents=pending.agents,
            granted_at=granted_at,
            # A repeated request renews the grant, for at most max_hold_s and one lease after it was granted.
            expires_at=max(
                known.expires_at if known else 0.0,
                min(now, granted_at + settings.max_hold_s) + settings.lease_s,
            ),
        )
        self._published.table.add_grant(transfer, grant)
        self._published.schedule_lease_check(transfer)
        self._remove(pending)
        blocks, has_more = self._page(transfer, message.from_tokens)
        granted = GrantReply(
            request=message.request,
            grant=message.grant,
            blocks=blocks,
            num_tokens=transfer.num_tokens,
            lease_s=self._context.settings.lease_s,
            fence_agent=place.agent,
            fence_address=place.address + transfer.fence_slot * FENCE_WORD_BYTES,
            fence_word=transfer.fence_word,
            fence_metadata=place.metadata,
            has_more=has_more,
            ready_tokens=self._ready_tokens(transfer),
        )
        self._num_bytes_replied += num_id_bytes(blocks)
        self._context.emit(ReplyToPeer(pending.route, granted))

    def _page(self, transfer: Transfer, from_tokens: Mapping[GroupName, int]) -> tuple[BlocksByGroup, bool]:
        """Return ids from these tokens on, as many as a reply has, and whether there are more."""
        engine = self._registry.get(transfer.engine)
        assert engine is not None
        page: BlocksByGroup = {}
        left, has_more = MAX_PAGE_BYTES, False
        for name, rules in engine.list_rules.items():
            if name not in from_tokens or name not in transfer.blocks:
                continue
            listed = transfer.blocks[name]
            page[name] = rules.window(listed, from_tokens[name], max_ids=left // 4)
            left -= len(page[name].ids)
            has_more |= not rules.is_state and rules.end_of(page[name]) < rules.end_of(listed)
        return page, has_more

    def _ready_tokens(self, transfer: Transfer) -> int:
        """Return up to which token the transfer may be read; -1: all of it."""
        engine = self._registry.get(transfer.engine)
        assert engine is not None
        if self._published.is_ready(transfer, engine):
            return -1
        return self._published.tokens_ready(transfer, engine)

    # --- renewal and end

    def renew(self, route: bytes, message: RenewGrants, key: str = "") -> None:
        """Extend the grants that live, and reply with those that have ended."""
        ended = []
        settings, now = self._context.settings, self._context.now
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
        """End the grant of a pull that failed."""
        grant = _scoped_grant_id(message.grant, key)
        if waiting := self._pending.get(grant):
            self._refuse(waiting, Code.CANCELLED, "its reader gave the grant back before it had it")
        self._published.end_grant(grant)
        self._context.emit(ReplyToPeer(route, RequestDone(request=message.request)))

    def acknowledge(self, route: bytes, message: Acknowledge, key: str = "") -> None:
        """Record that a consumer rank has the bytes. The last one completes the transfer."""
        peer_id = key or route.hex()
        transfer = self._find_transfer(message.ref)
        if transfer is not None and self._keep_reader(peer_id, message, transfer):
            grant = _scoped_grant_id(message.grant, key)
            if self._published.table.by_grant.get(grant) is transfer:
                self._published.end_grant(grant)
            self._record_acknowledgement(route, message, transfer)
            if transfer.is_read_by_all:
                self._published.release(transfer, Code.COMPLETED)
        self._context.emit(ReplyToPeer(route, RequestDone(request=message.request)))

    def _record_acknowledgement(self, route: bytes, message: Acknowledge, transfer: Transfer) -> None:
        consumer = message.consumer
        reader = transfer.reader(consumer)
        if consumer.rank in reader.acknowledged:
            return  # it is repeated until it is answered
        num_bytes = min(message.bytes, self._max_bytes_of(transfer))
        peer = self._peer_routes.endpoint_of(route)
        reader.acknowledge(consumer.rank, num_bytes, peer)
        served = ServedRecord(
            source=transfer.engine.engine_id, sink=consumer.engine_id, peer=peer, bytes=num_bytes
        )
        self._context.emit(CountServed(served))

    def _max_bytes_of(self, transfer: Transfer) -> int:
        """Return more bytes than one rank can read of the transfer: a peer's figure is limited by it."""
        engine = self._registry.get(transfer.engine)
        ranks = engine.ranks.values() if engine is not None else ()
        local = [rank.bytes_of(transfer.blocks) for rank in ranks if isinstance(rank, LocalRank)]
        return max(local) * len(ranks) if local else MAX_BYTES_UNCHECKED

    def abandon(self, route: bytes, message: AbandonTransfer, key: str = "") -> None:
        """Record that a consumer engine reads no more of the transfer."""
        peer_id = key or route.hex()
        transfer = self._find_transfer(message.ref)
        if transfer is not None and self._keep_reader(peer_id, message, transfer):
            transfer.reader(message.consumer).abandoned = True
            if transfer.is_read_by_all:
                self._published.release(transfer, Code.ABANDONED)
        self._context.emit(ReplyToPeer(route, RequestDone(request=message.request)))

    def _keep_reader(self, peer_id: str, message: Acknowledge | AbandonTransfer, transfer: Transfer) -> bool:
        """Whether the consumer is kept with the transfer. An invented one gets a reply, and is not kept."""
        consumer, acknowledges = message.consumer, isinstance(message, Acknowledge)
        known = transfer.readers.get(EngineKey(consumer.engine_id, consumer.generation))
        if known is not None:
            fits = consumer.rank in known.acknowledged or len(known.acknowledged) < MAX_RANKS
        else:
            names = (consumer.engine_id, consumer.generation)
            fits = len(transfer.readers) < MAX_READERS and max(map(len, names)) <= MAX_NAME_CHARS
        return fits and self._published.table.charge_reader(transfer, peer_id, consumer, acknowledges)

    def _find_transfer(self, ref: TransferRef) -> Transfer | None:
        """Return the live transfer of the reference; None where the nonce is another one."""
        transfer = self._published.table.live.get((ref.engine, ref.transfer_id))
        return transfer if transfer is not None and transfer.nonce == ref.nonce else None


def _scoped_grant_id(grant: GrantId, key: str) -> GrantId:
    """Return the grant's name among those of all peers. With CURVE a peer can name only its own grants."""
    return GrantId(f"{key}/{grant}") if key else grant


def _is_large(message: GrantRequest) -> bool:
    """Whether the request names many agents. Raises EngineError where its names are too long.

    A request may wait for seconds among thousands, and its names are kept as long.
    """
    ref, consumer = message.ref, message.consumer
    agents = [agent for _, agent in message.reads]
    names = [message.grant, ref.engine_id, ref.generation, ref.transfer_id, ref.nonce]
    names += [consumer.engine_id, consumer.generation, *agents, *message.from_tokens]
    longest = max(map(len, names))
    if longest > MAX_NAME_CHARS or len(ref.endpoint) > MAX_ENDPOINT_CHARS:
        raise EngineError(
            f"cannot grant: a name of {longest} characters in the request; {MAX_NAME_CHARS} is the limit",
            Code.BAD_FRAME,
        )
    if sum(map(len, names)) > MAX_REQUEST_CHARS:
        raise EngineError(
            f"cannot grant: the request names {len(message.reads)} agents in more than {MAX_REQUEST_CHARS} "
            "characters",
            Code.BAD_FRAME,
        )
    return sum(map(len, [*agents, *message.from_tokens])) > LARGE_REQUEST_CHARS
