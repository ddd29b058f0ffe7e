"""The source's side of a handshake: reply with an engine's manifest once the engine is complete."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import ReplyToPeer
from kvxferd.core.limits import check_waiting
from kvxferd.core.registry import LocalEngine, Registry
from kvxferd.core.tables import decrease, discard
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import EngineId, EngineKey
from kvxferd.plan import require_pp_aware
from kvxferd.wire.limits import MAX_NAME_CHARS
from kvxferd.wire.peer import EngineManifest, FetchEngine, PeerRefused, refusal_of

# As in `grant_server`: the requests that one change considers in one turn of the loop.
FETCHES_PER_TURN, NEXT_TURN_S = 256, 0.001

FetchKey = tuple[bytes, int]  # route and number


@dataclass(slots=True)
class _PendingFetch:
    """A request for an engine's manifest that has no reply yet."""

    peer_id: str  # the peer's key, or its route
    route: bytes
    message: FetchEngine
    requested_at: float


class HandshakeServer:
    """Replies to each fetch when its engine is complete, or when it has waited long enough."""

    def __init__(self, context: NodeContext, registry: Registry) -> None:
        self._context = context
        self._registry = registry
        self._pending: dict[FetchKey, _PendingFetch] = {}
        self._pending_by_engine: dict[EngineId, dict[FetchKey, None]] = {}
        self._num_pending_of_peer: Counter[str] = Counter()
        self._due: dict[FetchKey, None] = {}  # to be considered in the next turns

    def fetch(self, route: bytes, message: FetchEngine, key: str = "") -> None:
        """Reply now or later. A repeated request changes nothing."""
        name, peer_id = (route, message.request), key or route.hex()
        if name not in self._pending:
            try:
                _check_names(message)
                of_peer = self._num_pending_of_peer[peer_id]
                check_waiting(of_peer, len(self._pending), self._context.settings.limits)
            except KvxferdError as error:
                self._context.emit(ReplyToPeer(route, refusal_of(message.request, error)))
                return
            self._pending[name] = _PendingFetch(peer_id, route, message, self._context.now)
            self._pending_by_engine.setdefault(EngineId(message.engine_id), {})[name] = None
            self._num_pending_of_peer[peer_id] += 1
        self._consider(self._pending[name])

    def reconsider(self, engine_id: EngineId) -> None:
        """Consider the engine's requests again: a rank of it has come."""
        concerned = self._pending_by_engine.get(engine_id, {})
        first = list(islice(concerned, FETCHES_PER_TURN))
        if len(concerned) > len(first):
            self._due.update(concerned)
        for name in first:
            self._due.pop(name, None)
            self._consider(self._pending[name])
        self._schedule_rest()

    def _schedule_rest(self) -> None:
        if self._due and "fetches-due" not in self._context.timers:
            self._context.after("fetches-due", NEXT_TURN_S, self._reconsider_rest)

    def _reconsider_rest(self) -> None:
        for name in list(islice(self._due, FETCHES_PER_TURN)):
            del self._due[name]
            self._consider(self._pending[name])
        self._schedule_rest()

    def _remove(self, name: FetchKey) -> None:
        fetch = self._pending.pop(name)
        self._due.pop(name, None)
        discard(self._pending_by_engine, EngineId(fetch.message.engine_id), name)
        decrease(self._num_pending_of_peer, fetch.peer_id)
        self._context.timers.cancel(("fetch", *name))

    def _consider(self, fetch: _PendingFetch) -> None:
        message = fetch.message
        key = EngineKey(message.engine_id, message.generation)
        engine = self._registry.get(key)
        obstacle = self._obstacle(key, engine, message)
        name = (fetch.route, message.request)
        if obstacle is not None:
            left_s = fetch.requested_at + obstacle[1] - self._context.now
            if left_s > 0:
                self._context.after(("fetch", *name), left_s, lambda: self._consider(fetch))
                return
        self._remove(name)
        if obstacle is not None:
            refused = PeerRefused(request=message.request, code=obstacle[0].code, message=obstacle[0].message)
            self._context.emit(ReplyToPeer(fetch.route, refused))
            return
        assert engine is not None
        manifest = EngineManifest(
            request=message.request, boot=self._context.boot, ranks=self._registry.manifest(engine)
        )
        self._context.emit(ReplyToPeer(fetch.route, manifest))

    def _obstacle(
        self, key: EngineKey, engine: LocalEngine | None, message: FetchEngine
    ) -> tuple[KvxferdError, float] | None:
        """Return why the manifest cannot be sent now, and for how long the request may wait."""
        settings = self._context.settings
        what = f"cannot hand out engine {key}"
        if self._registry.is_superseded(key):
            text = f"{what}: it has been replaced by {self._registry.newest(key.engine_id)}; route anew"
            return KvxferdError(text, Code.GENERATION_STALE), 0.0
        if engine is None:
            text = f"{what}: no rank of it is registered at {self._context.endpoint}; check id and endpoint"
            return KvxferdError(text, Code.ENGINE_UNKNOWN), min(message.wait_s, settings.unknown_wait_s)
        if not self._registry.is_home(engine.spec):
            text = f"{what}: it is aggregated at its home, {engine.spec.home}; ask there"
            return KvxferdError(text, Code.NOT_HOME), 0.0
        if not message.pp_aware:
            try:
                require_pp_aware(engine.spec.ranks(), "the asking node")
            except KvxferdError as error:
                return error, 0.0
        if lacking := engine.missing():
            ranks = ", ".join(map(str, lacking))
            text = f"{what}: {len(lacking)} of its {len(engine.spec.ranks())} ranks are not there: {ranks}"
            return KvxferdError(text, Code.ENGINE_INCOMPLETE), min(message.wait_s, settings.handshake_wait_s)
        return None


def _check_names(message: FetchEngine) -> None:
    """Raise EngineError for a name that is too long: a fetch waits for seconds, and is kept as long."""

    longest = max(len(message.engine_id), len(message.generation))
    if longest > MAX_NAME_CHARS:
        raise EngineError(
            f"cannot hand out an engine with a name of {longest} characters; {MAX_NAME_CHARS} is the limit",
            Code.BAD_FRAME,
        )
