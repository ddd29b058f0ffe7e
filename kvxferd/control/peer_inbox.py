"""From peers' payloads to messages: in order for each connection, and never long on the loop.

Manifests are decoded and checked by a thread, once it is known that their sender may send them. What else
comes on that connection meanwhile waits; what comes on others does not.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import structlog

from kvxferd.control.fair_worker import FairWorker
from kvxferd.core.events import Event, LayoutsChecked, PeerSaid, RouteSaid
from kvxferd.core.layouts import CheckedLayout, Layouts
from kvxferd.core.manifests import checked_layouts
from kvxferd.errors import Code, KvxferdError, ProtocolError
from kvxferd.ids import Endpoint
from kvxferd.wire.codec import refuse_undecodable
from kvxferd.wire.common import Message, RankManifest
from kvxferd.wire.outlines import PEER_OUTLINES, EngineOutline, JoinOutline, PeerOutline, joined, whole_engine
from kvxferd.wire.peer import EngineManifest, JoinRank, PeerMessage, PeerRefused, refusal_of

log = structlog.get_logger()

# What is decoded without its manifests takes 7 ns a byte at most: 7 ms.
MAX_INLINE_BYTES = 1 << 20
# The encoder puts a message's type first. Whole engines are always the thread's: there is nothing in them
# that could be refused before.
_ENGINE_PREFIX = b"\xa1t\xafengine-manifest"
# Behind a manifest that is being checked. What does not fit is dropped, and asked again.
MAX_HELD_BYTES = 16 << 20
MAX_HELD_BYTES_IN_ALL = 128 << 20
# A heartbeat repeats its rank's manifest every three seconds: 8 MiB are 50 ranks of the largest models known.
# As objects they take ten times that, which they share with the node's own records.
MAX_REMEMBERED_BYTES = 8 << 20

T = TypeVar("T")


class Gate(Protocol):
    """What the node knows about a message before its manifest is decoded."""

    def refusal_of_join(self, route: bytes, said: JoinOutline, key: str) -> PeerRefused | None:
        """Why the rank cannot be joined, whatever its layout."""
        ...

    def is_asked(self, endpoint: Endpoint, request: int) -> bool:
        """Whether a peer's answer to that question is waited for."""
        ...


class OpenGate:
    """Where there is no node, everything is taken."""

    def refusal_of_join(self, route: bytes, said: JoinOutline, key: str) -> PeerRefused | None:
        """None."""
        return None

    def is_asked(self, endpoint: Endpoint, request: int) -> bool:
        """Yes."""
        return True


class Sender(NamedTuple):
    """A connection and who is at its other end. One is made of each message: a dataclass takes 1 us more."""

    route: bytes = b""  # back to who connected to this node, or
    endpoint: Endpoint | None = None  # where this node has connected to
    key: str = ""  # the CURVE key that was proved on a route
    address: str = ""

    @property
    def peer(self) -> str:
        """For whom work is done: many connections of one peer have one share."""
        return self.key or self.address or self.endpoint or self.route.hex()


@dataclass(slots=True)
class _Held:
    """What waits behind a connection's message that is being worked on."""

    is_busy: bool = False
    payloads: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0


class PeerInbox:
    """`on_event` gets every message, `answer` what is refused here.

    `is_admitted` is asked again for what has waited: the allow-lists may have been reloaded meanwhile.
    """

    def __init__(
        self,
        gate: Callable[[], Gate],
        on_event: Callable[[Event], None],
        answer: Callable[[bytes, Message], None],
        is_admitted: Callable[[Sender], bool] = lambda sender: True,
    ) -> None:
        self._gate = gate
        self._on_event = on_event
        self._answer = answer
        self._is_admitted = is_admitted
        self._worker = FairWorker("manifests")
        self._layouts = Layouts()  # the thread's own
        self._held: dict[Sender, _Held] = {}
        self._num_held_bytes = 0
        self._remembered: OrderedDict[bytes, tuple[RankManifest, int]] = OrderedDict()
        self._num_remembered_bytes = 0

    def stop(self) -> None:
        """Drop what is being worked on."""
        self._held.clear()
        self._worker.stop()

    def take(self, sender: Sender, payload: bytes) -> None:
        """One message of a connection."""
        held = self._held.get(sender) if self._held else None
        if held is None:
            self._decode(sender, payload)
            return
        if (
            held.num_bytes + len(payload) > MAX_HELD_BYTES
            or self._num_held_bytes + len(payload) > MAX_HELD_BYTES_IN_ALL
        ):
            self._log(sender, Code.BUSY, "too much waits behind a manifest of its connection")
            return
        held.payloads.append(payload)
        held.num_bytes += len(payload)
        self._num_held_bytes += len(payload)

    # --- decoding

    def _decode(self, sender: Sender, payload: bytes) -> None:
        if len(payload) > MAX_INLINE_BYTES or payload.startswith(_ENGINE_PREFIX, 1):
            self._off_loop(
                sender,
                lambda: PEER_OUTLINES.decode(payload),
                lambda outcome: self._outlined(sender, outcome, payload[:4096]),
            )
            return
        try:
            outline = PEER_OUTLINES.decode(payload)
        except ProtocolError as error:
            self._undecodable(sender, payload, error)
            return
        self._outlined(sender, outline, payload)

    def _outlined(self, sender: Sender, outline: PeerOutline | Exception, payload: bytes) -> None:
        match outline:
            case Exception():
                self._undecodable(sender, payload, outline)
            case JoinOutline():
                self._join(sender, outline)
            case EngineOutline():
                self._engine(sender, outline)
            case _:
                self._deliver(sender, outline)

    def _undecodable(self, sender: Sender, payload: bytes, error: Exception) -> None:
        error = error if isinstance(error, ProtocolError) else ProtocolError(repr(error), Code.INTERNAL)
        self._log(sender, error.code, error.message)
        if sender.route:
            self._answer(sender.route, refuse_undecodable(payload, error))

    def _deliver(self, sender: Sender, message: PeerMessage) -> None:
        if sender.route:
            self._on_event(RouteSaid(sender.route, message, sender.key))
        else:
            assert sender.endpoint is not None
            self._on_event(PeerSaid(sender.endpoint, message))

    # --- manifests

    def _join(self, sender: Sender, outline: JoinOutline) -> None:
        if not sender.route:
            self._log(sender, Code.OUT_OF_PLACE, "a join-rank came as an answer")
            return
        refused = self._gate().refusal_of_join(sender.route, outline, sender.key)
        if refused is not None:
            self._answer(sender.route, refused)
            return
        encoded = outline.manifest
        content = msgspec.msgpack.encode(encoded)
        name = hashlib.blake2b(content, digest_size=16).digest()
        if known := self._remembered.get(name):
            self._remembered.move_to_end(name)
            request, secret = outline.request, outline.secret
            self._deliver(
                sender, JoinRank(request=request, boot=outline.boot, manifest=known[0], secret=secret)
            )
            return

        def work() -> tuple[JoinRank, tuple[CheckedLayout, ...]]:
            message = joined(outline)
            checked = checked_layouts((message.manifest,), self._layouts)
            # Equal layouts are one object.
            manifest = msgspec.structs.replace(message.manifest, layout=checked[0].layout)
            return msgspec.structs.replace(message, manifest=manifest), checked

        def done(outcome: tuple[JoinRank, tuple[CheckedLayout, ...]] | Exception) -> None:
            if not isinstance(outcome, Exception):
                message, checked = outcome
                self._remember(name, message.manifest, len(content))
                self._on_event(LayoutsChecked(checked))
                self._deliver(sender, message)
            elif isinstance(outcome, KvxferdError):
                self._answer(sender.route, refusal_of(outline.request, outcome))
            else:
                self._undecodable(sender, b"", outcome)

        self._off_loop(sender, work, done)

    def _remember(self, name: bytes, manifest: RankManifest, num_bytes: int) -> None:
        self._remembered[name] = manifest, num_bytes
        self._num_remembered_bytes += num_bytes
        while self._num_remembered_bytes > MAX_REMEMBERED_BYTES:
            _, (_, num_bytes) = self._remembered.popitem(last=False)
            self._num_remembered_bytes -= num_bytes

    def _engine(self, sender: Sender, outline: EngineOutline) -> None:
        if sender.endpoint is None:
            text = "cannot take an engine-manifest here: it is no question"
            self._answer(
                sender.route,
                PeerRefused(request=outline.request, code=Code.OUT_OF_PLACE, message=text),
            )
            return
        if not self._gate().is_asked(sender.endpoint, outline.request):
            return  # answered before, or given up

        def work() -> tuple[EngineManifest, tuple[CheckedLayout, ...]]:
            message = whole_engine(outline)
            if not message.ranks:
                return message, ()
            return message, checked_layouts(message.ranks, self._layouts)

        def done(outcome: tuple[EngineManifest, tuple[CheckedLayout, ...]] | Exception) -> None:
            if not isinstance(outcome, Exception):
                message, checked = outcome
                self._on_event(LayoutsChecked(checked))
                self._deliver(sender, message)
            elif isinstance(outcome, KvxferdError):
                self._deliver(sender, refusal_of(outline.request, outcome))
            else:
                self._undecodable(sender, b"", outcome)

        self._off_loop(sender, work, done)

    # --- the thread

    def _off_loop(self, sender: Sender, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Have the thread do it. The connection's other messages wait."""
        held = self._held.get(sender) or _Held()

        def finished(outcome: T | Exception) -> None:
            held.is_busy = False
            try:
                if self._is_admitted(sender):
                    done(outcome)  # which may take the thread again
            except Exception:  # else what waits behind it would wait for ever
                self._log_failure(sender)
            self._go_on(sender)

        self._worker.submit(sender.peer, work, finished)
        held.is_busy = True
        self._held[sender] = held

    def _go_on(self, sender: Sender) -> None:
        """Take the next message that waits on the connection, one in a turn of the loop."""
        held = self._held.get(sender)
        if held is None or held.is_busy:
            return
        if not held.payloads:
            del self._held[sender]
            return
        payload = held.payloads.popleft()
        held.num_bytes -= len(payload)
        self._num_held_bytes -= len(payload)
        try:
            if self._is_admitted(sender):
                self._decode(sender, payload)
        except Exception:
            self._log_failure(sender)
        asyncio.get_running_loop().call_soon(self._go_on, sender)

    def _log_failure(self, sender: Sender) -> None:
        """Call it where an exception is being handled."""
        log.exception("cannot take a peer's message", limit_by=sender.peer, peer=sender.peer)

    def _log(self, sender: Sender, code: Code, reason: str) -> None:
        log.warning("peer message refused", limit_by=sender.peer, peer=sender.peer, code=code, reason=reason)
