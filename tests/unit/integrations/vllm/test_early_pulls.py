"""How many requests and blocks of a decode engine may wait for running prefills."""

from __future__ import annotations

from kvxferd.integrations.vllm.early_pulls import EarlyPullLimits, EarlyPulls


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
