"""How many requests and blocks of a decode engine may wait for running prefills."""

from __future__ import annotations

from kvxferd.client import make_ref
from kvxferd.integrations.vllm.early_pulls import (
    MAX_LATE_ABANDONS,
    REPEAT_ABANDON_S,
    EarlyPullLimits,
    EarlyPulls,
    LateAbandons,
)


def test_requests_and_blocks_are_limited() -> None:
    early = EarlyPulls(EarlyPullLimits(num_requests=2, num_blocks=10))
    early.add("a", 6)
    assert early.has_room(4)
    assert not early.has_room(5)
    early.add("b", 1)
    assert not early.has_room(1), "two requests wait"
    early.remove("a")
    assert early.has_room(9)
    early.remove("a")  # its pull ends once, its request later
    assert not early.has_room(10)


def test_one_that_is_larger_than_the_limit_waits_alone() -> None:
    early = EarlyPulls(EarlyPullLimits(num_requests=2, num_blocks=10))
    assert early.has_room(100)
    early.add("a", 100)
    assert not early.has_room(1)
    early.remove("a")
    assert early.has_room(100)


def test_an_abandonment_is_repeated_for_a_while() -> None:
    now = 100.0
    late = LateAbandons(lambda: now)
    ref = make_ref("tcp://10.0.0.1:9441", "e", "g1", "t")
    late.add(ref)
    assert late.pop_due() == []
    num_reports = 0
    while now < 100 + REPEAT_ABANDON_S[-1]:
        now += 0.25
        num_reports += late.pop_due() == [ref]
    assert num_reports == len(REPEAT_ABANDON_S)
    assert late.pop_due() == []


def test_abandonments_that_are_repeated_are_limited() -> None:
    now = 100.0
    late = LateAbandons(lambda: now)
    for number in range(MAX_LATE_ABANDONS):
        late.add(make_ref("tcp://10.0.0.1:9441", "e", "g1", f"t{number}"))
    now += REPEAT_ABANDON_S[-1]
    assert len(late.pop_due()) == MAX_LATE_ABANDONS
