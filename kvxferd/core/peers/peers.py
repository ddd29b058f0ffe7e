"""The other daemons: who may take a place among them, the hello, and the requests to each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import ClosePeerConnection
from kvxferd.core.limits.ledger import Charge
from kvxferd.core.limits.table import OPEN_REQUESTS, PEERS, RETRY_LATER_S
from kvxferd.core.peers.remote_engine import RemoteEngine
from kvxferd.core.peers.requests import CHECK_PEER, OpenRequest, PeerRequests
from kvxferd.errors import BusyError, Code, KvxferdError, PeerError, ProtocolError
from kvxferd.ids import BootId, Endpoint, EngineKey
from kvxferd.records import PeerSnapshot, RemoteEngineSnapshot
from kvxferd.wire.endpoint import address_of
from kvxferd.wire.limits import MAX_SENTENCE_CHARS
from kvxferd.wire.peer import (
    PEER_VERSIONS,
    GrantReply,
    GrantsRenewed,
    ManifestReply,
    PeerHello,
    PeerMessage,
    PeerRefused,
    PeerWelcome,
    ReplyMessage,
    RequestDone,
    RequestMessage,
    StillWaiting,
)

# A peer that has not answered a hello that was sent twice is shown as silent.
HELLO_RESENDS = 2


@dataclass(slots=True)
class Peer:
    """One daemon, named by its endpoint. What was learnt from it is forgotten when it is silent."""

    endpoint: Endpoint
    uid: int  # the user who named it first, whose share of the peers it counts for
    users: set[int] = field(default_factory=set)  # all users with requests to it, ended ones too
    boot: BootId | None = None  # None: no `PeerWelcome` yet
    last_seen_at: float | None = None  # when its last message arrived
    round_trip_s: float | None = None  # of the last message that a peer answers at once
    hello: int = 0  # the number of the last one
    engines: dict[EngineKey, RemoteEngine] = field(default_factory=dict)

    def forget_engine(self, key: EngineKey) -> None:
        """Forget an engine, if it is known. Grants that read it keep it."""
        if engine := self.engines.pop(key, None):
            engine.release()

    def forget_engines(self) -> None:
        """Forget all of them."""
        for key in tuple(self.engines):
            self.forget_engine(key)


class Peers:
    """Sends requests to peers, and greets each first."""

    def __init__(self, context: NodeContext, peer_requests: PeerRequests) -> None:
        self._context = context
        self._peer_requests = peer_requests
        self._peers: dict[Endpoint, Peer] = {}
        self._peer_share = context.ledger[PEERS]
        self._open_request_share = context.ledger[OPEN_REQUESTS]
        self._pins: list[Callable[[], Collection[Endpoint]]] = []

    def pin(self, needed: Callable[[], Collection[Endpoint]]) -> None:
        """Keep the peers that `needed` returns, though no request to them is open."""
        self._pins.append(needed)

    # --- requests

    def request(
        self,
        endpoint: Endpoint,
        message: RequestMessage,
        timeout_s: float,
        uid: int,
        about: object = None,
        *,
        waits: bool = False,
        is_vital: bool = False,
    ) -> None:
        """Send a request for that user, behind a hello. The node gives its reply to whom it is for.

        `waits`: the request may wait at the peer for as long as `timeout_s`; a peer that is silent meanwhile
        is unreachable all the same. `is_vital`: a rank has one of these at a time, and what else its user
        asks must not keep it back: it is counted, and not refused.
        """
        asked = OpenRequest(endpoint, message, timeout_s, about, uid)
        try:
            if not is_vital:
                self._open_request_share.check(uid, 1, f"ask {endpoint}")
            peer = self.admit(endpoint, uid)
        except KvxferdError as error:
            self._peer_requests.refuse(asked, error)
            return
        if waits:  # one that is up may have replied to it, and the reply may be lost
            settings = self._context.settings
            asked.silent_s = settings.gone_after_s if peer.boot else settings.peer.silent_after_s
        asked.is_charged = True
        self._open_request_share.add(uid, 1)
        if peer.boot is None:
            self._greet(peer)
        self._peer_requests.send(asked)
        if peer.boot is None:  # what follows waits for the welcome: nobody may be there
            self._peer_requests.hold_back(endpoint)

    def request_settled(self, asked: OpenRequest, reply: ReplyMessage) -> None:
        """Note what a reply to a request of `request` says of the peer."""
        if not asked.is_charged:
            return
        peer = self.of_request(asked)
        if peer is not None and asked.is_unanswered:
            self._mark_silent(peer)
        elif peer is not None and isinstance(reply, RequestDone | GrantsRenewed):
            peer.round_trip_s = self._context.now - asked.opened_at  # a grant may wait at the source
        self._open_request_share.release(asked.uid)

    def of_request(self, asked: OpenRequest) -> Peer | None:
        """Return the peer that was asked; None: it is forgotten, or connected to this node."""
        return None if isinstance(asked.address, bytes) else self._peers.get(asked.address)

    # --- admission

    def admit(self, endpoint: Endpoint, uid: int) -> Peer:
        """Return the peer, for that user, maybe in place of another one. Raises KvxferdError.

        A reference may name any endpoint: one user's references must not evict the peers of all others.
        """
        peer, evicted = self._peers.get(endpoint), None
        if peer is None:
            if endpoint != self._context.endpoint:
                self._context.allowlist.check(endpoint)  # the allow-lists may have changed since it was named
            if not self._peer_share.has_room(uid):
                evicted = self._evictable(endpoint, uid)
                self._forget(evicted)
            peer = Peer(endpoint, uid)
            self._peer_share.add(uid, 1)
        peer.users.add(uid)
        self._peers.pop(endpoint, None)
        self._peers[endpoint] = peer  # the longest unused first
        self._forget_later(peer)
        if evicted is not None:  # after the new peer has its place: whoever is refused may ask at once
            text = f"cannot wait for {evicted.endpoint}: another peer takes the place of one that is silent"
            self._peer_requests.fail_all(evicted.endpoint, BusyError(text, RETRY_LATER_S))
        return peer

    def _evictable(self, endpoint: Endpoint, uid: int) -> Peer:
        """Return the peer to evict: of the user with most peers, one that is idle or was never welcomed.

        A welcomed peer with open requests stays: without it its user's pulls would fail.
        """
        after = self._peer_share.held_by(uid) + 1
        needed = [pin() for pin in self._pins]
        found: Peer | None = None
        best = (0, False)
        for peer in self._peers.values():
            num, is_own = self._peer_share.held_by(peer.uid), peer.uid == uid
            if (num <= after and not is_own) or any(peer.endpoint in endpoints for endpoints in needed):
                continue
            is_idle = not self._is_used(peer)
            is_unproved = peer.boot is None and not is_own and peer.users == {peer.uid}
            if (is_idle or is_unproved) and (num, is_idle) > best:
                found, best = peer, (num, is_idle)
        if found is None:
            raise self._peer_share.refusal(uid, f"reach {endpoint}")
        return found

    def _forget_later(self, peer: Peer) -> None:
        """Forget the peer after `tombstone_s` without requests: nodes come and go, addresses change."""
        self._context.after(
            ("idle-peer", peer.endpoint),
            self._context.settings.tombstone_s,
            lambda: self._forget_if_idle(peer),
        )

    def _forget_if_idle(self, peer: Peer) -> None:
        if self._is_used(peer) or any(peer.endpoint in pin() for pin in self._pins):
            self._forget_later(peer)
        else:
            self._forget(peer)

    def _is_used(self, peer: Peer) -> bool:
        """Whether a request to it is open, besides its hello."""
        is_greeted = self._peer_requests.is_open(peer.endpoint, peer.hello)
        return self._peer_requests.num_open(peer.endpoint) > is_greeted

    def _greet(self, peer: Peer) -> None:
        """Send a hello, unless one is open. What is sent behind it is refused with it."""
        if self._peer_requests.is_open(peer.endpoint, peer.hello):
            return
        peer.hello, context = self._peer_requests.next_id(), self._context
        hello = PeerHello(
            request=peer.hello, versions=PEER_VERSIONS, boot=context.boot, endpoint=context.endpoint
        )
        timeout_s = context.settings.peer.silent_after_s
        self._peer_requests.send(OpenRequest(peer.endpoint, hello, timeout_s, peer, peer.uid))

    def hello_answered(self, peer: Peer, asked: OpenRequest, reply: ReplyMessage) -> None:
        """Go on with a peer that is there; fail the requests to one that refuses this daemon."""
        if isinstance(reply, PeerWelcome) and PEER_VERSIONS.oldest <= reply.version <= PEER_VERSIONS.newest:
            former, peer.boot = peer.boot, reply.boot
            peer.round_trip_s = self._context.now - asked.opened_at
            if former not in (None, reply.boot):
                peer.forget_engines()
                text = f"cannot wait for {address_of(peer.endpoint)}: its daemon was started anew; ask again"
                error = KvxferdError(text, Code.PEER_UNREACHABLE)
                self._peer_requests.fail_all(peer.endpoint, error, only_waiting=True)
            self._peer_requests.resume(peer.endpoint)
        elif asked.is_unanswered:
            self._mark_silent(peer)
        elif self._peers.get(peer.endpoint) is peer:
            self.give_up(peer.endpoint, as_error(reply))

    def _mark_silent(self, peer: Peer) -> None:
        """Forget what was learnt from the peer: after a silence another daemon may be there.

        While requests to it are open it keeps its place, and is greeted again. They are sent again when it
        is back.
        """
        if self._peers.get(peer.endpoint) is not peer:
            return
        if not self._is_used(peer):
            self._forget(peer)
            return
        peer.boot = None
        peer.forget_engines()
        self._peer_requests.hold_back(peer.endpoint)
        if not self._peer_requests.is_open(peer.endpoint, peer.hello):
            self._context.emit(ClosePeerConnection(peer.endpoint))
            self._greet(peer)

    def forget_if_unused(self, asked: OpenRequest) -> None:
        """Forget a silent peer whose last request has ended."""
        peer = self.of_request(asked)
        if peer is not None and peer.boot is None and not self._is_used(peer):
            self._forget(peer)

    def give_up(self, endpoint: Endpoint, error: KvxferdError) -> None:
        """Forget the peer, if it is known, and fail the requests to it. The next request greets it again.

        A pull that has its grant goes on: its reads need no daemon, and the fence word decides.
        """
        if peer := self._peers.get(endpoint):
            self._forget(peer)
            self._peer_requests.fail_all(endpoint, error)

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.endpoint]
        peer.forget_engines()
        self._peer_requests.cancel(peer.hello)
        self._peer_share.release(peer.uid)
        self._context.timers.cancel(("idle-peer", peer.endpoint))
        self._context.timers.cancel(("not-back", peer.endpoint))
        self._context.emit(ClosePeerConnection(peer.endpoint))

    # --- messages of peers

    def handle(self, endpoint: Endpoint, message: PeerMessage) -> None:
        """Handle a message on the connection to a peer. Raises ProtocolError for one that is out of place."""
        peer = self._peers.get(endpoint)
        if peer is None:
            return  # the peer was forgotten while this was on its way: no request to it is open
        peer.last_seen_at = self._context.now
        match message:
            case PeerRefused():
                clipped = message.message[:MAX_SENTENCE_CHARS]
                self._peer_requests.handle_reply(endpoint, msgspec.structs.replace(message, message=clipped))
            case StillWaiting():
                clipped = message.why[:MAX_SENTENCE_CHARS]
                self._peer_requests.handle_reply(endpoint, msgspec.structs.replace(message, why=clipped))
            case PeerWelcome() | ManifestReply() | GrantReply() | GrantsRenewed() | RequestDone():
                self._peer_requests.handle_reply(endpoint, message)
            case _:
                raise ProtocolError(f"cannot take a {type(message).__name__} as a reply", Code.OUT_OF_PLACE)

    def mark_unreachable(self, endpoint: Endpoint, reason: str) -> None:
        """Give up a peer to which no connection can be made."""
        text = f"cannot reach {address_of(endpoint)}: {reason}"
        self.give_up(endpoint, KvxferdError(text, Code.PEER_UNREACHABLE))

    def disconnected(self, endpoint: Endpoint, reason: str) -> None:
        """Find out by a hello whether the same daemon is back. What waits there fails if none is for long.

        Of a peer that nobody asks anything, what was learnt is forgotten: the next request greets it.
        """
        if (peer := self._peers.get(endpoint)) is None:
            return
        if not self._is_used(peer):
            peer.boot = None
            peer.forget_engines()
            return
        self._peer_requests.hold_back(endpoint)
        self._greet(peer)
        if ("not-back", endpoint) not in self._context.timers:
            grace_s = self._context.settings.peer.restart_grace_s
            self._context.after(("not-back", endpoint), grace_s, partial(self._not_back, peer, reason))

    def connected(self, endpoint: Endpoint) -> None:
        """Go by the replies again: a hello that was sent meanwhile may be lost."""
        self._context.timers.cancel(("not-back", endpoint))
        if (peer := self._peers.get(endpoint)) is not None:
            self._peer_requests.send_again(peer.hello)

    def _not_back(self, peer: Peer, reason: str) -> None:
        grace_s = self._context.settings.peer.restart_grace_s
        text = f"cannot reach {address_of(peer.endpoint)} for {grace_s:.4g} s: {reason}; {CHECK_PEER}"
        error = KvxferdError(text, Code.PEER_UNREACHABLE)
        self._peer_requests.fail_all(peer.endpoint, error, only_waiting=True)
        self._mark_silent(peer)

    def silent_s(self, endpoint: Endpoint, since: float) -> float:
        """Return for how long the peer has sent nothing; `since`: when the request was sent."""
        peer = self._peers.get(endpoint)
        last_seen_at = peer.last_seen_at if peer is not None else None
        return self._context.now - max(since, last_seen_at or 0.0)

    def find(self, endpoint: str) -> list[Endpoint]:
        """Return the known peers of that endpoint. Without a key it means every key there."""
        return [peer for peer in self._peers if endpoint in (peer, address_of(peer))]

    def get(self, endpoint: Endpoint) -> Peer | None:
        """Return the peer of exactly that endpoint; None: it is not known."""
        return self._peers.get(endpoint)

    def __iter__(self) -> Iterator[Peer]:
        """Iterate over the known peers, the longest unused first."""
        return iter(self._peers.values())

    def endpoints(self) -> set[Endpoint]:
        """Return the endpoints of all known peers."""
        return set(self._peers)

    def drop(self, endpoint: Endpoint) -> None:
        """Give up a peer for the operator."""
        text = f"cannot wait for {endpoint}: an operator dropped that peer"
        self.give_up(endpoint, KvxferdError(text, Code.CANCELLED))

    def allowlist_changed(self) -> None:
        """Give up the peers that the allow-lists do not admit any more."""
        for peer in list(self._peers.values()):
            try:
                if peer.endpoint != self._context.endpoint:
                    self._context.allowlist.check(peer.endpoint)
            except KvxferdError as error:
                self.give_up(peer.endpoint, error)

    def charges(self) -> Iterator[Charge]:
        """Yield what the peers, and the open requests to them, are counted for."""
        for peer in self._peers.values():
            yield PEERS, peer.uid, 1
        for asked in self._peer_requests:
            yield OPEN_REQUESTS, asked.uid, int(asked.is_charged)

    def check_integrity(self) -> None:
        """Raise AssertionError where something is known of a daemon that nobody has greeted."""
        for peer in self._peers.values():
            assert peer.boot is not None or not peer.engines, f"engines of {peer.endpoint}, which is silent"

    # --- snapshot

    def snapshot(self, num_grants: dict[Endpoint, int]) -> tuple[PeerSnapshot, ...]:
        """Return the other daemons. This node, a peer of its own for its ranks' reads, is left out."""
        now = self._context.now
        return tuple(
            PeerSnapshot(
                endpoint=peer.endpoint,
                boot=peer.boot,
                state=self._state(peer),
                engines=tuple(
                    RemoteEngineSnapshot(
                        engine_id=key.engine_id, generation=key.generation, num_ranks=len(engine.ranks)
                    )
                    for key, engine in peer.engines.items()
                ),
                num_grants=num_grants.get(peer.endpoint, 0),
                round_trip_s=None if peer.round_trip_s is None else round(peer.round_trip_s, 6),
                last_reply_s=None if peer.last_seen_at is None else round(now - peer.last_seen_at, 3),
            )
            for peer in self._peers.values()
            if peer.endpoint != self._context.endpoint
        )

    def _state(self, peer: Peer) -> str:
        """Return "silent" where a reply is overdue, else "up", or "connecting" before the first welcome.

        A hello is answered at once. Another request may wait for ranks or a publish, whatever else the
        peer sends meanwhile.
        """
        settings = self._context.settings
        waiting_since = self._peer_requests.oldest_at(peer.endpoint)
        if waiting_since is not None:
            patience_s = max(settings.peer.silent_after_s, settings.peer.handshake_wait_s)
            if peer.boot is None:
                patience_s = min(HELLO_RESENDS * settings.peer.request_timeout_s, patience_s)
            if self._context.now - max(waiting_since, peer.last_seen_at or 0.0) > patience_s:
                return "silent"
        return "up" if peer.boot else "connecting"


def as_error(reply: ReplyMessage) -> KvxferdError:
    """Return what a refusal reports; for a reply of the wrong kind, an error that names it."""
    if isinstance(reply, PeerRefused):
        return KvxferdError(reply.message, reply.code, retry_after_s=reply.retry_after_s)
    if isinstance(reply, PeerWelcome):
        return PeerError(
            f"cannot speak with the peer: it chose protocol version {reply.version}, "
            f"and this one speaks {PEER_VERSIONS}; upgrade the older",
            Code.BAD_VERSION,
        )
    text = f"cannot use the peer's reply: it is a {type(reply).__name__}"
    return PeerError(text, Code.BAD_FRAME)
