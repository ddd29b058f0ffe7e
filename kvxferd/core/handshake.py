"""The source's side of a handshake: an engine's manifest, once the engine is complete."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.core.effects import ToRoute
from kvxferd.core.limits import check_waiting
from kvxferd.core.moment import Moment
from kvxferd.core.registry import LocalEngine, Registry
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import EngineKey
from kvxferd.plan import require_pp_aware
from kvxferd.wire.limits import MAX_NAME_CHARS
from kvxferd.wire.peer import EngineManifest, FetchEngine, PeerRefused, refusal_of


@dataclass(slots=True)
class _Fetch:
    """Somebody waits for an engine."""

    asker: str  # the peer's key, or its route
    route: bytes
    question: FetchEngine
    asked_at: float


class Handshakes:
    """Answers each fetch when its engine is complete, or when it has waited long enough."""

    def __init__(self, moment: Moment, registry: Registry) -> None:
        self._moment = moment
        self._registry = registry
        self._fetches: dict[tuple[bytes, int], _Fetch] = {}

    def fetch(self, route: bytes, question: FetchEngine, key: str = "") -> None:
        """Answer now or later. The same question again changes nothing."""
        name, asker = (route, question.request), key or route.hex()
        if name not in self._fetches:
            try:
                _check_names(question)
                askers = (fetch.asker for fetch in self._fetches.values())
                check_waiting(askers, len(self._fetches), asker, self._moment.settings.limits)
            except KvxferdError as error:
                self._moment.do(ToRoute(route, refusal_of(question.request, error)))
                return
            self._fetches[name] = _Fetch(asker, route, question, self._moment.now)
        self._consider(self._fetches[name])

    def reconsider(self) -> None:
        """A rank has come."""
        for fetch in list(self._fetches.values()):
            self._consider(fetch)

    def _consider(self, fetch: _Fetch) -> None:
        question = fetch.question
        key = EngineKey(question.engine_id, question.generation)
        engine = self._registry.get(key)
        obstacle = self._obstacle(key, engine, question)
        name = (fetch.route, question.request)
        if obstacle is not None:
            left_s = fetch.asked_at + obstacle[1] - self._moment.now
            if left_s > 0:
                self._moment.after(("fetch", *name), left_s, lambda: self._consider(fetch))
                return
        self._fetches.pop(name)
        self._moment.timers.stop(("fetch", *name))
        if obstacle is not None:
            refused = PeerRefused(
                request=question.request, code=obstacle[0].code, message=obstacle[0].message
            )
            self._moment.do(ToRoute(fetch.route, refused))
            return
        assert engine is not None
        manifest = EngineManifest(
            request=question.request, boot=self._moment.boot, ranks=self._registry.manifest(engine)
        )
        self._moment.do(ToRoute(fetch.route, manifest))

    def _obstacle(
        self, key: EngineKey, engine: LocalEngine | None, question: FetchEngine
    ) -> tuple[KvxferdError, float] | None:
        """Why the engine cannot be handed out now, and how long that may be waited for."""
        settings = self._moment.settings
        what = f"cannot hand out engine {key}"
        if self._registry.is_superseded(key):
            text = f"{what}: it has been replaced by {self._registry.newest(key.engine_id)}; route anew"
            return KvxferdError(text, Code.GENERATION_STALE), 0.0
        if engine is None:
            text = f"{what}: no rank of it is registered at {self._moment.endpoint}; check id and endpoint"
            return KvxferdError(text, Code.ENGINE_UNKNOWN), min(question.wait_s, settings.unknown_wait_s)
        if not self._registry.is_home(engine.spec):
            text = f"{what}: it is aggregated at its home, {engine.spec.home}; ask there"
            return KvxferdError(text, Code.NOT_HOME), 0.0
        if not question.pp_aware:
            try:
                require_pp_aware(engine.spec.ranks(), "the asking node")
            except KvxferdError as error:
                return error, 0.0
        if lacking := engine.lacking():
            ranks = ", ".join(map(str, lacking))
            text = f"{what}: {len(lacking)} of its {len(engine.spec.ranks())} ranks are not there: {ranks}"
            return KvxferdError(text, Code.ENGINE_INCOMPLETE), min(question.wait_s, settings.handshake_wait_s)
        return None


def _check_names(question: FetchEngine) -> None:
    """A fetch waits for seconds, and what it says is kept as long."""
    longest = max(len(question.engine_id), len(question.generation))
    if longest > MAX_NAME_CHARS:
        raise EngineError(
            f"cannot hand out an engine with a name of {longest} characters; {MAX_NAME_CHARS} is the limit",
            Code.BAD_FRAME,
        )
