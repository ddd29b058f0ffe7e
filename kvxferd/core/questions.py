"""Questions to other daemons: sent again until answered or given up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvxferd.core.effects import NOBODY, ToPeer, ToRoute
from kvxferd.core.moment import Moment
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import Endpoint
from kvxferd.wire.peer import Answer, Done, PeerMessage, PeerRefused, Question

Address = Endpoint | bytes  # a peer's endpoint, or the route back to whoever connected here
OnAnswer = Callable[[Answer], None]
NOWHERE: Address = b""  # no route: nobody can answer

CHECK_PEER = (
    "check that a daemon runs there, on that port (`kvxferd status` on its node shows its endpoint; "
    "references to a daemon that came back on another port are void), that this node can connect to it, and "
    "that the allow-lists there admit it (a line `peer turned away` of the log there)"
)


@dataclass(slots=True)
class _Asked:
    to: Address
    key: str  # the CURVE key that must answer on a route; "" for none, and on a connection of our own
    question: Question
    on_answer: OnAnswer
    uid: int  # for whom a name that is no address is looked up


class Questions:
    """Every unanswered question of this node. Each gets exactly one answer, maybe our own refusal."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._asked_there: dict[Address, dict[int, None]] = {}

    def next_number(self) -> int:
        """A request number never used before."""
        return next(self._numbers)

    def ask(
        self,
        to: Address,
        question: Question,
        give_up_s: float,
        on_answer: OnAnswer,
        key: str = "",
        uid: int = NOBODY,
    ) -> None:
        """Send, and send again until answered. After `give_up_s` the answer is peer-unreachable."""
        number = question.request
        self._asked[number] = _Asked(to, key, question, on_answer, uid)
        self._asked_there.setdefault(to, {})[number] = None
        self._send(number)
        self._moment.after(("give-up", number), give_up_s, lambda: self._give_up(number, give_up_s))

    def _send(self, number: int) -> None:
        asked = self._asked[number]
        if isinstance(asked.to, bytes):
            self._moment.do(ToRoute(asked.to, asked.question))
        else:
            self._moment.do(ToPeer(asked.to, asked.question, asked.uid))
        self._moment.after(("resend", number), self._moment.settings.resend_s, lambda: self._send(number))

    def _give_up(self, number: int, after_s: float) -> None:
        asked = self._asked[number]
        self._end(
            number,
            PeerRefused(
                request=number,
                code=Code.PEER_UNREACHABLE,
                message=f"cannot reach {asked.to!r}: no answer to {type(asked.question).__name__} for "
                f"{after_s:g} s; {CHECK_PEER}",
            ),
        )

    def answered(self, source: Address, answer: Answer, key: str = "") -> None:
        """Hand an answer to whoever asked. One from anybody but the peer that was asked changes nothing."""
        asked = self._asked.get(answer.request)
        if asked is not None and asked.to == source and asked.key == key:
            self._end(answer.request, answer)

    def route_said(self, route: bytes, message: PeerMessage, key: str = "") -> None:
        """Something other than a question came from whoever connected here: an answer, or nonsense."""
        if isinstance(message, Done | PeerRefused):
            self.answered(route, message, key)
            return
        refused = PeerRefused(
            request=getattr(message, "request", 0),
            code=Code.OUT_OF_PLACE,
            message=f"cannot take a {type(message).__name__} here: it is no question",
        )
        self._moment.do(ToRoute(route, refused))

    def _end(self, number: int, answer: Answer) -> None:
        self._forget(number).on_answer(answer)

    def _forget(self, number: int) -> _Asked:
        asked = self._asked.pop(number)
        there = self._asked_there.get(asked.to, {})
        there.pop(number, None)
        if not there:
            self._asked_there.pop(asked.to, None)
        self._moment.timers.stop(("resend", number))
        self._moment.timers.stop(("give-up", number))
        return asked

    def withdraw(self, number: int) -> None:
        """Ask no more, and want no answer. Harmless where nothing is asked."""
        if number in self._asked:
            self._forget(number)

    def reroute(self, old: bytes, new: bytes) -> None:
        """Whoever connected by `old` has connected anew: unanswered questions follow as they are due.

        Thousands may be open: sent at once they would cost their peer's every new connection all of them.
        """
        if not (following := self._asked_there.pop(old, {})):
            return
        self._asked_there.setdefault(new, {}).update(following)
        for number in following:
            self._asked[number].to = new

    def fail_all(self, to: Address, error: KvxferdError) -> None:
        """Nothing that is asked there will be answered: from now on no answer is taken.

        Where thousands wait, the last of them are refused in later turns.
        """
        failed = self._asked_there.pop(to, {})
        for number in failed:
            self._asked[number].to = NOWHERE
            self._moment.timers.stop(("resend", number))

        def refuse(number: int) -> None:
            if number in self._asked:  # neither withdrawn nor given up meanwhile
                self._end(number, PeerRefused(request=number, code=error.code, message=error.message))

        self._moment.in_turns(partial(refuse, number) for number in failed)

    def is_open(self, to: Address, number: int) -> bool:
        """Whether that question is asked there."""
        return number in self._asked_there.get(to, ())

    def are_open(self, to: Address) -> bool:
        """Whether something is asked there."""
        return to in self._asked_there

    def __len__(self) -> int:
        return len(self._asked)
