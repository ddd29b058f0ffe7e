"""Sessions share a turn of the loop: none of a user's many keeps another user's from being read."""

from __future__ import annotations

import asyncio

import pytest

from kvxferd.control.round_robin import LOOP_TURN_S, RoundRobin

FIRST, SECOND = 1000, 2000


async def test_users_take_turns_and_not_their_sessions() -> None:
    taken: list[str] = []
    turns = RoundRobin[str](lambda session: taken.append(session) or 0.0)
    for number in range(100):
        turns.enqueue(FIRST, f"first-{number}")
    turns.enqueue(SECOND, "second-0")
    turns.enqueue(SECOND, "second-1")
    await asyncio.sleep(0)
    assert taken[:4] == ["first-0", "second-0", "first-1", "second-1"]
    assert len(taken) == 102


async def test_a_turn_of_the_loop_is_used_up_by_all_together() -> None:
    taken: list[int] = []
    turns = RoundRobin[int](lambda session: taken.append(session) or LOOP_TURN_S / 4)
    for number in range(10):
        turns.enqueue(FIRST, number)
    for expected in (4, 8, 10):
        await asyncio.sleep(0)
        assert len(taken) == expected


async def test_who_is_read_at_once_uses_the_turn_up_too() -> None:
    taken: list[int] = []
    turns = RoundRobin[int](lambda session: taken.append(session) or LOOP_TURN_S / 4)
    came = [turns.run_now(number) for number in range(6)]
    assert came == [True] * 4 + [False] * 2
    assert taken == [0, 1, 2, 3]
    await asyncio.sleep(0)
    assert turns.run_now(6)


async def test_nobody_goes_before_those_who_wait() -> None:
    turns = RoundRobin[int](lambda session: 0.0)
    turns.enqueue(FIRST, 1)
    assert not turns.run_now(2)
    await asyncio.sleep(0)
    assert turns.run_now(2)


async def test_one_that_raises_keeps_no_other_from_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def take(session: int) -> float:
        if session == 1:
            raise RuntimeError
        taken.append(session)
        return 0.0

    loop = asyncio.get_running_loop()
    raised: list[object] = []
    loop.set_exception_handler(lambda loop, context: raised.append(context["exception"]))
    turns = RoundRobin[int](take)
    for number in range(3):
        turns.enqueue(FIRST, number)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert taken == [0, 2]
    assert len(raised) == 1
