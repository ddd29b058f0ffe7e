"""The source's side of a handshake: reply with an engine's manifest once the engine is complete."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import ReplyToPeer
from kvxferd.core.ranks.registry import LocalEngine, Registry
from kvxferd.core.source.parked_requests import ParkedRequests
from kvxferd.core.tables import discard
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import EngineId, EngineKey
from kvxferd.plan import require_pp_aware
from kvxferd.wire.codec import encode
from kvxferd.wire.common import RankManifest
from kvxferd.wire.limits import MAX_NAME_CHARS
from kvxferd.wire.peer import ManifestReply, ManifestRequest, PeerRefused, refusal_of

FetchKey = tuple[bytes, int]  # route and number
READER = "the requesting node"  # as refusals name it
# Of whole ranks in one reply. 64 ranks of 40 tensors are 450 KiB; the largest rank takes 3 MiB.
MAX_PAGE_BYTES = 4 << 20


@dataclass(slots=True)
class _PendingFetch:
    """A request for an engine's manifest that has no reply yet."""

    peer_id: str  # the peer's key, or its route
    route: bytes
    message: ManifestRequest
    requested_at: float
    why: str = ""  # it waits


class HandshakeServer(ParkedRequests[FetchKey, _PendingFetch]):
    """Replies to each fetch when its engine is complete, or when it has waited long enough."""

    def __init__(self, context: NodeContext, registry: Registry) -> None:
        super().__init__(context, "fetches-due")
        self._registry = registry

    def fetch(self, route: bytes, message: ManifestRequest, key: str = "") -> None:
        """Reply now or later. A repeated request changes nothing."""
        name, peer_id = (route, message.request), key or route.hex()
        is_repeated = name in self._pending
        if is_repeated:
            self._note_sent(name)
        else:
            try:
                _check_names(message)
                self._check_waiting(peer_id)
            except KvxferdError as error:
                self._context.emit(ReplyToPeer(route, refusal_of(message.request, error)))
                return
            self._park(name, _PendingFetch(peer_id, route, message, self._context.now), peer_id)
            self._pending_by_engine.setdefault(EngineId(message.engine_id), {})[name] = None
        self._consider(self._pending[name])
        if is_repeated:
            self._reply_still_waiting(name, route, message.request)

    def _remove(self, name: FetchKey) -> None:
        fetch = self._pending[name]
        self._unpark(name, fetch.peer_id)
        discard(self._pending_by_engine, EngineId(fetch.message.engine_id), name)
        self._context.timers.cancel(("fetch", *name))

    def _consider(self, fetch: _PendingFetch) -> None:
        message = fetch.message
        key = EngineKey(message.engine_id, message.generation)
        engine = self._registry.get(key)
        obstacle = self._obstacle(key, engine, message)
        name = (fetch.route, message.request)
        if obstacle is not None and self._is_given_up(name):
            self._remove(name)
            return
        if obstacle is not None:
            left_s = fetch.requested_at + obstacle[1] - self._context.now
            if left_s > 0:
                fetch.why = obstacle[0].message
                self._look_again(("fetch", *name), name, left_s, lambda: self._consider(fetch))
                return
        self._remove(name)
        if obstacle is not None:
            refused = PeerRefused(request=message.request, code=obstacle[0].code, message=obstacle[0].message)
            self._context.emit(ReplyToPeer(fetch.route, refused))
            return
        assert engine is not None
        ranks = self._registry.manifest(engine, READER, message.pp_aware)
        manifest = ManifestReply(
            request=message.request,
            boot=self._context.boot,
            ranks=_page(ranks[max(0, message.num_known) :]),
            num_ranks=len(ranks),
        )
        self._context.emit(ReplyToPeer(fetch.route, manifest))

    def _obstacle(
        self, key: EngineKey, engine: LocalEngine | None, message: ManifestRequest
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
                require_pp_aware(engine.spec.ranks(), READER)
            except KvxferdError as error:
                return error, 0.0
        if lacking := engine.missing():
            ranks = ", ".join(map(str, lacking))
            text = f"{what}: {len(lacking)} of its {len(engine.spec.ranks())} ranks are not there: {ranks}"
            return KvxferdError(text, Code.ENGINE_INCOMPLETE), min(message.wait_s, settings.handshake_wait_s)
        return None


def _page(ranks: tuple[RankManifest, ...]) -> tuple[RankManifest, ...]:
    """Return the first ranks, as many as a reply has."""
    num_bytes = 0
    for number, rank in enumerate(ranks):
        num_bytes += len(encode(rank))
        if number and num_bytes > MAX_PAGE_BYTES:
            return ranks[:number]
    return ranks


def _check_names(message: ManifestRequest) -> None:
    """Raise EngineError for a name that is too long: a fetch waits for seconds, and is kept as long."""

    longest = max(len(message.engine_id), len(message.generation))
    if longest > MAX_NAME_CHARS:
        raise EngineError(
            f"cannot hand out an engine with a name of {longest} characters; {MAX_NAME_CHARS} is the limit",
            Code.BAD_FRAME,
        )
