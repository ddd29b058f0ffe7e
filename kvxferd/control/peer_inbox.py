"""Decodes peers' payloads into messages: in order for each connection, without blocking the loop.

A thread decodes and checks manifests, once their sender is known to be allowed to send them. Later messages
of that connection wait meanwhile; those of other connections do not.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from kvxferd.control.fair_thread import FairThread
from kvxferd.core.events import CheckedLayout, Event, LayoutsChecked, PeerReply, PeerRequest, Tick
from kvxferd.core.limits.ledger import FairShare
from kvxferd.core.node import Node
from kvxferd.core.peers.manifest_checks import LayoutCache, checked_layouts
from kvxferd.errors import Code, KvxferdError, ProtocolError, count_busy_refusal
from kvxferd.ids import Endpoint
from kvxferd.wire.codec import refusal_of_undecodable
from kvxferd.wire.common import Message, RankManifest
from kvxferd.wire.outlines import (
    PEER_OUTLINES,
    JoinRankOutline,
    ManifestReplyOutline,
    PeerOutline,
    decode_join_rank,
    decode_manifest_reply,
)
from kvxferd.wire.peer import JoinRank, ManifestReply, PeerMessage, PeerRefused, refusal_of

log = structlog.get_logger()

# Decoding without the manifests takes 7 ns a byte at most: 7 ms.
MAX_INLINE_BYTES = 1 << 20
# The encoder puts a message's type first. Whole engines always go to the thread: nothing in them can be
# refused earlier.
_MANIFEST_REPLY_PREFIX = b"\xa1t" + msgspec.msgpack.encode(ManifestReply.__name__)
# Waiting behind a manifest that is being checked. The rest is dropped, and sent again by the peer.
MAX_DEFERRED_BYTES = 128 << 20
# A heartbeat repeats its rank's manifest every three seconds: 8 MiB are 50 ranks of the largest models known.
# As objects they take ten times that, and share it with the node's own records.
MAX_CACHED_BYTES = 8 << 20

T = TypeVar("T")
M = TypeVar("M", JoinRank, ManifestReply)


class Sender(NamedTuple):
    """A connection and its peer. One is created for each message: a dataclass would take 1 us more."""

    route: bytes = b""  # ZMQ's routing id, of a peer that connected to this node, or
    endpoint: Endpoint | None = None  # the peer that this node connected to
    key: str = ""  # the CURVE key that was authenticated on a route
    address: str = ""

    @property
    def peer(self) -> str:
        """The peer for which work is counted: all connections of one peer have one share."""
        return self.key or self.address or self.endpoint or self.route.hex()


@dataclass(slots=True)
class _Deferred:
    """Messages that wait behind a connection's manifest that is being checked."""

    is_busy: bool = False
    payloads: deque[bytes] = field(default_factory=deque)


class PeerInbox:
    """`on_event` gets every message; `reply` sends refusals. `node` decides whether a manifest is decoded.

    `is_admitted` is called again for a message that has waited: the allow-lists may have been reloaded.
    """

    def __init__(
        self,
        node: Callable[[], Node],
        on_event: Callable[[Event], None],
        reply: Callable[[bytes, Message], None],
        is_admitted: Callable[[Sender], bool] = lambda sender: True,
    ) -> None:
        self._node = node
        self._on_event = on_event
        self._reply = reply
        self._is_admitted = is_admitted
        self._thread = FairThread("manifests")
        self._layouts = LayoutCache()  # used by the thread alone
        self._deferred: dict[Sender, _Deferred] = {}
        self._deferred_bytes = FairShare(MAX_DEFERRED_BYTES)  # by peer
        self._manifest_cache: OrderedDict[bytes, tuple[RankManifest, int]] = OrderedDict()
        self._num_cached_bytes = 0

    def close(self) -> None:
        """Stop the thread; messages that wait for it are dropped."""
        self._deferred.clear()
        self._thread.close()

    def handle(self, sender: Sender, payload: bytes) -> None:
        """Handle one message of a connection."""
        held = self._deferred.get(sender) if self._deferred else None
        if held is None:
            self._decode(sender, payload)
            return
        if not self._deferred_bytes.acquire(sender.peer, len(payload)):
            count_busy_refusal()
            self._log_refused(sender, Code.BUSY, "too much of it waits behind manifests")
            return
        held.payloads.append(payload)

    # --- decoding

    def _decode(self, sender: Sender, payload: bytes) -> None:
        if len(payload) > MAX_INLINE_BYTES or payload.startswith(_MANIFEST_REPLY_PREFIX, 1):
            self._run_on_thread(
                sender,
                lambda: PEER_OUTLINES.decode(payload),
                lambda outcome: self._handle_outline(sender, outcome, payload[:4096]),
            )
            return
        try:
            outline = PEER_OUTLINES.decode(payload)
        except ProtocolError as error:
            self._refuse_undecodable(sender, payload, error)
            return
        self._handle_outline(sender, outline, payload)

    def _handle_outline(self, sender: Sender, outline: PeerOutline | Exception, payload: bytes) -> None:
        match outline:
            case Exception():
                self._refuse_undecodable(sender, payload, outline)
            case JoinRankOutline():
                self._handle_join(sender, outline)
            case ManifestReplyOutline():
                self._handle_engine_manifest(sender, outline)
            case _:
                self._emit_message(sender, outline)

    def _refuse_undecodable(self, sender: Sender, payload: bytes, error: Exception) -> None:
        error = (
            error
            if isinstance(error, KvxferdError)
            else ProtocolError(f"{type(error).__name__}: {str(error)!r}", Code.INTERNAL)
        )
        self._log_refused(sender, error.code, error.message)
        if sender.route:
            self._reply(sender.route, refusal_of_undecodable(payload, error))

    def _emit_message(self, sender: Sender, message: PeerMessage) -> None:
        if sender.route:
            self._on_event(PeerRequest(sender.route, message, sender.key))
        else:
            assert sender.endpoint is not None
            self._on_event(PeerReply(sender.endpoint, message))

    # --- manifests

    def _handle_join(self, sender: Sender, outline: JoinRankOutline) -> None:
        if not sender.route:
            self._log_refused(sender, Code.OUT_OF_PLACE, "a JoinRank came as a reply")
            return
        self._on_event(Tick())  # a refusal may end with time, and nothing may have happened for long
        refused = self._node().refusal_of_join(sender.route, outline, sender.key)
        if refused is not None:
            self._reply(sender.route, refused)
            return
        encoded = outline.manifest
        content = msgspec.msgpack.encode(encoded)
        name = hashlib.blake2b(content, digest_size=16).digest()
        if known := self._manifest_cache.get(name):
            self._manifest_cache.move_to_end(name)
            request, secret = outline.request, outline.secret
            self._emit_message(
                sender, JoinRank(request=request, boot=outline.boot, manifest=known[0], secret=secret)
            )
            return

        def work() -> tuple[JoinRank, tuple[CheckedLayout, ...]]:
            message = decode_join_rank(outline)
            checked = checked_layouts((message.manifest,), self._layouts)
            # Equal layouts share one object.
            manifest = msgspec.structs.replace(message.manifest, layout=checked[0].layout)
            return msgspec.structs.replace(message, manifest=manifest), checked

        def done(message: JoinRank) -> None:
            self._cache_manifest(name, message.manifest, len(content))

        self._check_on_thread(sender, outline.request, work, done)

    def _cache_manifest(self, name: bytes, manifest: RankManifest, num_bytes: int) -> None:
        self._manifest_cache[name] = manifest, num_bytes
        self._num_cached_bytes += num_bytes
        while self._num_cached_bytes > MAX_CACHED_BYTES:
            _, (_, num_bytes) = self._manifest_cache.popitem(last=False)
            self._num_cached_bytes -= num_bytes

    def _handle_engine_manifest(self, sender: Sender, outline: ManifestReplyOutline) -> None:
        if sender.endpoint is None:
            text = "cannot take a ManifestReply here: it is no request"
            self._reply(
                sender.route,
                PeerRefused(request=outline.request, code=Code.OUT_OF_PLACE, message=text),
            )
            return
        if not self._node().is_request_open(sender.endpoint, outline.request):
            return  # replied to already, or given up

        def work() -> tuple[ManifestReply, tuple[CheckedLayout, ...]]:
            message = decode_manifest_reply(outline)
            return message, checked_layouts(message.ranks, self._layouts) if message.ranks else ()

        self._check_on_thread(sender, outline.request, work)

    def _check_on_thread(
        self,
        sender: Sender,
        request: int,
        work: Callable[[], tuple[M, tuple[CheckedLayout, ...]]],
        on_checked: Callable[[M], None] = lambda message: None,
    ) -> None:
        """Have a message with manifests decoded and checked, and emit it, or why it is refused."""

        def done(outcome: tuple[M, tuple[CheckedLayout, ...]] | Exception) -> None:
            if not isinstance(outcome, Exception):
                message, checked = outcome
                on_checked(message)
                self._on_event(LayoutsChecked(checked))
                self._emit_message(sender, message)
            elif not isinstance(outcome, KvxferdError):
                self._refuse_undecodable(sender, b"", outcome)
            elif sender.route:
                self._reply(sender.route, refusal_of(request, outcome))
            else:
                self._emit_message(sender, refusal_of(request, outcome))

        self._run_on_thread(sender, work, done)

    # --- the thread

    def _run_on_thread(
        self, sender: Sender, work: Callable[[], T], done: Callable[[T | Exception], None]
    ) -> None:
        """Run the work on the thread. The connection's later messages wait."""
        held = self._deferred.get(sender) or _Deferred()

        def finished(outcome: T | Exception) -> None:
            held.is_busy = False
            try:
                if self._is_admitted(sender):
                    done(outcome)  # which may use the thread again
            except Exception:  # else the messages behind it would wait for ever
                self._log_failure(sender)
            self._handle_next(sender)

        self._thread.submit(sender.peer, work, finished)
        held.is_busy = True
        self._deferred[sender] = held

    def _handle_next(self, sender: Sender) -> None:
        """Handle the connection's next waiting message, one in a turn of the loop."""
        held = self._deferred.get(sender)
        if held is None or held.is_busy:
            return
        if not held.payloads:
            del self._deferred[sender]
            return
        payload = held.payloads.popleft()
        self._deferred_bytes.release(sender.peer, len(payload))
        try:
            if self._is_admitted(sender):
                self._decode(sender, payload)
        except Exception:
            self._log_failure(sender)
        asyncio.get_running_loop().call_soon(self._handle_next, sender)

    def _log_failure(self, sender: Sender) -> None:
        """Log the exception that is being handled."""
        log.exception("peer message failed", limit_by=sender.peer, peer=sender.peer)

    def _log_refused(self, sender: Sender, code: Code, reason: str) -> None:
        log.warning("peer message refused", limit_by=sender.peer, peer=sender.peer, code=code, reason=reason)
