"""Peers' requests that have no reply yet, by what they wait for. A change considers its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import ReplyToPeer
from kvxferd.core.limits.ledger import Charge
from kvxferd.core.limits.table import WAITING_BYTES
from kvxferd.core.ranks.polling import PollRequests
from kvxferd.core.source.transfer_table import TransferKey
from kvxferd.core.tables import discard
from kvxferd.errors import BusyError, Code, KvxferdError
from kvxferd.ids import AgentName, EngineId
from kvxferd.wire.peer import GrantRequest, ManifestRequest, PeerRefused, StillWaiting, refusal_of

M = TypeVar("M", GrantRequest, ManifestRequest)


class PollingOf(NamedTuple):
    """That this agent's mover polls. An engine's id may be the same text."""

    agent: AgentName


# What a request waits for: a rank of the engine, the transfer, or a mover. Thousands may wait for transfers
# that are being computed, and a change of another one considers none of them.
WaitKey = EngineId | TransferKey | PollingOf
# A grant's name, which its peer chooses; of a fetch, which has none, its route and number.
RequestName = str | tuple[bytes, int]

# What a request is counted for: itself, and each of its names beside the characters.
_REQUEST_BYTES, _NAME_BYTES = 8192, 64


def kept_bytes(*names: str) -> int:
    """Return what a request with these names is counted for while it waits."""
    return _REQUEST_BYTES + _NAME_BYTES * len(names) + sum(map(len, names))


class Obstacle(NamedTuple):
    """Why a request has no reply yet. It is refused once it has waited `wait_s`."""

    code: Code
    why: str
    wait_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class WaitingRequest(Generic[M]):
    """A request that has no reply yet."""

    name: RequestName  # unique among the requests that wait
    peer_id: str  # the peer's key, or its route
    route: bytes
    message: M
    wanted: str  # as a refusal names it: "grant transfer t"
    num_bytes: int  # that it is counted for
    waits_for: frozenset[WaitKey]
    reply: Callable[[WaitingRequest[M]], Obstacle | None]
    received_at: float = 0.0
    sent_at: float = 0.0  # when it arrived last: its peer repeats what it still wants
    agents: frozenset[AgentName] = frozenset()  # whose movers poll for it, or were requested to
    why: str = ""  # it waits


class WaitingRequests:
    """Keeps requests until `reply` replies, raises BusyError, or returned an obstacle for too long."""

    def __init__(self, context: NodeContext, poll_requests: PollRequests) -> None:
        self._context = context
        self._poll_requests = poll_requests
        self._share = context.ledger[WAITING_BYTES]
        self._requests: dict[RequestName, WaitingRequest[Any]] = {}
        self._by_key: dict[WaitKey, dict[RequestName, None]] = {}
        self._due: set[RequestName] = set()  # to be considered soon

    def __len__(self) -> int:
        return len(self._requests)

    def receive(self, request: WaitingRequest[M]) -> None:
        """Reply to a request, keep it, or refuse it where it has no room.

        One that is sent again waits on. Another of the same name replaces it.
        """
        try:
            self._receive(request)
        except KvxferdError as error:
            self._context.emit(ReplyToPeer(request.route, refusal_of(request.message.request, error)))

    def _receive(self, request: WaitingRequest[M]) -> None:
        now, known = self._context.now, self._requests.get(request.name)
        if known is not None and known.message.request == request.message.request:
            known.route, known.sent_at = request.route, now  # the last route is the live one
            self._consider(known)
            if request.name in self._requests:  # only a dead peer is silent
                still = StillWaiting(request=known.message.request, why=known.why)
                self._context.emit(ReplyToPeer(known.route, still))
            return
        if known is not None:
            self.remove(known)
        self._share.check(request.peer_id, request.num_bytes, request.wanted)
        request.received_at = request.sent_at = now
        self._requests[request.name] = request
        self._share.add(request.peer_id, request.num_bytes)
        for key in request.waits_for:
            self._by_key.setdefault(key, {})[request.name] = None
        self._consider(request)

    def charges(self) -> Iterator[Charge]:
        """Yield what the requests are counted for."""
        for request in self._requests.values():
            yield WAITING_BYTES, request.peer_id, request.num_bytes

    def get(self, name: RequestName) -> WaitingRequest[Any] | None:
        """Return the request of that name that waits."""
        return self._requests.get(name)

    def poll(self, request: WaitingRequest[M], agents: frozenset[AgentName]) -> bool:
        """Have the movers of these agents, and no others, poll for the request. Return whether all do."""
        for agent in sorted(request.agents - agents):
            self._poll_requests.release(agent, request)
            discard(self._by_key, PollingOf(agent), request.name)
        for agent in sorted(agents):  # also those of a request before: one to another node may have failed
            self._poll_requests.acquire(agent, request)
            self._by_key.setdefault(PollingOf(agent), {})[request.name] = None
        request.agents = agents
        return all(map(self._poll_requests.is_polling, agents))

    def refuse(self, request: WaitingRequest[M], code: Code, why: str) -> None:
        """Refuse a request that waits."""
        self.remove(request)
        message = f"cannot {request.wanted}: {why}"
        refused = PeerRefused(request=request.message.request, code=code, message=message)
        self._context.emit(ReplyToPeer(request.route, refused))

    def remove(self, request: WaitingRequest[M]) -> None:
        """Forget a request: it has its reply, or nobody wants one."""
        self.poll(request, frozenset())
        del self._requests[request.name]
        for key in request.waits_for:
            discard(self._by_key, key, request.name)
        self._share.release(request.peer_id, request.num_bytes)
        self._context.timers.cancel(("waits", request.name))

    def wake(self, key: WaitKey) -> None:
        """Consider the requests that wait for this, after the event: one may end thousands of transfers."""
        for name in self._by_key.get(key, {}):
            if name not in self._due:
                self._due.add(name)
                self._context.put_off(self._requests[name].peer_id, partial(self._consider_named, name))

    def _consider_named(self, name: RequestName) -> None:
        self._due.discard(name)
        if (request := self._requests.get(name)) is not None:
            self._consider(request)

    def _consider(self, request: WaitingRequest[M]) -> None:
        """Reply to a request, refuse it or keep it."""
        now = self._context.now
        try:
            found = request.reply(request)
        except BusyError as error:
            self.remove(request)
            self._context.emit(ReplyToPeer(request.route, refusal_of(request.message.request, error)))
            return
        if found is None:
            return
        given_up_at = request.sent_at + self._context.settings.gone_after_s
        refused_at = request.received_at + found.wait_s
        if now >= given_up_at:  # its peer is dead, or what took the request back was lost
            self.remove(request)
        elif now >= refused_at:
            self.refuse(request, found.code, found.why)
        else:
            request.why = found.why
            look_again_s = min(given_up_at, refused_at) - now
            self._context.after(("waits", request.name), look_again_s, lambda: self._consider(request))
