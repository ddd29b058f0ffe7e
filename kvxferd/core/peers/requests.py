"""Requests to other daemons: sent again until the reply arrives or the timeout passes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import NO_USER, ReplyToPeer, SendToPeer
from kvxferd.core.tables import discard
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import Endpoint
from kvxferd.wire.peer import (
    PeerHello,
    PeerMessage,
    PeerRefused,
    ReplyMessage,
    RequestDone,
    RequestMessage,
    StillWaiting,
    refusal_of,
)

Address = Endpoint | bytes  # a peer's endpoint, or the route of a connection that a peer opened

CHECK_PEER = (
    "check that a daemon runs there, on that port (`kvxferd status` on its node shows its endpoint; "
    "references to a daemon that came back on another port are void), that this node can connect to it, and "
    "that the allow-lists there admit it (a line `peer turned away` of the log there)"
)


@dataclass(slots=True)
class OpenRequest:
    """A request to another daemon, until its one reply. What the reply is for is in it, not in a callback."""

    address: Address
    message: RequestMessage
    timeout_s: float
    about: object = None  # what whoever asked goes on with: a grant, a pull, a rank
    uid: int = NO_USER  # for whom it is asked, and a host name is looked up
    key: str = ""  # the CURVE key that must reply on a route; "" for none, and on a connection of this node's
    silent_s: float = math.inf  # the longest silence of the peer
    is_charged: bool = False  # it counts for its user's share of the open requests
    # Whether to send it again. One that was given up must not be: it would wait at the peer anew, behind the
    # message that took it back. A late reply to it is still taken.
    is_wanted: bool = True
    opened_at: float = 0.0
    sent_at: float = 0.0
    is_unanswered: bool = False  # the peer was silent for too long
    why: str = ""  # it waits at the peer, as that has said
    waiting_at: float = 0.0  # when the last `StillWaiting` arrived; at first, when the request was sent


OnSettled = Callable[[OpenRequest, ReplyMessage], None]


class PeerRequests:
    """Every open request of this node. Each gets exactly one reply, maybe a refusal made here."""

    def __init__(self, context: NodeContext, on_settled: OnSettled) -> None:
        self._context = context
        self._on_settled = on_settled
        self._ids = itertools.count(1)
        self._open: dict[int, OpenRequest] = {}
        self._open_by_address: dict[Address, dict[int, None]] = {}
        self._held_back: set[Address] = set()  # nothing but hellos is sent there

    def next_id(self) -> int:
        """Return a request number that was never used before."""
        return next(self._ids)

    def send(self, asked: OpenRequest) -> None:
        """Send a request, repeatedly until a reply arrives. After its `timeout_s`: `peer-unreachable`.

        With `silent_s` it may wait at the peer. The peer is unreachable as soon as it has sent neither a
        reply nor `StillWaiting` for so long; one that keeps the request until `timeout_s` is not, and the
        code is `deadline`.
        """
        number = asked.message.request
        asked.opened_at = asked.waiting_at = self._context.now
        self._open[number] = asked
        self._open_by_address.setdefault(asked.address, {})[number] = None
        self._send(number)
        self._schedule_give_up(number)

    def refuse(self, asked: OpenRequest, error: KvxferdError) -> None:
        """Refuse a request that was not sent."""
        asked.opened_at = self._context.now
        self._on_settled(asked, refusal_of(asked.message.request, error))

    def _schedule_give_up(self, number: int) -> None:
        open_request = self._open[number]
        ends_at = open_request.opened_at + open_request.timeout_s  # however often the peer says that it waits
        when = min(ends_at, open_request.waiting_at + open_request.silent_s)
        self._context.timers.set(("give-up", number), when, lambda: self._time_out(number))

    def _send(self, number: int) -> None:
        asked = self._open[number]
        resend_s = self._context.settings.peer.request_timeout_s
        self._context.after(("resend", number), resend_s, lambda: self.send_again(number))
        if asked.address in self._held_back and not isinstance(asked.message, PeerHello):
            return
        asked.sent_at = self._context.now
        if isinstance(asked.address, bytes):
            self._context.emit(ReplyToPeer(asked.address, asked.message))
        else:
            self._context.emit(SendToPeer(asked.address, asked.message, asked.uid))

    def send_again(self, number: int) -> None:
        """Send a request again now. Does nothing where it is not open, or was given up."""
        if number in self._open and self._open[number].is_wanted:
            self._send(number)

    def hold_back(self, address: Address) -> None:
        """Send nothing but hellos to a peer that is silent: it would all wait there when it is back."""
        self._held_back.add(address)

    def resume(self, address: Address) -> None:
        """Send again what a silent peer that is back may not have received.

        What was sent just now is sent by its own timer: a connection may end ten times a second.
        """
        if address in self._held_back:
            self._held_back.discard(address)
            before = self._context.now - self._context.settings.peer.request_timeout_s / 4
            for number in self._open_by_address.get(address, ()):
                if (asked := self._open[number]).sent_at <= before:
                    self._context.put_off(asked.uid, partial(self.send_again, number))

    def _time_out(self, number: int) -> None:
        open_request = self._open[number]
        silent_s = self._context.now - open_request.waiting_at
        if open_request.waiting_at > open_request.opened_at and silent_s < open_request.silent_s:
            what = f"{open_request.address!r}, which has kept {type(open_request.message).__name__}"
            text = f"cannot wait longer for {what} for {self._context.now - open_request.opened_at:.4g} s"
            self._complete(number, PeerRefused(request=number, code=Code.DEADLINE, message=text))
            return
        open_request.is_unanswered = open_request.is_wanted  # the peer has no reply to what was taken back
        what = f"no reply to {type(open_request.message).__name__} for {silent_s:.4g} s"
        text = f"cannot reach {open_request.address!r}: {what}; {CHECK_PEER}"
        self._complete(number, PeerRefused(request=number, code=Code.PEER_UNREACHABLE, message=text))

    def handle_reply(self, source: Address, reply: ReplyMessage, key: str = "") -> None:
        """Give a reply to its request. A reply from another peer than the request went to changes nothing."""
        open_request = self._open.get(reply.request)
        if open_request is None or open_request.address != source or open_request.key != key:
            return
        if isinstance(reply, StillWaiting):
            open_request.waiting_at, open_request.why = self._context.now, reply.why
            self._schedule_give_up(reply.request)
        else:
            self._complete(reply.request, reply)

    def handle_inbound_reply(self, route: bytes, message: PeerMessage, key: str = "") -> None:
        """Handle a message that is no request, on a connection that a peer opened: a reply, or refuse it."""
        if isinstance(message, RequestDone | PeerRefused):
            self.handle_reply(route, message, key)
            return
        refused = PeerRefused(
            request=getattr(message, "request", 0),
            code=Code.OUT_OF_PLACE,
            message=f"cannot take a {type(message).__name__} here: it is no request",
        )
        self._context.emit(ReplyToPeer(route, refused))

    def _complete(self, number: int, reply: ReplyMessage) -> None:
        self._on_settled(self._remove(number), reply)

    def _remove(self, number: int) -> OpenRequest:
        open_request = self._open.pop(number)
        discard(self._open_by_address, open_request.address, number)
        if open_request.address not in self._open_by_address:
            self._held_back.discard(open_request.address)
        self._context.timers.cancel(("resend", number))
        self._context.timers.cancel(("give-up", number))
        return open_request

    def give_up(self, number: int) -> None:
        """Send a request no more. Does nothing where it is not open."""
        if number in self._open:
            self._open[number].is_wanted = False

    def cancel(self, number: int) -> None:
        """End a request with a refusal made here: it is not sent again. Does nothing where it is not open."""
        if number in self._open:
            text = f"request {number} was cancelled: a later one is in its place, or nobody waits for it"
            self._complete(number, PeerRefused(request=number, code=Code.CANCELLED, message=text))

    def reroute(self, old: bytes, new: bytes) -> None:
        """Move the open requests of route `old` to `new`. Each is sent again when its timer is due.

        Thousands may be open. Sent at once, every reconnect of the peer would cost all of them.
        """
        if not (following := self._open_by_address.pop(old, {})):
            return
        self._open_by_address.setdefault(new, {}).update(following)
        for number in following:
            self._open[number].address = new

    def fail_all(self, address: Address, error: KvxferdError, *, only_waiting: bool = False) -> None:
        """Fail all requests to that address. No reply to them is accepted from now on.

        `only_waiting`: those that may wait there; what is told to the peer is sent again when it is back.
        Where thousands are open, most of them fail in later turns.
        """
        for number in tuple(self._open_by_address.get(address, ())):
            if not only_waiting or self._open[number].silent_s < math.inf:
                failed = self._remove(number)
                self._context.put_off(failed.uid, partial(self._fail, failed, error))

    def _fail(self, failed: OpenRequest, error: KvxferdError) -> None:
        self._on_settled(failed, refusal_of(failed.message.request, error))

    def get(self, number: int) -> OpenRequest | None:
        """Return an open request; None: it has its reply."""
        return self._open.get(number)

    def is_open(self, address: Address, number: int) -> bool:
        """Whether that request to that address is open."""
        return number in self._open_by_address.get(address, ())

    def num_open(self, address: Address) -> int:
        """Return how many requests to that address are open."""
        return len(self._open_by_address.get(address, ()))

    def oldest_at(self, address: Address) -> float | None:
        """Return since when the oldest open request to that address waits; None: there is none."""
        there = self._open_by_address.get(address)
        return self._open[next(iter(there))].opened_at if there else None

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        """Iterate over the open requests."""
        return iter(self._open.values())
