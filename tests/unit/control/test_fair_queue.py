"""One queue serves threads, turns of the loop and lookups: the order and the fairness are tested here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.control.fair_queue import FairQueue

USERS = "abc"


@given(st.lists(st.sampled_from(USERS), max_size=40))
def test_users_take_turns_and_each_users_items_stay_in_order(users: list[str]) -> None:
    queue: FairQueue[str, tuple[str, int]] = FairQueue()
    left: dict[str, list[int]] = {}
    for number, user in enumerate(users):
        queue.put(user, (user, number))
        left.setdefault(user, []).append(number)
    since_turn = dict.fromkeys(left, 0)
    while queue:
        user, number = queue.get()
        assert number == left[user].pop(0)
        since_turn[user] = 0
        for other in (o for o in left if o != user and left[o]):
            since_turn[other] += 1
            assert since_turn[other] < len(left)
    assert not any(left.values())
    with pytest.raises(KeyError):
        queue.get()


def test_a_user_who_may_not_have_a_turn_is_passed_over() -> None:
    queue: FairQueue[str, int] = FairQueue()
    for number, user in enumerate("aab"):
        queue.put(user, number)
    assert queue.next_user(lambda user: user != "a") == "b"
    assert queue.get_of("a") == 0
    assert queue.next_user(lambda user: True) == "b"
    assert queue.next_user(lambda user: False) is None
    queue.clear()
    assert not queue
