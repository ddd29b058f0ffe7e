"""Peers' requests that wait for an engine, and are considered again, some in a turn, when it changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Generic, Protocol, TypeVar

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import ReplyToPeer
from kvxferd.core.limits.checks import check_waiting
from kvxferd.core.tables import decrease
from kvxferd.ids import EngineId
from kvxferd.wire.peer import StillWaiting

N = TypeVar("N")  # the name of a request
R = TypeVar("R", bound="Parked")

# Requests that one change considers in one turn of the loop: 20 us each, 5 ms. The others follow in later
# turns: all 32,768 took 640 ms, each time that a rank came or went.
REQUESTS_PER_TURN, NEXT_TURN_S = 256, 0.001
MAX_TURN_BYTES = 8 << 20  # of block ids in the replies: 10 ms


class Parked(Protocol):
    """A request that waits, and what for."""

    why: str


class ParkedRequests(ABC, Generic[N, R]):
    """Keeps requests without a reply by name and by engine, and counts them by peer."""

    def __init__(self, context: NodeContext, due_timer: str) -> None:
        self._context = context
        self._due_timer = due_timer
        self._pending: dict[N, R] = {}
        self._pending_by_engine: dict[EngineId, dict[N, None]] = {}
        self._num_pending_of_peer: Counter[str] = Counter()
        self._num_bytes_replied = 0  # of block ids, in this turn
        self._sent_at: dict[N, float] = {}  # when each was sent last
        self._due: dict[N, None] = {}  # to be considered in the next turns

    @abstractmethod
    def _consider(self, pending: R) -> None:
        """Reply to the request, or leave it parked."""

    def reconsider(self, engine_id: EngineId) -> None:
        """Consider the engine's requests again: a rank, a fence page or a mover has changed."""
        self._reconsider_all(self._pending_by_engine.get(engine_id, {}))

    def _check_waiting(self, peer_id: str) -> None:
        """Raise BusyError if one more request of that peer passes a limit."""
        of_peer = self._num_pending_of_peer[peer_id]
        check_waiting(of_peer, len(self._pending), self._context.settings.limits)

    @property
    def num_waiting(self) -> int:
        """Return how many requests wait."""
        return len(self._pending)

    @property
    def most_of_peer(self) -> int:
        """Return how many requests of the peer wait that has most."""
        return max(self._num_pending_of_peer.values(), default=0)

    def _park(self, name: N, pending: R, peer_id: str) -> None:
        self._pending[name] = pending
        self._num_pending_of_peer[peer_id] += 1
        self._note_sent(name)

    def _note_sent(self, name: N) -> None:
        """Note that the request was sent just now: it is wanted."""
        self._sent_at[name] = self._context.now

    def _reply_still_waiting(self, name: N, route: bytes, request: int) -> None:
        """Reply to a request that was sent again, if it waits here: only a dead peer is silent."""
        if (pending := self._pending.get(name)) is not None:
            self._context.emit(ReplyToPeer(route, StillWaiting(request=request, why=pending.why)))

    def _is_given_up(self, name: N) -> bool:
        """Whether its peer sends it no more: it is dead, or what took the request back was lost."""
        return self._context.now >= self._sent_at[name] + self._context.settings.gone_after_s

    def _look_again(self, timer: Hashable, name: N, left_s: float, consider: Callable[[], None]) -> None:
        """Consider a request when its time is over, and when its peer may have given it up."""
        given_up_s = self._sent_at[name] + self._context.settings.gone_after_s - self._context.now
        self._context.after(timer, min(left_s, given_up_s), consider)

    def _unpark(self, name: N, peer_id: str) -> None:
        del self._pending[name], self._sent_at[name]
        self._due.pop(name, None)
        decrease(self._num_pending_of_peer, peer_id)

    def _reconsider_all(self, concerned: dict[N, None]) -> None:
        """Consider the first requests now, and the others in later turns."""
        first = list(islice(concerned, REQUESTS_PER_TURN))
        if len(concerned) > len(first):
            self._due.update(concerned)
        self._consider_some(first)

    def _consider_some(self, names: list[N]) -> None:
        """Consider these requests, or the first of them, which may emit so much; then plan the next turn."""
        self._num_bytes_replied = 0
        for number, name in enumerate(names):
            if self._num_bytes_replied >= MAX_TURN_BYTES:
                self._due.update(dict.fromkeys(names[number:]))
                break
            self._due.pop(name, None)
            self._consider(self._pending[name])
        self._schedule_rest()

    def _schedule_rest(self) -> None:
        # The timer is never moved: frequent changes would otherwise put off the rest for ever.
        if self._due and self._due_timer not in self._context.timers:
            self._context.after(self._due_timer, NEXT_TURN_S, self._reconsider_rest)

    def _reconsider_rest(self) -> None:
        self._consider_some(list(islice(self._due, REQUESTS_PER_TURN)))
