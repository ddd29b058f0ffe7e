"""The sink's side of a handshake: fetch each remote engine's manifest once, check it, and keep the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import EmitRecord
from kvxferd.core.limits.ledger import Charge
from kvxferd.core.limits.table import REMOTE_ENGINE_BYTES
from kvxferd.core.peers.manifest_checks import LayoutCache, aggregate_metadata, check_manifests
from kvxferd.core.peers.peers import Peer, Peers, as_error
from kvxferd.core.peers.remote_engine import RemoteEngine, manifest_bytes
from kvxferd.core.peers.requests import PeerRequests
from kvxferd.core.sink.held_grant import HeldGrant
from kvxferd.errors import Code, KvxferdError, PeerError
from kvxferd.ids import Endpoint, EngineId, EngineKey, GrantId
from kvxferd.plan import check_engine, digest_of_layouts
from kvxferd.records import HandshakeRecord
from kvxferd.wire.common import RankManifest, Refusal
from kvxferd.wire.peer import ManifestReply, ManifestRequest, ReplyMessage

# A node runs tens of engines at most; where ids are new at each start, the oldest are of dead ones.
MAX_ENGINES_PER_PEER = 64
# Refusals of a source that has waited for ranks as long as the request allowed.
WAIT_EXPIRED_CODES = frozenset({Code.ENGINE_INCOMPLETE, Code.ENGINE_UNKNOWN})


@dataclass(slots=True)
class EngineFetch:
    """An engine's manifest that is fetched, for all grants that wait for it."""

    peer: Peer
    key: EngineKey
    uid: int  # who asked first
    started_at: float
    deadline: float
    waiting: dict[GrantId, HeldGrant]
    known: list[RankManifest] = field(default_factory=list)  # of the pages that are here
    num_bytes: int = 0  # of these, charged until the engine is
    asked: int = 0  # the number of the last `ManifestRequest`


class HandshakeClient:
    """Learns remote engines from their homes. What it learnt is kept with the peer until that is silent."""

    def __init__(
        self, context: NodeContext, peers: Peers, peer_requests: PeerRequests, layout_cache: LayoutCache
    ) -> None:
        self._context = context
        self._peers = peers
        self._peer_requests = peer_requests
        self._layout_cache = layout_cache
        self._fetches: dict[tuple[Endpoint, EngineKey], EngineFetch] = {}
        self._learnt_bytes_share = context.ledger[REMOTE_ENGINE_BYTES]
        # An engine is acquired for the grant.
        self.on_learnt: Callable[[HeldGrant, RemoteEngine | Refusal], None] = lambda grant, outcome: None

    def learn_engine(self, grant: HeldGrant) -> None:
        """Fetch the manifest of a grant's engine; call `on_learnt` at once where it is known."""
        key, fetch = grant.ref.engine, self._fetches.get((grant.ref.endpoint, grant.ref.engine))
        try:
            peer = self._peers.admit(grant.ref.endpoint, grant.rank.uid)
        except KvxferdError as error:
            self.on_learnt(grant, Refusal.of(error))
            return
        if key in peer.engines:
            self.on_learnt(grant, peer.engines[key].acquire())
            return
        if fetch is not None and fetch.peer is peer:  # else what was asked of a former one fails in a moment
            fetch.waiting[grant.grant_id] = grant
        else:
            self._fetch_engine(peer, key, {grant.grant_id: grant})

    def asked_for(self, grant: HeldGrant) -> int:
        """Return the number of the request that the grant waits for; 0: it waits for none."""
        fetch = self._fetches.get((grant.ref.endpoint, grant.ref.engine))
        return fetch.asked if fetch is not None else 0

    def forget(self, grant: HeldGrant) -> None:
        """Have a grant wait no more: its pull has ended. The engine is learnt all the same."""
        if fetch := self._fetches.get((grant.ref.endpoint, grant.ref.engine)):
            fetch.waiting.pop(grant.grant_id, None)

    def _fetch_engine(self, peer: Peer, key: EngineKey, waiting: dict[GrantId, HeldGrant]) -> None:
        """Request the manifest, for all that wait for it, as long as one of them waits."""
        longest = max(waiting.values(), key=lambda grant: grant.learn_by)
        fetch = EngineFetch(peer, key, longest.rank.uid, self._context.now, longest.learn_by, waiting)
        self._fetches[peer.endpoint, key] = fetch
        self._request_page(fetch)

    def _request_page(self, fetch: EngineFetch) -> None:
        wait_s = fetch.deadline - fetch.started_at
        message = ManifestRequest(
            request=self._peer_requests.next_id(),
            engine_id=fetch.key.engine_id,
            generation=fetch.key.generation,
            wait_s=wait_s,
            pp_aware=self._context.settings.peer.pp_aware,
            num_known=len(fetch.known),
        )
        fetch.asked = message.request
        timeout_s = wait_s + self._context.settings.peer.silent_after_s
        self._peers.request(fetch.peer.endpoint, message, timeout_s, fetch.uid, fetch, waits=True)

    def answered(self, fetch: EngineFetch, reply: ReplyMessage) -> None:
        """Ask for the next page; or finish, with all ranks or with why they cannot be had."""
        outcome: RemoteEngine | Refusal
        try:
            if self._keep_page(fetch, reply):
                self._request_page(fetch)
                return
            outcome = self._parse_engine(fetch)
        except KvxferdError as error:
            outcome = Refusal.of(error)
        self._learnt_bytes_share.release(fetch.uid, fetch.num_bytes)
        place = (fetch.peer.endpoint, fetch.key)
        if self._fetches.get(place) is fetch:
            del self._fetches[place]
        if isinstance(outcome, RemoteEngine):
            outcome = self._charge_engine(fetch, outcome)
        elif outcome.code in WAIT_EXPIRED_CODES:
            self._fetch_for_longer_waits(fetch)
        self._finish_learning(fetch, outcome)

    def _keep_page(self, fetch: EngineFetch, reply: ReplyMessage) -> bool:
        """Keep the ranks of a reply; return whether there are more. Raises KvxferdError where it has none."""
        if not isinstance(reply, ManifestReply):
            raise as_error(reply)
        if not reply.ranks or any(manifest.spec.key != fetch.key for manifest in reply.ranks):
            text = f"cannot use the manifest of engine {fetch.key}: it is of another engine"
            raise PeerError(text, Code.BAD_FRAME)
        fetch.known.extend(reply.ranks)
        if len(fetch.known) >= reply.num_ranks:
            return False
        size = manifest_bytes(reply.ranks)
        self._learnt_bytes_share.check(fetch.uid, size, f"learn engine {fetch.key}")
        self._learnt_bytes_share.add(fetch.uid, size)
        fetch.num_bytes += size
        return True

    def _fetch_for_longer_waits(self, fetch: EngineFetch) -> None:
        """Request the manifest again for those with a longer wait, who wait for this one no more.

        One user's pull of half a second must not fail another's of ten seconds.
        """
        deadline = max(fetch.deadline, self._context.now)
        if later := {name: grant for name, grant in fetch.waiting.items() if grant.learn_by > deadline}:
            fetch.waiting = {name: grant for name, grant in fetch.waiting.items() if name not in later}
            self._fetch_engine(fetch.peer, fetch.key, later)

    def _charge_engine(self, fetch: EngineFetch, learnt: RemoteEngine) -> RemoteEngine | Refusal:
        """Charge the engine to the first waiting user with room, for as long as it is used.

        A user's engines that were learnt first are forgotten before; a pull that needs one learns it again.
        A first user without room must not cause a refusal to the others.
        """
        shares, size = self._learnt_bytes_share, learnt.num_bytes
        users = dict.fromkeys([*(grant.rank.uid for grant in fetch.waiting.values()), fetch.uid])
        for uid in users:
            if not shares.has_room(uid, size):
                self._forget_engines(uid, size)
            if shares.has_room(uid, size):
                learnt.charge(shares, uid)
                return learnt
        return Refusal.of(shares.refusal(next(iter(users)), f"learn engine {fetch.key}"))

    def _forget_engines(self, uid: int, size: int) -> None:
        for peer in self._peers:
            for key in [key for key, engine in peer.engines.items() if engine.uid == uid]:
                peer.forget_engine(key)
                if self._learnt_bytes_share.has_room(uid, size):
                    return

    def _parse_engine(self, fetch: EngineFetch) -> RemoteEngine:
        """Return the engine of the ranks that are here. Raises KvxferdError where it cannot be read."""
        spec = fetch.known[0].spec
        ranks, layouts = check_manifests(fetch.known, self._layout_cache)
        check_engine({rank: (m.spec, m.layout) for rank, m in ranks.items()})
        workers = ({rank: manifest} for rank, manifest in ranks.items())
        ranks = aggregate_metadata(workers, "this node", self._context.settings.peer.pp_aware)
        digest = digest_of_layouts({rank: checked.digest for rank, checked in layouts.items()})
        return RemoteEngine(spec, ranks, digest)

    def _finish_learning(self, fetch: EngineFetch, outcome: RemoteEngine | Refusal) -> None:
        peer, key = fetch.peer, fetch.key
        # A manifest that comes after the peer's silence may be a former daemon's: it serves those who waited.
        if isinstance(outcome, RemoteEngine) and peer.boot is not None:
            for old in [k for k in peer.engines if k.engine_id == key.engine_id]:
                peer.forget_engine(old)  # one generation at a time; a reader of the other fetches it again
            peer.engines[key] = outcome.acquire()
            if len(peer.engines) > MAX_ENGINES_PER_PEER:
                peer.forget_engine(next(iter(peer.engines)))
        self._context.emit(EmitRecord(self._record(fetch, outcome)))
        for grant in fetch.waiting.values():
            learnt = outcome.acquire() if isinstance(outcome, RemoteEngine) else outcome
            self._context.put_off(grant.rank.uid, partial(self.on_learnt, grant, learnt))
        if isinstance(outcome, RemoteEngine):
            outcome.release()  # its use since it was charged

    def _record(self, fetch: EngineFetch, outcome: RemoteEngine | Refusal) -> HandshakeRecord:
        refused = outcome if isinstance(outcome, Refusal) else None
        return HandshakeRecord(
            peer=fetch.peer.endpoint,
            engine_id=fetch.key.engine_id,
            outcome=refused.code if refused else "ok",
            message=refused.message if refused else "",
            num_ranks=len(outcome.ranks) if isinstance(outcome, RemoteEngine) else 0,
            elapsed_s=self._context.now - fetch.started_at,
        )

    def charges(self, holds: Iterable[HeldGrant]) -> Iterator[Charge]:
        """Yield what is counted for the fetches, and for the engines that are known or that grants read."""
        for fetch in self._fetches.values():
            yield REMOTE_ENGINE_BYTES, fetch.uid, fetch.num_bytes
        engines = {engine for peer in self._peers for engine in peer.engines.values()}
        engines.update(hold.remote for hold in holds if hold.remote is not None)
        for engine in engines:
            yield REMOTE_ENGINE_BYTES, engine.uid, engine.num_bytes

    def find_engine(self, engine_id: EngineId) -> RemoteEngine | None:
        """Return an engine with that id that some peer has; None: no peer has."""
        found = (e for peer in self._peers for e in peer.engines.values())
        return next((engine for engine in found if engine.spec.engine_id == engine_id), None)

    def forget_engine(self, endpoint: Endpoint, key: EngineKey) -> None:
        """Forget the engine: its manifest is out of date."""
        if peer := self._peers.get(endpoint):
            peer.forget_engine(key)
