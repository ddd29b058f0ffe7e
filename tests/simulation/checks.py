"""What must be true, seen from outside: each promise of `docs/concepts.md` and the design has one check here.

A check that looks at one moment raises by `World.violate`. One that looks at a time, such as "within two
seconds", is an expectation: its time begins anew whenever a fault strikes one of the parties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world import World

LOOK_S = 0.25  # between two looks at an expectation
MEASURE_S = 0.05  # likewise, where it is measured when it comes true
CALM_S = 14.0  # so long after a fault it shows no more: a home knows a restarted node's ranks within 12


class Check(StrEnum):
    """The promises."""

    RIGHT_BYTES = "a delivered pull has exactly the published bytes"
    ALL_BYTES = "a delivered pull names as many bytes, and runs, as its rank holds of the request"
    UNTOUCHED = "nobody writes blocks that are not a pull's"
    BEFORE_KERNELS = "nobody writes blocks before the kernels that use them have ended"
    NOT_WHOLE = "a pull that is not progressive reads nothing before all is written"
    PROGRESS = "a progressive pull has read what it can before its source writes the rest"
    FREED = "nobody has memory that was given back"
    ONE_END = "a pull ends once, and is quiesced once and only where it was in doubt"
    DEADLINE = "a pull ends within its deadline"
    OWN_TIMER = "a client ends no pull by its own timer while its daemon runs"
    SAFE = "nobody writes blocks that are said to be safe to reuse"
    DOUBT = "blocks in doubt come back"
    REASON = "a pull fails for a reason that there is"
    RELEASED_ONCE = "a transfer is released once to each rank"
    RELEASE_REASON = "a transfer is released for a reason that there is"
    WORD_FIRST = "a transfer's fence word is over before anybody hears of its release"
    WITHDRAWN = "a transfer that is withdrawn is released"
    RELEASE_HEARD = "each rank hears of a release"
    COMPLETED = "a transfer that all its readers have is released"
    LEASE = "a transfer that nobody reads is released when its lease is over"
    ID_ONCE = "a transfer's id is used once in a generation"
    PUBLISHED = "an honest publish is not refused, and its reference names its trace"
    REFUSED = "a wrong call is refused with its code, and nothing is handled behind a refused hello"
    LIMIT = "a daemon takes no more of an engine than its limits allow"
    SUSPENDS = "a rank that is to sleep can"
    SUSPENDED_AFTER = "a rank sleeps after its pulls and transfers have ended"
    DRAINED = "a daemon that drains ends in time, and after its movers"
    REGISTERED = "an engine is registered again after its daemon is back"
    CANCELLED = "a cancelled pull ends"
    ADMITTED = "a daemon speaks with nobody whom it does not admit, and admitting more cuts nobody off"
    WORKS_AGAIN = "a transfer at rest arrives at the first attempt"
    QUIET = "nothing is asked twice at rest, nor what was given up, nor anything of a peer that is silent"
    LIBRARY = "the transfer library is used as it must be"
    NO_BUG = "no part of the daemon, client or mover raises or logs an error of its own"
    INTEGRITY = "a daemon's tables agree"
    SILENT = "a reader does not wait for a daemon that is gone"
    READY = "a reader is told when what it waits for is there"
    TURN = "a turn of a daemon's loop sends a bounded amount"
    REST = "what has ended is not kept"
    RECORDED = "a daemon tells operators of engines what is so"
    IDLE = "who has nothing to do sleeps"
    HUNG = "something goes on"


class Violation(Exception):
    """A promise is broken."""

    def __init__(self, check: Check, text: str) -> None:
        super().__init__(f"{check.name}: {text}")
        self.check, self.text = check, text


@dataclass(eq=False)
class Expectation:
    """Something that must come true within a time in which no fault strikes its parties."""

    check: Check
    text: str
    parties: tuple[Hashable, ...]
    within_s: float
    soon_s: float  # likewise, where all is calm
    is_met: Callable[[], bool]
    began: float


class Expectations:
    """All that is waited for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._disturbed: dict[Hashable, float] = {}  # by party: until when
        self._open: dict[Expectation, None] = {}
        self.took_s: dict[str, list[float]] | None = None  # by check: what expectations took, if measured
        self.is_halted: Callable[[tuple[Hashable, ...]], bool] = lambda parties: False  # one does not run

    def disturb(self, seconds: float, *parties: Hashable) -> None:
        """A fault strikes these parties, and lasts so long."""
        until = self._world.kernel.now + seconds
        for party in parties:
            self._disturbed[party] = max(until, self._disturbed.get(party, 0.0))

    def is_disturbed(self, since: float, *parties: Hashable) -> bool:
        """Whether a fault has struck one of them since."""
        return any(self._disturbed.get(party, 0.0) >= since for party in parties)

    def is_calm(self, since: float = math.inf) -> bool:
        """Whether no fault shows that has struck anybody, now and since then."""
        everybody, since = tuple(self._disturbed), min(since, self._world.kernel.now)
        return not self.is_disturbed(since - CALM_S, *everybody) and not self.is_halted(everybody)

    @property
    def unmet(self) -> Iterator[Expectation]:
        """What has not come true yet."""
        return (one for one in self._open if not one.is_met())

    def expect(
        self,
        check: Check,
        text: str,
        parties: tuple[Hashable, ...],
        within_s: float,
        is_met: Callable[[], bool],
        soon_s: float = math.inf,
    ) -> None:
        """Have it checked that `is_met` becomes true. Where all is calm, it does so within `soon_s`."""
        now, soon_s = self._world.kernel.now, min(soon_s, within_s)
        expectation = Expectation(check, text, parties, within_s, soon_s, is_met, now)
        self._open[expectation] = None
        self._world.kernel.at(now + soon_s + 1e-3, lambda: self._look(expectation))
        if self.took_s is not None:
            self._measure(expectation, self.took_s)

    def _measure(self, one: Expectation, took_s: dict[str, list[float]]) -> None:
        if one.is_met():
            took_s.setdefault(one.check.name, []).append(max(0.0, self._world.kernel.now - self._began(one)))
        elif one in self._open:
            self._world.after(MEASURE_S, self._measure, one, took_s)

    def _began(self, one: Expectation) -> float:
        """Return since when it is undisturbed."""
        return max([one.began, *(self._disturbed.get(party, 0.0) for party in one.parties)])

    def _look(self, one: Expectation) -> None:
        if one.is_met():
            self._open.pop(one, None)
            return
        now, began = self._world.kernel.now, self._began(one)
        within_s = one.soon_s if self.is_calm(one.began) else one.within_s
        if now <= began + within_s:
            self._world.kernel.at(began + within_s + 1e-3, lambda: self._look(one))
            return
        if self.is_halted(one.parties):
            self._world.kernel.at(now + LOOK_S, lambda: self._look(one))
            return
        self._world.violate(one.check, f"{one.text}; not within {within_s:g} s")
