"""Questions to other daemons: sent again until answered or given up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import NO_USER, ReplyToPeer, SendToPeer
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import Endpoint
from kvxferd.wire.peer import Done, PeerMessage, PeerRefused, ReplyMessage, RequestMessage

Address = Endpoint | bytes  # a peer's endpoint, or the route back to whoever connected here
OnReply = Callable[[ReplyMessage], None]
NO_ADDRESS: Address = b""  # no route: nobody can answer

CHECK_PEER = (
    "check that a daemon runs there, on that port (`kvxferd status` on its node shows its endpoint; "
    "references to a daemon that came back on another port are void), that this node can connect to it, and "
    "that the allow-lists there admit it (a line `peer turned away` of the log there)"
)


@dataclass(slots=True)
class _OpenRequest:
    address: Address
    key: str  # the CURVE key that must answer on a route; "" for none, and on a connection of our own
    message: RequestMessage
    on_reply: OnReply
    uid: int  # for whom a name that is no address is looked up


class PeerRequests:
    """Every unanswered question of this node. Each gets exactly one answer, maybe our own refusal."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._ids = itertools.count(1)
        self._open: dict[int, _OpenRequest] = {}
        self._open_by_address: dict[Address, dict[int, None]] = {}

    def next_id(self) -> int:
        """A request number never used before."""
        return next(self._ids)

    def request(
        self,
        address: Address,
        message: RequestMessage,
        timeout_s: float,
        on_reply: OnReply,
        key: str = "",
        uid: int = NO_USER,
    ) -> None:
        """Send, and send again until answered. After `give_up_s` the answer is peer-unreachable."""
        number = message.request
        self._open[number] = _OpenRequest(address, key, message, on_reply, uid)
        self._open_by_address.setdefault(address, {})[number] = None
        self._send(number)
        self._context.after(("give-up", number), timeout_s, lambda: self._time_out(number, timeout_s))

    def _send(self, number: int) -> None:
        asked = self._open[number]
        if isinstance(asked.address, bytes):
            self._context.emit(ReplyToPeer(asked.address, asked.message))
        else:
            self._context.emit(SendToPeer(asked.address, asked.message, asked.uid))
        self._context.after(("resend", number), self._context.settings.resend_s, lambda: self._send(number))

    def _time_out(self, number: int, after_s: float) -> None:
        asked = self._open[number]
        self._complete(
            number,
            PeerRefused(
                request=number,
                code=Code.PEER_UNREACHABLE,
                message=f"cannot reach {asked.address!r}: no answer to {type(asked.message).__name__} for "
                f"{after_s:g} s; {CHECK_PEER}",
            ),
        )

    def handle_reply(self, source: Address, reply: ReplyMessage, key: str = "") -> None:
        """Hand an answer to whoever asked. One from anybody but the peer that was asked changes nothing."""
        asked = self._open.get(reply.request)
        if asked is not None and asked.address == source and asked.key == key:
            self._complete(reply.request, reply)

    def handle_inbound_reply(self, route: bytes, message: PeerMessage, key: str = "") -> None:
        """Something other than a question came from whoever connected here: an answer, or nonsense."""
        if isinstance(message, Done | PeerRefused):
            self.handle_reply(route, message, key)
            return
        refused = PeerRefused(
            request=getattr(message, "request", 0),
            code=Code.OUT_OF_PLACE,
            message=f"cannot take a {type(message).__name__} here: it is no question",
        )
        self._context.emit(ReplyToPeer(route, refused))

    def _complete(self, number: int, reply: ReplyMessage) -> None:
        self._remove(number).on_reply(reply)

    def _remove(self, number: int) -> _OpenRequest:
        asked = self._open.pop(number)
        there = self._open_by_address.get(asked.address, {})
        there.pop(number, None)
        if not there:
            self._open_by_address.pop(asked.address, None)
        self._context.timers.cancel(("resend", number))
        self._context.timers.cancel(("give-up", number))
        return asked

    def withdraw(self, number: int) -> None:
        """Ask no more, and want no answer. Harmless where nothing is asked."""
        if number in self._open:
            self._remove(number)

    def reroute(self, old: bytes, new: bytes) -> None:
        """Whoever connected by `old` has connected anew: unanswered questions follow as they are due.

        Thousands may be open: sent at once they would cost their peer's every new connection all of them.
        """
        if not (following := self._open_by_address.pop(old, {})):
            return
        self._open_by_address.setdefault(new, {}).update(following)
        for number in following:
            self._open[number].address = new

    def fail_all(self, address: Address, error: KvxferdError) -> None:
        """Nothing that is asked there will be answered: from now on no answer is taken.

        Where thousands wait, the last of them are refused in later turns.
        """
        failed = self._open_by_address.pop(address, {})
        for number in failed:
            self._open[number].address = NO_ADDRESS
            self._context.timers.cancel(("resend", number))

        def refuse(number: int) -> None:
            if number in self._open:  # neither withdrawn nor given up meanwhile
                self._complete(number, PeerRefused(request=number, code=error.code, message=error.message))

        self._context.run_in_batches(partial(refuse, number) for number in failed)

    def is_open(self, address: Address, number: int) -> bool:
        """Whether that question is asked there."""
        return number in self._open_by_address.get(address, ())

    def has_open(self, address: Address) -> bool:
        """Whether something is asked there."""
        return address in self._open_by_address

    def __len__(self) -> int:
        return len(self._open)
