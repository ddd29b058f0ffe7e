"""What feeds the decisions: the order, what fails, and the timer."""

from __future__ import annotations

import asyncio
import time

from kvxferd.core.events import Tick
from kvxferd.decision_loop import DecisionLoop


class Doubling:
    """Decides on each number its double and the next, and on a tick 0 and 1; 13 is a bug."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        self.effects: list[int] = []
        self.context = self

    def feed(self, event: int | Tick, now: float) -> list[int]:
        event = 0 if isinstance(event, Tick) else event
        self.effects += [2 * event, 2 * event + 1]
        if event == 13:
            raise KeyError("a bug")
        if self.deadline is not None and now >= self.deadline:
            self.deadline = None
        return self.pop_effects()

    def pop_effects(self) -> list[int]:
        effects, self.effects = self.effects, []
        return effects

    def next_deadline(self) -> float | None:
        return self.deadline


async def test_the_effects_of_an_event_come_before_the_next_event_and_what_fails_stops_no_other() -> None:
    decisions, done, ended = Doubling(), list[int](), list[int]()

    def carry_out(effect: int) -> None:
        done.append(effect)
        if effect == 2:
            loop.feed(13)
            loop.feed(4)
            raise OSError("no descriptors")

    loop = DecisionLoop(lambda: decisions, carry_out, lambda: ended.append(len(done)))
    loop.feed(1)
    assert done == [2, 3, 26, 27, 8, 9]
    assert ended == [6]


async def test_time_that_has_passed_is_fed_at_the_earliest_deadline_alone() -> None:
    decisions, done = Doubling(), asyncio.Queue[int]()
    loop = DecisionLoop(lambda: decisions, done.put_nowait)
    began = time.monotonic()
    for delay_s in (60, 0.05):
        decisions.deadline = began + delay_s
        loop.feed(1)
    assert [await asyncio.wait_for(done.get(), 20) for _ in range(6)] == [2, 3, 2, 3, 0, 1]
    assert time.monotonic() - began >= 0.05
    assert decisions.deadline is None
