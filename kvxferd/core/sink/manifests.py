"""The sink's side of a handshake: fetch each remote engine's manifest once, check it, and keep the engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import EmitRecord
from kvxferd.core.limits.checks import RETRY_LATER_S
from kvxferd.core.limits.fair_share import FairShare
from kvxferd.core.peers.handshake_metadata import aggregate_metadata
from kvxferd.core.peers.layout_cache import LayoutCache
from kvxferd.core.peers.manifest_checks import check_manifests
from kvxferd.core.peers.peers import EngineWaiter, OnLearnt, Peer, Peers, as_refusal
from kvxferd.core.peers.remote_engine import RemoteEngine
from kvxferd.errors import BusyError, Code, EngineError, KvxferdError, count_busy_refusal
from kvxferd.ids import Endpoint, EngineId, EngineKey
from kvxferd.plan import check_engine
from kvxferd.records import HandshakeRecord
from kvxferd.wire.common import RankManifest, Refusal
from kvxferd.wire.peer import ManifestReply, ManifestRequest, ReplyMessage, RequestMessage

# A node runs tens of engines at most; where ids are new at each start, the oldest are of dead ones.
MAX_ENGINES_PER_PEER = 64
# Engines that are being learnt, of all peers: a node's ranks read from tens. Each is a request of 2 KB that
# is open for up to 20 s, also when the pull of an invented reference is cancelled meanwhile.
MAX_LEARNING = 4096
# What is known of other nodes' engines. 64 ranks in 8 stages with 40 tensors, 40 regions and 1 KiB of
# metadata are 1 MiB: 448 such engines for a user who is alone. The largest manifest is counted for 16 to 60
# MiB; without a limit 64 of them at each of 448 peers were 450 GiB.
MAX_LEARNT_BYTES = 512 << 20

# Refusals of a source that has waited for ranks as long as the request allowed.
WAIT_EXPIRED_CODES = frozenset({Code.ENGINE_INCOMPLETE, Code.ENGINE_UNKNOWN})


class HandshakeClient:
    """Learns remote engines from their homes. What it learnt is kept with the peer until that is silent."""

    def __init__(self, context: NodeContext, peers: Peers, layout_cache: LayoutCache) -> None:
        self._context = context
        self._peers = peers
        self._layout_cache = layout_cache
        self._learning_share = FairShare(MAX_LEARNING)
        self._learnt_bytes_share = FairShare(MAX_LEARNT_BYTES)

    def learn_engine(
        self, endpoint: Endpoint, key: EngineKey, wait_s: float, on_learnt: OnLearnt, uid: int
    ) -> None:
        """Fetch an engine's manifest for that user; call `on_learnt` at once where it is known."""
        peer = self._peers.get(endpoint)
        try:
            if peer is None or (key not in peer.engines and key not in peer.learning):
                self._check_learning(key, uid)
            peer = self._peers.admit(endpoint, uid)
        except KvxferdError as error:
            on_learnt(Refusal.of(error))
            return
        if key in peer.engines:
            on_learnt(peer.engines[key])
            return
        learner = EngineWaiter(uid, self._context.now + wait_s, on_learnt)
        peer.learning.setdefault(key, []).append(learner)
        if len(peer.learning[key]) == 1:
            self._fetch_engine(peer, key, learner)

    def _check_learning(self, key: EngineKey, uid: int) -> None:
        if not self._learning_share.has_room(uid):
            raise BusyError(
                f"cannot learn engine {key}: {self._learning_share.held} others are being learnt, "
                f"{self._learning_share.held_by(uid)} of them for uid {uid}; try again in {RETRY_LATER_S:g} "
                "s",
                RETRY_LATER_S,
            )

    def _fetch_engine(self, peer: Peer, key: EngineKey, learner: EngineWaiter) -> None:
        """Request the manifest, for all that wait for it."""
        started, uid = self._context.now, learner.uid
        wait_s = learner.deadline - started
        self._learning_share.add(uid, 1)
        known: list[RankManifest] = []
        num_bytes = 0  # of these, charged until the engine is

        def make(request: int) -> RequestMessage:
            return ManifestRequest(
                request=request,
                engine_id=key.engine_id,
                generation=key.generation,
                wait_s=wait_s,
                pp_aware=self._context.settings.pp_aware,
                num_known=len(known),
            )

        def ask() -> None:
            timeout_s = wait_s + self._context.settings.silent_after_s
            self._peers.request(peer.endpoint, make, timeout_s, replied, uid, waits=True)

        def replied(reply: ReplyMessage) -> None:
            nonlocal num_bytes
            refusal: Refusal | None = None
            if isinstance(reply, ManifestReply):
                known.extend(reply.ranks)
                if reply.ranks and len(known) < reply.num_ranks:
                    size = RemoteEngine(known[0].spec, {m.rank: m for m in reply.ranks}).num_bytes
                    if self._learnt_bytes_share.acquire(uid, size):
                        num_bytes += size
                        ask()
                        return
                    refusal = self._no_room(key, size)
            self._learnt_bytes_share.release(uid, num_bytes)
            self._learning_share.release(uid)
            waiting = peer.learning.pop(key)
            outcome = refusal or self._charge_engine(
                self._parse_engine(key, known, reply), dict.fromkeys(w.uid for w in waiting)
            )
            if isinstance(outcome, Refusal) and outcome.code in WAIT_EXPIRED_CODES:
                waiting = self._fetch_for_longer_waits(peer, key, learner.deadline, waiting)
            self._finish_learning(peer, key, outcome, started, waiting)

        ask()

    def _fetch_for_longer_waits(
        self, peer: Peer, key: EngineKey, deadline: float, waiting: list[EngineWaiter]
    ) -> list[EngineWaiter]:
        """Request the manifest again for those with a longer wait; return the others.

        One user's pull of half a second must not fail another's of ten seconds.
        """
        deadline = max(deadline, self._context.now)
        if later := [learner for learner in waiting if learner.deadline > deadline]:
            peer.learning[key] = later
            self._fetch_engine(peer, key, max(later, key=lambda learner: learner.deadline))
        return [learner for learner in waiting if learner.deadline <= deadline]

    def _charge_engine(self, read: RemoteEngine | Refusal, users: Iterable[int]) -> RemoteEngine | Refusal:
        """Charge the engine to the first waiting user with room, for as long as anything refers to it.

        A user's engines that were learnt first are forgotten before; a pull that needs one learns it again.
        A first user without room must not cause a refusal to the others.
        """
        if isinstance(read, Refusal):
            return read
        shares, size = self._learnt_bytes_share, read.num_bytes
        for uid in users:
            if not shares.has_room(uid, size):
                self._forget_engines(uid, size)
            if shares.has_room(uid, size):
                kept = replace(read, uid=uid)
                shares.add(uid, size)
                weakref.finalize(kept, shares.release, uid, size).atexit = False
                return kept
        return self._no_room(read.spec.key, size)

    def _no_room(self, key: EngineKey, size: int) -> Refusal:
        """Count a refusal, and return it."""
        count_busy_refusal("remote_engine_bytes")
        share = self._learnt_bytes_share
        return Refusal(
            Code.BUSY,
            f"cannot learn engine {key}: {share.held} bytes of {share.limit} are taken by other nodes' "
            f"engines, and nobody who waits for this one has room for {size} more; try again in "
            f"{RETRY_LATER_S:g} s",
            RETRY_LATER_S,
        )

    def _forget_engines(self, uid: int, size: int) -> None:
        for peer in self._peers:
            for key in [key for key, engine in peer.engines.items() if engine.uid == uid]:
                del peer.engines[key]
                if self._learnt_bytes_share.has_room(uid, size):
                    return

    def _parse_engine(
        self, key: EngineKey, manifests: Sequence[RankManifest], reply: ReplyMessage
    ) -> RemoteEngine | Refusal:
        """Return the engine of these ranks, or why it cannot be read. The reply had the last of them."""
        if not isinstance(reply, ManifestReply):
            refused = as_refusal(reply)
            return Refusal(refused.code, refused.message, refused.retry_after_s)
        if not reply.ranks or any(manifest.spec.key != key for manifest in manifests):
            return Refusal(
                Code.BAD_FRAME, f"cannot use the manifest of engine {key}: it is of another engine"
            )
        try:
            ranks = check_manifests(manifests, self._layout_cache)
            check_engine({rank: (m.spec, m.layout) for rank, m in ranks.items()})
            if sorted(ranks) != manifests[0].spec.ranks():
                text = f"cannot use the manifest of engine {key}: {len(ranks)} of its ranks are in it"
                raise EngineError(text, Code.ENGINE_INCOMPLETE)
            workers = ({rank: manifest} for rank, manifest in ranks.items())
            ranks = aggregate_metadata(workers, "this node", self._context.settings.pp_aware)
        except KvxferdError as error:
            return Refusal.of(error)
        return RemoteEngine(manifests[0].spec, ranks)

    def _finish_learning(
        self,
        peer: Peer,
        key: EngineKey,
        outcome: RemoteEngine | Refusal,
        started: float,
        waiting: list[EngineWaiter],
    ) -> None:
        # A manifest that comes after the peer's silence may be a former daemon's: it serves those who waited.
        if isinstance(outcome, RemoteEngine) and peer.boot is not None:
            for old in [k for k in peer.engines if k.engine_id == key.engine_id]:
                del peer.engines[old]  # one generation at a time; a reader of the other fetches it again
            peer.engines[key] = outcome
            if len(peer.engines) > MAX_ENGINES_PER_PEER:
                del peer.engines[next(iter(peer.engines))]
        self._context.emit(EmitRecord(self._record(peer.endpoint, key, outcome, started)))
        self._context.run_in_batches(partial(learner.on_learnt, outcome) for learner in waiting)

    def _record(
        self, endpoint: Endpoint, key: EngineKey, outcome: RemoteEngine | Refusal, started: float
    ) -> HandshakeRecord:
        refused = outcome if isinstance(outcome, Refusal) else None
        return HandshakeRecord(
            endpoint=endpoint,
            engine_id=key.engine_id,
            outcome=refused.code if refused else "ok",
            message=refused.message if refused else "",
            num_ranks=len(outcome.ranks) if isinstance(outcome, RemoteEngine) else 0,
            elapsed_s=self._context.now - started,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where users are charged for other engines than those that are being learnt."""
        learning, charged = sum(len(peer.learning) for peer in self._peers), self._learning_share.held
        assert learning == charged, f"{learning} engines are being learnt, and {charged} charged"

    def find_engine(self, engine_id: EngineId) -> RemoteEngine | None:
        """Return an engine with that id that some peer has; None: no peer has."""
        found = (e for peer in self._peers for e in peer.engines.values())
        return next((engine for engine in found if engine.spec.engine_id == engine_id), None)

    def forget_engine(self, endpoint: Endpoint, key: EngineKey) -> None:
        """Forget the engine: its manifest is out of date."""
        if peer := self._peers.get(endpoint):
            peer.engines.pop(key, None)
