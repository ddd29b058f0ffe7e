"""Registering and leaving in a loop has a mover made each time: a user's rate is limited."""

from __future__ import annotations

from kvxferd.core.rate_limit import RateLimiter
from kvxferd.core.registration_checks import REGISTER_BURST, REGISTER_PER_S
from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from tests.support.simulation import FIRST, SECOND, World, spec_of


def test_a_burst_then_so_many_a_second_of_each_user() -> None:
    rate = RateLimiter(burst=3, per_s=2.0)
    assert [rate.acquire(FIRST, 10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert rate.acquire(SECOND, 10.0) == 0.0
    assert rate.acquire(FIRST, 10.5) == 0.0
    assert rate.acquire(FIRST, 10.5) == 0.5
    for uid in range(100):
        rate.acquire(uid, 11.0)
    rate.acquire(FIRST, 100.0)
    assert len(rate._buckets) == 1


def test_who_registers_and_leaves_in_a_loop_is_busy_and_others_register() -> None:
    world = World()
    host = world.host("p")
    for _ in range(REGISTER_BURST):
        worker = world.register(host, spec_of("a"), uid=FIRST)
        assert worker.heard(wk.Registered)
        worker.close()
    num_movers = len(host.movers)
    (refused,) = world.register(host, spec_of("a"), uid=FIRST).heard(wk.Refused)
    assert refused.code is Code.BUSY
    assert 0 < refused.retry_after_s <= 1 / REGISTER_PER_S
    assert len(host.movers) == num_movers
    assert world.register(host, spec_of("b"), uid=SECOND).heard(wk.Registered)
    world.advance(refused.retry_after_s)
    assert world.register(host, spec_of("a"), uid=FIRST).heard(wk.Registered)
