"""The sink's side of grants: learn the engine, plan the reads, request the grant, renew and end it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from kvxferd.core.context import NodeContext
from kvxferd.core.limits.ledger import request_bytes
from kvxferd.core.limits.table import BLOCK_ID_BYTES
from kvxferd.core.peers.peers import Peers, as_error
from kvxferd.core.peers.remote_engine import RemoteEngine
from kvxferd.core.peers.requests import CHECK_PEER, PeerRequests
from kvxferd.core.ranks.movers import Movers
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.core.sink.held_grant import GrantState, GrantTrigger, HeldGrant
from kvxferd.core.sink.manifests import HandshakeClient
from kvxferd.core.sink.plans import Plans
from kvxferd.errors import Code, KvxferdError, PeerError, PlanError
from kvxferd.ids import Endpoint, GrantId
from kvxferd.layout import BlocksByGroup, append_ids, num_id_bytes
from kvxferd.plan import PlanJob, PlannedReads
from kvxferd.wire.common import Binding, Refusal, TransferRef
from kvxferd.wire.endpoint import address_of
from kvxferd.wire.limits import (
    FENCE_WORD_BYTES,
    MAX_ADDRESS,
    MAX_GRANTS_PER_RENEWAL,
    MAX_METADATA_BYTES,
    MAX_NAME_CHARS,
)
from kvxferd.wire.mover import SourceRank
from kvxferd.wire.peer import (
    Acknowledge,
    GrantReply,
    GrantRequest,
    GrantsRenewed,
    ReleaseGrant,
    RenewGrants,
    ReplyMessage,
)

# A grant with a shorter lease would be renewed all the time; a longer lease never ends in practice.
MIN_LEASE_S, MAX_LEASE_S = 0.05, 7 * 24 * 3600.0
# A source keeps a progressive pull's question for so much longer than the pull has: its deadline ends it.
DEADLINE_MARGIN_S = 1.0
ASK_EVERY_S = 0.1
HEARD_WITHIN_S = 1.0  # before a deadline: a peer that has said so lately is there
MAX_STALE_BINDINGS = 3  # a source whose movers change faster than the requests arrive is not readable


class GrantClient:
    """Requests grants for local ranks, renews and ends them."""

    def __init__(
        self,
        context: NodeContext,
        peers: Peers,
        peer_requests: PeerRequests,
        handshake_client: HandshakeClient,
        movers: Movers,
    ) -> None:
        self._context = context
        self._peers = peers
        self._peer_requests = peer_requests
        self._handshake_client = handshake_client
        handshake_client.on_learnt = self._engine_learnt
        self._movers = movers
        self._block_ids = context.ledger[BLOCK_ID_BYTES]
        self.plans = Plans(context)
        self._held: dict[Endpoint, dict[GrantId, HeldGrant]] = {}
        self.on_changed: Callable[[HeldGrant], None] = lambda hold: None
        peers.pin(self._held.keys)

    def num_grants(self) -> dict[Endpoint, int]:
        """Return how many grants are held at each peer."""
        return {endpoint: len(held) for endpoint, held in self._held.items()}

    def acquire(
        self,
        rank: LocalRank,
        ref: TransferRef,
        wait_s: float,
        after_tokens: int = -1,
        blocks: BlocksByGroup | None = None,
    ) -> HeldGrant:
        """Start to request a grant. `on_changed` is called when it is held or refused, maybe at once.

        `after_tokens`: 0 for a progressive pull; -1: the transfer must be whole. `blocks`: into which it
        reads; None: that is not known yet.
        """
        hold = HeldGrant(GrantId(self._context.new_token()), rank, ref, wait_s, self._context.now)
        hold.after_tokens = after_tokens
        if blocks is not None:
            hold.starts = {name: listed.first_token for name, listed in blocks.items() if listed.ids}
        self._learn_engine(hold)
        return hold

    def ask_again(self, hold: HeldGrant, wait_s: float, after_tokens: int) -> None:
        """Ask for a grant that failed or has lapsed, with the engine's manifest and plan as they are now.

        Its name is the same: the source keeps what it has granted until it replaces it, so that it never
        sees the transfer without a reader.
        """
        self._peer_requests.give_up(hold.asked)
        self._drop_contents(hold)
        hold.transition(GrantTrigger.REPEAT)
        hold.asked = 0
        hold.wait_s, hold.started_at = wait_s, self._context.now
        hold.after_tokens, hold.awaits_more, hold.more_refusal = after_tokens, False, None
        hold.num_stale_bindings = 0
        self._learn_engine(hold)

    def describe_wait(self, hold: HeldGrant) -> tuple[str, str]:
        """Return whom a grant that is requested waits for, and the sentence for an error message.

        It waits for the peer, or where that has just said so, for the engine.
        """
        is_learning = hold.state is GrantState.HANDSHAKING
        address, engine = address_of(hold.ref.endpoint), hold.ref.engine
        asked = self._peer_requests.get(self._awaited(hold))
        if asked is not None and asked.why and self._context.now - asked.waiting_at <= HEARD_WITHIN_S:
            who = "a rank" if is_learning else "the publisher or a rank"
            text = f"{address} is there, and waits for engine {engine}: {asked.why}; look at that engine"
            return f"{who} of engine {hold.ref.engine_id}", f"in {hold.state}: {text}"
        silent_s = self._peers.silent_s(hold.ref.endpoint, hold.started_at)
        wait_s = self._context.settings.peer.handshake_wait_s
        requested = f"engine {engine}" if is_learning else "a grant"
        text = f"was asked for {requested}, and has sent nothing for {silent_s:.1f} s; {CHECK_PEER}"
        if silent_s <= wait_s:  # a peer replies at once, unless it waits for ranks
            text += f"; or its ranks were not ready, for which it waits {wait_s:g} s"
        return address, f"in {hold.state}: {address} {text}"

    def describe_silence(self, hold: HeldGrant) -> str:
        """Say for how long a peer that was asked for more tokens has not said that it waits; "": it has."""
        silent_s = self._peers.silent_s(hold.ref.endpoint, hold.started_at)
        if not hold.awaits_more or silent_s <= 2 * self._context.settings.peer.request_timeout_s:
            return ""
        return f"{address_of(hold.ref.endpoint)} has sent nothing for {silent_s:.1f} s; {CHECK_PEER}"

    def ask_why(self, hold: HeldGrant) -> None:
        """Send again what the grant waits for: a peer that is there replies why it waits.

        A thousand pulls may wait for one manifest: it is asked for once.
        """
        asked = self._peer_requests.get(number := self._awaited(hold))
        if asked is not None and self._context.now - asked.sent_at >= ASK_EVERY_S:
            self._peer_requests.send_again(number)

    def _awaited(self, hold: HeldGrant) -> int:
        is_learning = hold.state is GrantState.HANDSHAKING
        return self._handshake_client.asked_for(hold) if is_learning else hold.asked

    def _learn_engine(self, hold: HeldGrant) -> None:
        hold.learn_by = self._context.now + min(hold.wait_s, self._context.settings.peer.handshake_wait_s)
        self._handshake_client.learn_engine(hold)

    def _engine_learnt(self, hold: HeldGrant, outcome: RemoteEngine | Refusal) -> None:
        if hold.state is not GrantState.HANDSHAKING:
            if isinstance(outcome, RemoteEngine):
                outcome.release()
            return
        hold.learnt_at = self._context.now
        if isinstance(outcome, Refusal):
            self._settle(hold, outcome)
            return
        hold.remote = outcome
        hold.transition(GrantTrigger.LEARN)
        self._plan(hold)

    def _plan(self, hold: HeldGrant, refusal: Refusal | None = None) -> None:
        """Request the grant, once there is a plan of its reads. `refusal`: why none can be made now."""
        if hold.state is not GrantState.PLANNING or hold.remote is None:
            return
        if refusal is None:
            try:
                hold.reads = self.plans.acquire(hold, hold.remote)
            except KvxferdError as error:
                refusal = Refusal.of(error)
        if refusal is not None:
            self._settle(hold, refusal)
        elif hold.reads is not None:
            hold.transition(GrantTrigger.PLAN)
            self._request_grant(hold)

    def plan_made(self, job: PlanJob, made: PlannedReads | KvxferdError) -> None:
        """Go on with the grants that wait for a plan."""
        refusal = None if isinstance(made, PlannedReads | PlanError) else Refusal.of(made)
        for hold in self.plans.plan_made(job, made):
            self._context.put_off(hold.rank.uid, partial(self._plan, hold, refusal))

    def request_more(self, hold: HeldGrant, after_tokens: int, wait_s: float) -> None:
        """Ask once more for a grant that is held: `on_changed` is called when more tokens are ready, or all.

        The source keeps the request until then, so nothing is polled.
        """
        hold.after_tokens, hold.awaits_more, hold.wait_s = after_tokens, True, wait_s
        self._request_grant(hold)

    def _request_grant(self, hold: HeldGrant) -> None:
        """Ask for the grant, for more tokens, or for more ids than a reply has."""
        assert hold.remote is not None and hold.reads is not None
        # No source waits longer than this, whatever a pull's deadline: a longer wait only delays the refusal.
        wait_s = min(hold.wait_s, self._context.settings.peer.handshake_wait_s)
        if hold.after_tokens >= 0:
            wait_s = hold.wait_s + DEADLINE_MARGIN_S
        message = GrantRequest(
            request=self._peer_requests.next_id(),
            grant=hold.grant_id,
            ref=hold.ref,
            consumer=hold.rank.consumer(),
            reads=tuple((rank, hold.remote.ranks[rank].binding.agent) for rank in hold.reads.sources),
            wait_s=wait_s,
            after_tokens=hold.after_tokens,
            from_tokens=hold.reads.source_lists.missing(hold.starts, hold.blocks),
        )
        timeout_s = wait_s + self._context.settings.peer.silent_after_s
        hold.asked = message.request
        self._peers.request(hold.ref.endpoint, message, timeout_s, hold.rank.uid, hold, waits=True)

    def answered(self, hold: HeldGrant, request: int, reply: ReplyMessage) -> None:
        """Go on with the reply to the grant's last request."""
        if request != hold.asked:
            return  # it has been asked anew since
        is_first, refusal = hold.state is GrantState.REQUESTING, None
        if not is_first and hold.state not in (GrantState.HELD, GrantState.LAPSED):
            if isinstance(reply, GrantReply) and not hold.awaits_more:
                self._send_return(hold)  # the pull has ended meanwhile
            return
        is_granted = isinstance(reply, GrantReply) or hold.granted is not None
        try:
            if self._take(hold, reply).has_more:
                self._request_grant(hold)
                return
            if is_first:
                self.preload(hold)
        except KvxferdError as error:
            refusal = Refusal.of(error)
        if not is_first:
            hold.awaits_more, hold.more_refusal = False, refusal
            self.on_changed(hold)
        elif refusal is None:
            self._hold(hold)
        elif refusal.code is Code.BINDING_STALE and hold.num_stale_bindings < MAX_STALE_BINDINGS:
            hold.num_stale_bindings += 1
            hold.transition(GrantTrigger.STALE)
            self._drop_contents(hold)  # another plan may read other groups
            self.forget_engine(hold)
            self._learn_engine(hold)
        else:
            self._settle(hold, refusal)
            if is_granted:
                self._send_return(hold)

    def _take(self, hold: HeldGrant, reply: ReplyMessage) -> GrantReply:
        """Keep the ids of a reply behind those that came before. Raises KvxferdError where that cannot be."""
        if not isinstance(reply, GrantReply):
            raise as_error(reply)
        before, uid = hold.granted, hold.rank.uid
        if problem := _grant_error(reply, hold.after_tokens):
            raise _unusable(problem)
        if before is not None and (
            reply.fence_word != before.fence_word or 0 <= reply.ready_tokens < before.ready_tokens
        ):
            text = f"cannot read on in transfer {hold.ref.transfer_id}: it is another one now"
            raise PeerError(text, Code.RELEASED)
        assert hold.reads is not None and hold.remote is not None
        lists = hold.reads.source_lists
        try:
            added = lists.added(hold.blocks, reply.blocks)
        except PeerError as error:
            raise _unusable(error.message) from error
        if reply.has_more and not any(one.ids for name, one in added.items() if name not in lists.states):
            raise _unusable("it has more block ids, and sends none")
        replaced = {name: one for name, one in hold.blocks.items() if name in added and name in lists.states}
        size = num_id_bytes(added) - num_id_bytes(replaced)
        if before is None:
            size = request_bytes(added) + len(reply.fence_metadata)
        self._block_ids.check(uid, size, f"hold transfer {hold.ref.transfer_id}")
        self._block_ids.add(uid, size)
        hold.charged_bytes += size
        for name, listed in added.items():
            is_first = name not in hold.blocks or not hold.blocks[name].ids or name in replaced
            hold.blocks[name] = listed if is_first else append_ids(hold.blocks[name], listed.ids)
        hold.granted = msgspec.structs.replace(reply, blocks={})
        bindings = [(rank, hold.remote.ranks[rank].binding) for rank in hold.reads.sources]
        hold.sources = tuple([SourceRank(rank, binding.agent, binding.regions) for rank, binding in bindings])
        hold.agents = [(one.agent, one.metadata, _host_word_address(one)) for _, one in bindings]
        hold.agents.append((reply.fence_agent, reply.fence_metadata, reply.fence_address))
        return hold.granted

    def _hold(self, hold: HeldGrant) -> None:
        """Renew the grant from now on."""
        assert hold.granted is not None
        hold.transition(GrantTrigger.GRANT)
        held = self._held.setdefault(hold.ref.endpoint, {})
        held[hold.grant_id] = hold
        if len(held) == 1:
            self._schedule_renewal(hold.ref.endpoint, hold.granted.lease_s)
        self._settle(hold)

    def _settle(self, hold: HeldGrant, refusal: Refusal | None = None) -> None:
        if refusal is not None:
            hold.refused_in, hold.refusal = hold.state, refusal
            hold.transition(GrantTrigger.REFUSE)
            self._drop_contents(hold)  # a prepared hold may be kept for minutes
        hold.settled_at = self._context.now
        self.on_changed(hold)

    def preload(self, hold: HeldGrant) -> None:
        """Load the plan and the remote agents of the grant into the rank's mover. Raises PeerError."""
        if hold.rank.mover is None or self._movers.get(hold.rank.mover) is None:
            return
        assert hold.reads is not None
        self._movers.load_plan(hold.rank.mover, hold.reads.plan)
        self._movers.load_remotes(hold.rank.mover, hold.ref.endpoint, hold.agents)

    # --- renewal

    def _schedule_renewal(self, endpoint: Endpoint, lease_s: float) -> None:
        self._context.after(("renew", endpoint), lease_s / 6, lambda: self._renew(endpoint, lease_s))

    def _renew(self, endpoint: Endpoint, lease_s: float) -> None:
        oldest = self._context.now - self._context.settings.transfer.max_hold_s
        # One request for each user: a user whose requests have no room must not end the grants of another.
        grants_of: dict[int, list[GrantId]] = {}
        for grant, hold in self._held[endpoint].items():
            if hold.settled_at > oldest:
                grants_of.setdefault(hold.rank.uid, []).append(grant)
        for uid, grants in grants_of.items():
            for first in range(0, len(grants), MAX_GRANTS_PER_RENEWAL):
                some = tuple(grants[first : first + MAX_GRANTS_PER_RENEWAL])
                message = RenewGrants(request=self._peer_requests.next_id(), grants=some)
                self._peers.request(endpoint, message, lease_s, uid, endpoint)
        self._schedule_renewal(endpoint, lease_s)

    def renewed(self, endpoint: Endpoint, reply: ReplyMessage) -> None:
        """Note which grants have ended at their source."""
        # A grant that ended does not end its pull: the fence word decides that. But it is not renewed
        # any more, and a pull that is not posted requests another one.
        if isinstance(reply, GrantsRenewed):
            for grant in reply.ended:
                hold = self._forget(endpoint, grant)
                if hold is not None and hold.state is GrantState.HELD:
                    hold.transition(GrantTrigger.LAPSE)

    def forget_engine(self, hold: HeldGrant) -> None:
        """Forget the manifest that the grant was planned on: the next grant fetches it again."""
        self._handshake_client.forget_engine(hold.ref.endpoint, hold.ref.engine)

    def _forget(self, endpoint: Endpoint, grant: GrantId) -> HeldGrant | None:
        held = self._held.get(endpoint, {})
        hold = held.pop(grant, None)
        if not held:
            self._held.pop(endpoint, None)
            self._context.timers.cancel(("renew", endpoint))
        return hold

    # --- ending

    def release(self, hold: HeldGrant) -> None:
        """End the grant without an acknowledgement. Does nothing where it has ended."""
        self._handshake_client.forget(hold)
        is_asked = self._peer_requests.get(hold.asked) is not None  # the source may grant it, maybe anew
        if self._end(hold) or is_asked:
            self._send_return(hold)

    def _end(self, hold: HeldGrant) -> bool:
        """Return whether the source has granted it."""
        hold.transition(GrantTrigger.END)
        self._peer_requests.give_up(hold.asked)
        self._drop_contents(hold)
        return self._forget(hold.ref.endpoint, hold.grant_id) is not None

    def _drop_contents(self, hold: HeldGrant) -> None:
        """Free the source's block ids, though a last message about the grant may be under way."""
        self._block_ids.release(hold.rank.uid, hold.charged_bytes)
        hold.charged_bytes, hold.granted, hold.blocks = 0, None, {}
        hold.sources, hold.agents = (), []
        if hold.remote is not None:
            hold.remote.release()
        if hold.reads is not None:
            self.plans.release(hold.reads)
        hold.remote = hold.reads = None

    def _send_return(self, hold: HeldGrant) -> None:
        message = ReleaseGrant(request=self._peer_requests.next_id(), grant=hold.grant_id)
        timeout_s = self._context.settings.peer.silent_after_s
        self._peers.request(hold.ref.endpoint, message, timeout_s, hold.rank.uid)

    def acknowledge(self, hold: HeldGrant, num_bytes: int, about: object = None) -> None:
        """End the grant: this rank has so many bytes. Repeated for `acknowledge_for_s` until the reply.

        `about`: whom the reply is for.
        """
        self._end(hold)
        message = Acknowledge(
            request=self._peer_requests.next_id(),
            grant=hold.grant_id,
            ref=hold.ref,
            consumer=hold.rank.consumer(),
            bytes=num_bytes,
        )
        timeout_s = self._context.settings.acknowledge_for_s
        self._peers.request(hold.ref.endpoint, message, timeout_s, hold.rank.uid, about)


def _host_word_address(binding: Binding) -> int:
    """Return the address of a word in the rank's host memory; 0 where it has none."""
    for region in binding.regions:
        if region.mem_type == "DRAM" and not region.staged and region.size_bytes >= FENCE_WORD_BYTES:
            return region.address
    return 0


def _unusable(problem: str) -> PeerError:
    return PeerError(f"cannot use the peer's reply to a grant: {problem}", Code.BAD_FRAME)


def _grant_error(granted: GrantReply, after_tokens: int) -> str:
    """Return why a pull, a timer or a mover cannot use the grant; "" where they can."""
    if 0 <= granted.ready_tokens <= after_tokens:
        return f"{granted.ready_tokens} tokens are ready, and more than {after_tokens} were asked for"
    if not MIN_LEASE_S <= granted.lease_s <= MAX_LEASE_S:  # NaN is not in between either
        return f"a lease of {granted.lease_s} s"
    if len(granted.fence_word) != FENCE_WORD_BYTES:
        return f"a fence word of {len(granted.fence_word)} bytes"
    if not 0 < granted.fence_address <= MAX_ADDRESS - FENCE_WORD_BYTES:
        return f"a fence word at address {granted.fence_address}"
    if not 0 < len(granted.fence_agent) <= MAX_NAME_CHARS:
        return f"an agent's name of {len(granted.fence_agent)} characters"
    if len(granted.fence_metadata) > MAX_METADATA_BYTES:
        return f"{len(granted.fence_metadata)} bytes of metadata"
    return ""
