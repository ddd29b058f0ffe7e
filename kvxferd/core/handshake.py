"""The source's side of a handshake: an engine's manifest, once the engine is complete."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice

from kvxferd.core.effects import ToRoute
from kvxferd.core.limits import check_waiting
from kvxferd.core.moment import Moment
from kvxferd.core.registry import LocalEngine, Registry
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import EngineId, EngineKey
from kvxferd.plan import require_pp_aware
from kvxferd.wire.limits import MAX_NAME_CHARS
from kvxferd.wire.peer import EngineManifest, FetchEngine, PeerRefused, refusal_of

# As of asks for grants: what one change looks at in one turn of the loop.
FETCHES_PER_TURN, NEXT_TURN_S = 256, 0.001

FetchName = tuple[bytes, int]  # route and number


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
        self._fetches: dict[FetchName, _Fetch] = {}
        self._fetches_of: dict[EngineId, dict[FetchName, None]] = {}
        self._num_of_asker: Counter[str] = Counter()
        self._due: dict[FetchName, None] = {}  # to be looked at in the next turns

    def fetch(self, route: bytes, question: FetchEngine, key: str = "") -> None:
        """Answer now or later. The same question again changes nothing."""
        name, asker = (route, question.request), key or route.hex()
        if name not in self._fetches:
            try:
                _check_names(question)
                of_asker = self._num_of_asker[asker]
                check_waiting(of_asker, len(self._fetches), self._moment.settings.limits)
            except KvxferdError as error:
                self._moment.do(ToRoute(route, refusal_of(question.request, error)))
                return
            self._fetches[name] = _Fetch(asker, route, question, self._moment.now)
            self._fetches_of.setdefault(EngineId(question.engine_id), {})[name] = None
            self._num_of_asker[asker] += 1
        self._consider(self._fetches[name])

    def reconsider(self, engine_id: EngineId) -> None:
        """A rank of the engine has come."""
        concerned = self._fetches_of.get(engine_id, {})
        first = list(islice(concerned, FETCHES_PER_TURN))
        if len(concerned) > len(first):
            self._due.update(concerned)
        for name in first:
            self._due.pop(name, None)
            self._consider(self._fetches[name])
        self._go_on_later()

    def _go_on_later(self) -> None:
        if self._due and "fetches-due" not in self._moment.timers:
            self._moment.after("fetches-due", NEXT_TURN_S, self._go_on)

    def _go_on(self) -> None:
        for name in list(islice(self._due, FETCHES_PER_TURN)):
            del self._due[name]
            self._consider(self._fetches[name])
        self._go_on_later()

    def _drop(self, name: FetchName) -> None:
        fetch = self._fetches.pop(name)
        self._due.pop(name, None)
        of_engine = self._fetches_of[EngineId(fetch.question.engine_id)]
        del of_engine[name]
        if not of_engine:
            del self._fetches_of[EngineId(fetch.question.engine_id)]
        self._num_of_asker[fetch.asker] -= 1
        if not self._num_of_asker[fetch.asker]:
            del self._num_of_asker[fetch.asker]
        self._moment.timers.stop(("fetch", *name))

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
        self._drop(name)
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
