"""The other daemons, and the engines learnt from them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import msgspec

from kvxferd.core.effects import NOBODY, ForgetPeer, Observed
from kvxferd.core.layouts import Layouts
from kvxferd.core.limits import RETRY_AFTER_S, RETRY_LATER_S
from kvxferd.core.manifests import check_manifests
from kvxferd.core.moment import Moment
from kvxferd.core.questions import CHECK_PEER, OnAnswer, Questions
from kvxferd.core.shares import Shares
from kvxferd.core.snapshot import HandshakeRecord, PeerSnapshot, RemoteEngineSnapshot
from kvxferd.errors import BusyError, Code, EngineError, KvxferdError, ProtocolError
from kvxferd.ids import BootId, Endpoint, EngineId, EngineKey, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan import check_engine, require_pp_aware
from kvxferd.wire.common import BlockIds, RankManifest, Refusal
from kvxferd.wire.endpoint import address_of
from kvxferd.wire.ids_stream import IdsAssembly
from kvxferd.wire.limits import MAX_REQUEST_IDS_BYTES, MAX_SENTENCE_CHARS
from kvxferd.wire.peer import (
    PEER_VERSIONS,
    Answer,
    Done,
    EngineManifest,
    FetchEngine,
    Granted,
    GrantsRenewed,
    Greet,
    Greeting,
    PeerMessage,
    PeerRefused,
    Question,
    refusal_of,
)

# A node runs tens of engines at most; where ids are new at each start, the oldest are of dead ones.
MAX_ENGINES_PER_PEER = 64
# Engines that are being learnt, of all peers: a node's ranks read from tens. Each is a question of 2 KB that
# waits for up to 20 s, also when whoever made up the reference has cancelled the pull meanwhile.
MAX_LEARNING = 4096
# Questions that are not answered, of all peers and kinds, 2 KB each: 64 MiB. A source lets 8,192 asks of one
# peer wait, and no more than 32,768 (`limits.max_waiting`). 200 acknowledgements a second, whose source is
# dead for the 120 s in which they are asked again, are 24,000: one user's share is 28,672.
MAX_UNANSWERED = 32_768

# Refusals of a source that has waited for ranks as long as it was asked to.
PASSING = frozenset({Code.ENGINE_INCOMPLETE, Code.ENGINE_UNKNOWN})

# Block ids that arrive in parts, of all peers: sixteen of the largest lists at a time, by a user who asks
# the peer something; of one peer two. Without a limit 448 peers that never end a list held 128 MiB each.
MAX_ARRIVING_BYTES, MAX_ARRIVING_OF_ONE = 16 * MAX_REQUEST_IDS_BYTES, 2 * MAX_REQUEST_IDS_BYTES
# What is known of other nodes' engines. 64 ranks in 8 stages with 40 tensors, 40 regions and 1 KiB of
# metadata are 1 MiB: 448 such engines for a user who is alone. The largest manifest is counted for 16 to 60
# MiB; without a limit 64 of them at each of 448 peers were 450 GiB.
MAX_LEARNT_BYTES = 512 << 20
# Of each rank, region, stretch of a region, and tensor (of equal layouts, one is counted): estimates.
RANK_BYTES, REGION_BYTES, PIECE_BYTES, TENSOR_BYTES = 2048, 256, 128, 384


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class RemoteEngine:
    """A whole remote engine, every rank of every stage."""

    spec: EngineSpec
    ranks: dict[Rank, RankManifest]
    uid: int = NOBODY  # of whoever it was learnt for: its share

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory. Layouts that it shares with other engines count for each."""
        bindings = [manifest.binding for manifest in self.ranks.values()]
        regions = [region for binding in bindings for region in binding.regions]
        layouts = {id(manifest.layout): manifest.layout for manifest in self.ranks.values()}
        return (
            sum(RANK_BYTES + len(binding.metadata) for binding in bindings)
            + REGION_BYTES * len(regions)
            + PIECE_BYTES * sum(len(region.pieces) for region in regions)
            + TENSOR_BYTES * sum(len(layout.tensors) for layout in layouts.values())
        )

    def layouts(self) -> dict[Rank, RankLayout]:
        """What the planner needs."""
        return {rank: manifest.layout for rank, manifest in self.ranks.items()}


OnLearnt = Callable[[RemoteEngine | Refusal], None]
Ask = Callable[[int], Question]


class Learner(NamedTuple):
    """Somebody who waits for an engine, and no longer than that for its missing ranks."""

    uid: int
    until: float
    on_learnt: OnLearnt


@dataclass(slots=True)
class Peer:
    """One daemon, named by its endpoint. All that is known of it goes when it falls silent."""

    endpoint: Endpoint
    uid: int  # of whoever named it first: its share of the peers
    users: set[int] = field(default_factory=set)  # all for whom something was asked there
    boot: BootId | None = None  # None: not greeted yet
    heard_at: float | None = None  # when it last sent something
    version: int = 1  # of the peer protocol, once greeted
    waiting: list[tuple[Ask, float, OnAnswer]] = field(default_factory=list)  # for the greeting
    engines: dict[EngineKey, RemoteEngine] = field(default_factory=dict)
    learning: dict[EngineKey, list[Learner]] = field(default_factory=dict)
    assembly: IdsAssembly = field(default_factory=IdsAssembly)
    asking: Counter[int] = field(default_factory=Counter)  # questions that are not answered, by user
    arriving: Counter[int] = field(default_factory=Counter)  # bytes of the assembly, by whose share they have


class Peers:
    """Greets each peer once, learns each engine once, and asks whatever else is to be asked."""

    def __init__(self, moment: Moment, questions: Questions, layouts: Layouts) -> None:
        self._moment = moment
        self._questions = questions
        self._peers: dict[Endpoint, Peer] = {}
        self._layouts = layouts
        self._share = Shares(moment.settings.limits.max_peers)
        self._learning = Shares(MAX_LEARNING)
        self._unanswered = Shares(MAX_UNANSWERED)
        self._learnt_bytes = Shares(MAX_LEARNT_BYTES)
        self._arriving = Shares(MAX_ARRIVING_BYTES)
        self._keepers: list[Callable[[], Collection[Endpoint]]] = []

    def keep(self, needed: Callable[[], Collection[Endpoint]]) -> None:
        """Let no other peer have the place of one that is needed, though nothing is asked there now."""
        self._keepers.append(needed)

    # --- asking anything

    def ask(self, endpoint: Endpoint, make: Ask, give_up_s: float, on_answer: OnAnswer, uid: int) -> None:
        """Ask a peer for that user, after greeting it. `make` gets the request number."""
        try:
            self._check_unanswered(endpoint, uid)
            peer = self._admitted(endpoint, uid)
        except KvxferdError as error:
            on_answer(refusal_of(0, error))
            return
        self._unanswered.add(uid, 1)
        peer.asking[uid] += 1

        def answered(answer: Answer) -> None:
            self._unanswered.give_back(uid)
            peer.asking[uid] -= 1
            if not peer.asking[uid]:
                del peer.asking[uid]
            on_answer(answer)
            self._forget_if_unused(peer)

        if peer.boot is not None:
            self._ask(peer, make, give_up_s, answered)
            return
        peer.waiting.append((make, give_up_s, answered))
        if len(peer.waiting) == 1:
            self._greet(peer)

    def version_of(self, endpoint: Endpoint) -> int:
        """Return the protocol version that the peer speaks; 1 before it has answered the greeting."""
        peer = self._peers.get(endpoint)
        return peer.version if peer is not None else 1

    def _check_unanswered(self, endpoint: Endpoint, uid: int) -> None:
        """A user's pulls that are asked for and cancelled leave questions: they must not pile up."""
        if not self._unanswered.has_room(uid):
            raise BusyError(
                f"cannot ask {endpoint}: {self._unanswered.held} questions to peers are not answered, "
                f"{self._unanswered.held_by(uid)} of them for uid {uid}; try again in {RETRY_AFTER_S:g} s",
                RETRY_AFTER_S,
            )

    # --- whom to know

    def _admitted(self, endpoint: Endpoint, uid: int) -> Peer:
        """The peer, for that user; in another's place where there is no room. Raises KvxferdError.

        A reference may name any endpoint: one user's must not take the peers of all.
        """
        peer, evicted = self._peers.get(endpoint), None
        if peer is None:
            if endpoint != self._moment.endpoint:
                self._moment.trust.check(endpoint)  # the allow-lists may have changed since it was named
            if not self._share.has_room(uid):
                evicted = self._evictable(endpoint, uid)
                self._forget(evicted)
            peer = self._new_peer(endpoint, uid)
        peer.users.add(uid)
        self._peers.pop(endpoint, None)
        self._peers[endpoint] = peer  # the longest unused first
        self._forget_later(peer)
        if evicted is not None:  # now that its place is taken: whoever waits may ask at once again
            text = f"cannot wait for {evicted.endpoint}: another peer takes the place of one that is silent"
            self._questions.fail_all(evicted.endpoint, BusyError(text, RETRY_LATER_S))
        return peer

    def _new_peer(self, endpoint: Endpoint, uid: int) -> Peer:
        peer = Peer(endpoint, uid)
        self._share.add(uid, 1)

        def reserve(num_bytes: int) -> bool:
            if num_bytes <= 0:
                self._give_back_arriving(peer, -num_bytes)
                return True
            if peer.assembly.num_bytes + num_bytes > MAX_ARRIVING_OF_ONE:
                return False
            # It is not known whose a part is. Who has no room must not be the end of another's grant.
            for user in peer.asking:
                if self._arriving.take(user, num_bytes):
                    peer.arriving[user] += num_bytes
                    return True
            return False

        peer.assembly = IdsAssembly(reserve, may_lose_parts=True)
        return peer

    def _give_back_arriving(self, peer: Peer, num_bytes: int) -> None:
        for user, held in list(peer.arriving.items()):
            over = min(held, num_bytes)
            self._arriving.give_back(user, over)
            peer.arriving[user] -= over
            num_bytes -= over
            if not peer.arriving[user]:
                del peer.arriving[user]

    def _evictable(self, endpoint: Endpoint, uid: int) -> Peer:
        """The peer that is to make room: of whoever has most, one that is idle, or has never answered.

        One that answers and is asked something stays: to lose it would fail its user's pulls.
        """
        after = self._share.held_by(uid) + 1
        needed = [keeper() for keeper in self._keepers]
        found: Peer | None = None
        best = (0, False)
        for peer in self._peers.values():
            num, is_own = self._share.held_by(peer.uid), peer.uid == uid
            if (num <= after and not is_own) or any(peer.endpoint in endpoints for endpoints in needed):
                continue
            is_idle = not self._is_used(peer)
            is_unproved = peer.boot is None and not is_own and peer.users == {peer.uid}
            if (is_idle or is_unproved) and (num, is_idle) > best:
                found, best = peer, (num, is_idle)
        if found is None:
            raise BusyError(
                f"cannot reach {endpoint}: {self._share.held} peers are known already, "
                f"{self._share.held_by(uid)} of them through uid {uid}, and limits.max_peers = "
                f"{self._share.limit}; try again in {RETRY_LATER_S:g} s",
                RETRY_LATER_S,
            )
        return found

    def _check_learning(self, key: EngineKey, uid: int) -> None:
        if not self._learning.has_room(uid):
            raise BusyError(
                f"cannot learn engine {key}: {self._learning.held} others are being learnt, "
                f"{self._learning.held_by(uid)} of them for uid {uid}; try again in {RETRY_LATER_S:g} s",
                RETRY_LATER_S,
            )

    def _forget_later(self, peer: Peer) -> None:
        """A peer that nothing was asked of for long is forgotten: nodes come and go, addresses change."""
        self._moment.after(
            ("idle-peer", peer.endpoint), self._moment.settings.tombstone_s, lambda: self._idle(peer)
        )

    def _idle(self, peer: Peer) -> None:
        if self._is_used(peer) or any(peer.endpoint in keeper() for keeper in self._keepers):
            self._forget_later(peer)
        else:
            self._forget(peer)

    def _is_used(self, peer: Peer) -> bool:
        return bool(peer.waiting) or self._questions.are_open(peer.endpoint)

    def _ask(self, peer: Peer, make: Ask, give_up_s: float, on_answer: OnAnswer) -> None:
        def answered(answer: Answer) -> None:
            if isinstance(answer, PeerRefused) and answer.code is Code.PEER_UNREACHABLE:
                self._silent(peer)
            on_answer(answer)

        number = self._questions.next_number()
        self._questions.ask(peer.endpoint, make(number), give_up_s, answered, uid=peer.uid)

    def _greet(self, peer: Peer) -> None:
        question = Greet(
            request=self._questions.next_number(),
            versions=PEER_VERSIONS,
            boot=self._moment.boot,
            endpoint=self._moment.endpoint,
        )

        def answered(answer: Answer) -> None:
            waiting, peer.waiting = peer.waiting, []
            if isinstance(answer, Greeting) and _is_spoken(answer.version):
                peer.boot, peer.version = answer.boot, answer.version
                self._moment.in_turns(partial(self._ask_as_known, peer, *wanted) for wanted in waiting)
                return
            self._silent(peer)
            refused = _as_refusal(answer)
            self._moment.in_turns(partial(on_answer, refused) for _, _, on_answer in waiting)

        give_up_s = self._moment.settings.silent_after_s
        self._questions.ask(peer.endpoint, question, give_up_s, answered, uid=peer.uid)

    def _ask_as_known(self, peer: Peer, make: Ask, give_up_s: float, on_answer: OnAnswer) -> None:
        """Ask what waited for the greeting, unless the peer has fallen silent or was forgotten since."""
        if self._peers.get(peer.endpoint) is peer and peer.boot is not None:
            self._ask(peer, make, give_up_s, on_answer)
            return
        text = f"cannot reach {peer.endpoint}: it answered the greeting, and nothing since; {CHECK_PEER}"
        on_answer(PeerRefused(request=0, code=Code.PEER_UNREACHABLE, message=text))

    def _silent(self, peer: Peer) -> None:
        """What it comes back as may be another daemon: nothing known of it holds.

        While other questions are asked there again and again it keeps its place: they connect anew.
        """
        if self._peers.get(peer.endpoint) is not peer:
            return
        peer.boot, peer.version = None, 1
        peer.assembly.clear()
        peer.engines.clear()
        if self._is_used(peer):
            self._moment.do(ForgetPeer(peer.endpoint))
        else:
            self._forget(peer)

    def _forget_if_unused(self, peer: Peer) -> None:
        """The last question to a silent peer has ended."""
        if peer.boot is None and self._peers.get(peer.endpoint) is peer and not self._is_used(peer):
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.endpoint]
        self._share.give_back(peer.uid)
        peer.assembly.clear()
        self._moment.timers.stop(("idle-peer", peer.endpoint))
        self._moment.do(ForgetPeer(peer.endpoint))

    # --- hearing

    def said(self, endpoint: Endpoint, message: PeerMessage) -> None:
        """A message on the connection to a peer. Raises ProtocolError for one that is out of place."""
        peer = self._peers.get(endpoint)
        if peer is None:
            return  # forgotten, and this was on its way: nothing is asked there
        peer.heard_at = self._moment.now
        match message:
            case BlockIds():
                if self._questions.are_open(endpoint):  # else they are nobody's
                    peer.assembly.add(message)
            case Granted():
                # Put together before it is known whether anybody waits: a duplicate's parts go too.
                self._questions.answered(endpoint, _completed(peer, message))
            case PeerRefused():
                clipped = message.message[:MAX_SENTENCE_CHARS]
                self._questions.answered(endpoint, msgspec.structs.replace(message, message=clipped))
            case Greeting() | EngineManifest() | GrantsRenewed() | Done():
                self._questions.answered(endpoint, message)
            case _:
                raise ProtocolError(f"cannot take a {type(message).__name__} as an answer", Code.OUT_OF_PLACE)

    def broke_protocol(self, endpoint: Endpoint, error: ProtocolError) -> None:
        """What the peer sends is not to be trusted: its connection is closed, its questions fail."""
        if peer := self._peers.get(endpoint):
            self._silent(peer)
        self._questions.fail_all(endpoint, error)

    def unreachable(self, endpoint: Endpoint, reason: str) -> None:
        """No connection can be made: what waits for an answer fails."""
        if peer := self._peers.get(endpoint):
            self._silent(peer)
        error = KvxferdError(f"cannot reach {address_of(endpoint)}: {reason}", Code.PEER_UNREACHABLE)
        self._questions.fail_all(endpoint, error)

    def silent_s(self, endpoint: Endpoint, since: float) -> float:
        """For how long nothing has come from the peer; `since`: when something was first asked of it."""
        peer = self._peers.get(endpoint)
        heard_at = peer.heard_at if peer is not None else None
        return self._moment.now - max(since, heard_at or 0.0)

    def named(self, endpoint: str) -> list[Endpoint]:
        """The known peers of that endpoint; one given without a key means each key there."""
        return [peer for peer in self._peers if endpoint in (peer, address_of(peer))]

    def endpoints(self) -> set[Endpoint]:
        """Those that are known."""
        return set(self._peers)

    def drop(self, endpoint: Endpoint) -> None:
        """Forget the peer: what waits for its answer fails, and whoever needs it next greets it anew.

        A pull that has its grant goes on: its reads need no daemon, and the fence word decides.
        """
        peer = self._peers.get(endpoint)
        if peer is None:
            return
        self._silent(peer)
        dropped = KvxferdError(f"cannot wait for {endpoint}: an operator dropped that peer", Code.CANCELLED)
        self._questions.fail_all(endpoint, dropped)

    def trust_changed(self) -> None:
        """Forget the peers that the allow-lists admit no more, as `drop` does."""
        for peer in list(self._peers.values()):
            try:
                if peer.endpoint != self._moment.endpoint:
                    self._moment.trust.check(peer.endpoint)
            except KvxferdError as error:
                self._silent(peer)
                self._questions.fail_all(peer.endpoint, error)

    # --- learning engines

    def learn(self, endpoint: Endpoint, key: EngineKey, wait_s: float, on_learnt: OnLearnt, uid: int) -> None:
        """Find out about an engine for that user; at once where it is known."""
        peer = self._peers.get(endpoint)
        try:
            if peer is None or (key not in peer.engines and key not in peer.learning):
                self._check_learning(key, uid)
            peer = self._admitted(endpoint, uid)
        except KvxferdError as error:
            on_learnt(Refusal(error.code, error.message, error.retry_after_s))
            return
        if key in peer.engines:
            on_learnt(peer.engines[key])
            return
        learner = Learner(uid, self._moment.now + wait_s, on_learnt)
        peer.learning.setdefault(key, []).append(learner)
        if len(peer.learning[key]) == 1:
            self._fetch(peer, key, learner)

    def _fetch(self, peer: Peer, key: EngineKey, learner: Learner) -> None:
        """Ask for the engine, for all who wait for it."""
        started, uid = self._moment.now, learner.uid
        wait_s = learner.until - started
        self._learning.add(uid, 1)

        def make(request: int) -> Question:
            return FetchEngine(
                request=request,
                engine_id=key.engine_id,
                generation=key.generation,
                wait_s=wait_s,
                pp_aware=self._moment.settings.pp_aware,
            )

        def answered(answer: Answer) -> None:
            self._learning.give_back(uid)
            waiting = peer.learning.pop(key)
            outcome = self._kept(self._read(key, answer), dict.fromkeys(w.uid for w in waiting))
            if isinstance(outcome, Refusal) and outcome.code in PASSING:
                waiting = self._refused(peer, key, learner.until, waiting)
            self._learnt(peer, key, outcome, started, waiting)

        self.ask(peer.endpoint, make, wait_s + self._moment.settings.silent_after_s, answered, uid)

    def _refused(self, peer: Peer, key: EngineKey, until: float, waiting: list[Learner]) -> list[Learner]:
        """Ask again for those who wait longer than was asked to; return the others.

        One user's pull of half a second must not be the end of another's of ten.
        """
        until = max(until, self._moment.now)
        if later := [learner for learner in waiting if learner.until > until]:
            peer.learning[key] = later
            self._fetch(peer, key, max(later, key=lambda learner: learner.until))
        return [learner for learner in waiting if learner.until <= until]

    def _kept(self, read: RemoteEngine | Refusal, users: Iterable[int]) -> RemoteEngine | Refusal:
        """Count the engine for as long as anybody holds it, for the first who waits for it and has room.

        Of each user the ones that were learnt first are forgotten before: who wants one has it learnt again.
        The one who asked first must not have it refused to the others.
        """
        if isinstance(read, Refusal):
            return read
        shares, size = self._learnt_bytes, read.num_bytes
        for uid in users:
            if not shares.has_room(uid, size):
                self._forget_engines(uid, size)
            if shares.has_room(uid, size):
                kept = replace(read, uid=uid)
                shares.add(uid, size)
                weakref.finalize(kept, shares.give_back, uid, size).atexit = False
                return kept
        return Refusal(
            Code.BUSY,
            f"cannot learn engine {read.spec.key}: {shares.held} bytes of {shares.limit} are taken by other "
            f"nodes' engines, and nobody who waits for this one has room for {size} more; "
            f"try again in {RETRY_LATER_S:g} s",
            RETRY_LATER_S,
        )

    def _forget_engines(self, uid: int, size: int) -> None:
        for peer in self._peers.values():
            for key in [key for key, engine in peer.engines.items() if engine.uid == uid]:
                del peer.engines[key]
                if self._learnt_bytes.has_room(uid, size):
                    return

    def _read(self, key: EngineKey, answer: Answer) -> RemoteEngine | Refusal:
        """Turn the answer into an engine, if it is one that can be read."""
        if not isinstance(answer, EngineManifest):
            refused = _as_refusal(answer)
            return Refusal(refused.code, refused.message, refused.retry_after_s)
        if not answer.ranks or any(manifest.spec.key != key for manifest in answer.ranks):
            return Refusal(
                Code.BAD_FRAME, f"cannot use the manifest of engine {key}: it is of another engine"
            )
        try:
            ranks = check_manifests(answer.ranks, self._layouts)
            check_engine({rank: (m.spec, m.layout) for rank, m in ranks.items()})
            if sorted(ranks) != answer.ranks[0].spec.ranks():
                text = f"cannot use the manifest of engine {key}: {len(ranks)} of its ranks are in it"
                raise EngineError(text, Code.ENGINE_INCOMPLETE)
            if not self._moment.settings.pp_aware:
                require_pp_aware(ranks, "this node")
        except KvxferdError as error:
            return Refusal(error.code, error.message)
        return RemoteEngine(answer.ranks[0].spec, ranks)

    def _learnt(
        self,
        peer: Peer,
        key: EngineKey,
        outcome: RemoteEngine | Refusal,
        started: float,
        waiting: list[Learner],
    ) -> None:
        if isinstance(outcome, RemoteEngine):
            for old in [k for k in peer.engines if k.engine_id == key.engine_id]:
                del peer.engines[old]  # one generation at a time; a reader of the other asks again
            peer.engines[key] = outcome
            if len(peer.engines) > MAX_ENGINES_PER_PEER:
                del peer.engines[next(iter(peer.engines))]
        self._moment.do(Observed(self._record(peer.endpoint, key, outcome, started)))
        self._moment.in_turns(partial(learner.on_learnt, outcome) for learner in waiting)

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
            elapsed_s=self._moment.now - started,
        )

    def learnt(self, engine_id: EngineId) -> RemoteEngine | None:
        """Return an engine of that name that some peer told of."""
        found = (e for peer in self._peers.values() for e in peer.engines.values())
        return next((engine for engine in found if engine.spec.engine_id == engine_id), None)

    def forget_engine(self, endpoint: Endpoint, key: EngineKey) -> None:
        """What is known of the engine is out of date."""
        if peer := self._peers.get(endpoint):
            peer.engines.pop(key, None)

    # --- showing

    def snapshot(self, num_grants: dict[Endpoint, int]) -> tuple[PeerSnapshot, ...]:
        """Other daemons, for people. Ranks of one node read each other too, and ask their own daemon."""
        return tuple(
            PeerSnapshot(
                endpoint=peer.endpoint,
                boot=peer.boot,
                state="up" if peer.boot else "greeting",
                engines=tuple(
                    RemoteEngineSnapshot(
                        engine_id=key.engine_id, generation=key.generation, num_ranks=len(engine.ranks)
                    )
                    for key, engine in peer.engines.items()
                ),
                num_grants=num_grants.get(peer.endpoint, 0),
            )
            for peer in self._peers.values()
            if peer.endpoint != self._moment.endpoint
        )


def _completed(peer: Peer, granted: Granted) -> Answer:
    """The grant with all its block ids; a refusal where there was no room. It ends with its lease then."""
    try:
        blocks = peer.assembly.complete(granted.blocks, granted.stream)
    except BusyError as error:
        return refusal_of(granted.request, error)
    return msgspec.structs.replace(granted, blocks=blocks)


def _is_spoken(version: int) -> bool:
    return PEER_VERSIONS.oldest <= version <= PEER_VERSIONS.newest


def _as_refusal(answer: Answer) -> PeerRefused:
    """An answer of the wrong kind is a refusal too."""
    if isinstance(answer, PeerRefused):
        return answer
    if isinstance(answer, Greeting):
        return PeerRefused(
            request=answer.request,
            code=Code.BAD_VERSION,
            message=f"cannot speak with the peer: it chose protocol version {answer.version}, "
            f"not one of {PEER_VERSIONS.oldest} to {PEER_VERSIONS.newest}; upgrade the older",
        )
    return PeerRefused(
        request=answer.request,
        code=Code.BAD_FRAME,
        message=f"cannot use the peer's answer: it is a {type(answer).__name__}",
    )
