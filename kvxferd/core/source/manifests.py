"""The source's side of a handshake: reply with an engine's manifest once the engine is complete."""

from __future__ import annotations

from typing import cast

import msgspec

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import ReplyToPeer
from kvxferd.core.ranks.registry import LocalEngine, Registry
from kvxferd.core.source.waiting import Obstacle, WaitingRequest, WaitingRequests, kept_bytes
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import EngineKey
from kvxferd.plan import require_pp_aware
from kvxferd.wire.common import RankManifest
from kvxferd.wire.peer import ManifestReply, ManifestRequest

READER = "the requesting node"  # as refusals name it
# Of whole ranks in one reply. 64 ranks of 40 tensors are 450 KiB; the largest rank takes 3 MiB.
MAX_PAGE_BYTES = 4 << 20


class HandshakeServer:
    """Replies to each fetch when its engine is complete, or when it has waited long enough."""

    def __init__(self, context: NodeContext, registry: Registry, waiting: WaitingRequests) -> None:
        self._context = context
        self._registry = registry
        self._waiting = waiting

    def fetch(self, route: bytes, message: ManifestRequest, key: str = "") -> None:
        """Reply now or later. A repeated request changes nothing."""
        engine = EngineKey(message.engine_id, message.generation)
        request = WaitingRequest(
            name=(route, message.request),
            peer_id=key or route.hex(),
            route=route,
            message=message,
            wanted=f"hand out engine {engine}",
            num_bytes=kept_bytes(*engine),
            waits_for=frozenset([message.engine_id]),
            reply=self._reply,
        )
        self._waiting.receive(request)

    def _reply(self, request: WaitingRequest[ManifestRequest]) -> Obstacle | None:
        """Send a page of the manifest, or return why the request must wait."""
        message = request.message
        engine = self._registry.get(EngineKey(message.engine_id, message.generation))
        if obstacle := self._obstacle(message, engine):
            return obstacle
        assert engine is not None
        self._waiting.remove(request)
        ranks = self._registry.manifest(engine, READER, message.pp_aware)
        manifest = ManifestReply(
            request=message.request,
            boot=self._context.boot,
            ranks=_page(ranks[max(0, message.num_known) :]),
            num_ranks=len(ranks),
        )
        self._context.emit(ReplyToPeer(request.route, manifest))
        return None

    def _obstacle(self, message: ManifestRequest, engine: LocalEngine | None) -> Obstacle | None:
        """Return why the manifest cannot be sent now."""
        settings = self._context.settings
        key = EngineKey(message.engine_id, message.generation)
        if (successor := self._registry.successor(key)) is not None:
            return Obstacle(Code.GENERATION_STALE, f"it has been replaced by {successor}; route anew")
        if engine is None:
            why = f"no rank of it is registered at {self._context.endpoint}; check id and endpoint"
            return Obstacle(Code.ENGINE_UNKNOWN, why, min(message.wait_s, settings.transfer.unknown_wait_s))
        if not self._registry.is_home(engine.spec):
            return Obstacle(Code.NOT_HOME, f"it is aggregated at its home, {engine.spec.home}; ask there")
        if not message.pp_aware:
            try:
                require_pp_aware(engine.spec.ranks(), READER)
            except KvxferdError as error:
                return Obstacle(error.code, error.message)
        if lacking := engine.missing():
            ranks = ", ".join(map(str, lacking))
            why = f"{len(lacking)} of its {len(engine.spec.ranks())} ranks are not there: {ranks}"
            return Obstacle(Code.ENGINE_INCOMPLETE, why, min(message.wait_s, settings.peer.handshake_wait_s))
        return None


def _page(ranks: tuple[msgspec.Raw, ...]) -> tuple[RankManifest, ...]:
    """Return the first ranks, as many as a reply has. They stay encoded: nothing here reads them."""
    num_bytes = 0
    for number, rank in enumerate(ranks):
        num_bytes += len(rank)
        if number and num_bytes > MAX_PAGE_BYTES:
            ranks = ranks[:number]
            break
    return cast(tuple[RankManifest, ...], ranks)
