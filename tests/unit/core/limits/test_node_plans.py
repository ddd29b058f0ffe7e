"""The plans of a node: what is evicted, for whom, and what pulls that read by a plan keep."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxferd.core.limits.fair_share import RESERVE_DIVISOR, SMALL_DIVISOR
from kvxferd.core.limits.node_plans import OWNER_DIVISOR, NodePlanCache
from kvxferd.errors import BusyError
from kvxferd.ids import Endpoint, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan import KeptPlan, Plan, PlanOwner, plan_bytes
from tests.support.attention_engines import engine

P, Q = Endpoint("tcp://p:9441"), Endpoint("tcp://q:9441")
((SPEC, LAYOUT),) = engine().values()
SIZE = 4096 + 1024 + 320 + 4 * 148  # of each of the plans below: K and V of two layers


def source(number: int) -> tuple[EngineSpec, dict[Rank, RankLayout]]:
    """Return an engine whose plan is like no other's: one plan for each number."""
    ((spec, layout),) = engine().values()
    groups = tuple(msgspec.structs.replace(group, num_blocks=1000 + number) for group in layout.groups)
    return spec, {Rank(0, 0): msgspec.structs.replace(layout, groups=groups)}


def keep(cache: NodePlanCache, number: int, uid: int = 0, home: Endpoint = P, now: float = 0.0) -> KeptPlan:
    """Have a plan made for a user and a peer, or found."""
    return cache.keep(SPEC, LAYOUT, *source(number), owner=PlanOwner(uid, home), now=now)


def cache_of(num_plans: int) -> NodePlanCache:
    """Return a cache with room for so many plans."""
    return NodePlanCache(max_bytes=num_plans * SIZE)


def test_a_plan_has_its_size() -> None:
    cache = cache_of(4)
    plan = keep(cache, 0).plan
    assert plan is not None
    assert plan_bytes(plan) == cache.num_bytes == SIZE


def test_an_evicted_plan_is_gone_for_the_registries_too() -> None:
    """The longest unused of the owner; a use that a registry noted counts."""
    cache = cache_of(32)
    kept = [keep(cache, number, now=float(number)) for number in range(8)]
    kept[0].used_at = 9.0
    keep(cache, 8, now=10.0)
    assert [one.plan is None for one in kept] == [False, True] + [False] * 6
    assert kept[1].sources == {0: 0b1}
    assert len(cache) == 8
    assert cache.num_bytes == 8 * SIZE
    assert keep(cache, 1, now=11.0) is not kept[1]


def test_a_peer_with_ever_new_layouts_evicts_its_own_plans() -> None:
    cache = cache_of(32)
    kept = [keep(cache, number, home=P) for number in range(6)]
    for number in range(100, 200):
        keep(cache, number, home=Q)
    assert all(one.plan for one in kept)
    assert cache.bytes_of(PlanOwner(0, Q)) == 32 // OWNER_DIVISOR * SIZE


def test_a_user_with_ever_new_peers_evicts_its_own_plans() -> None:
    cache = cache_of(64)
    kept = [keep(cache, number, uid=1) for number in range(8)]
    for number in range(100, 300):
        keep(cache, number, uid=2, home=Endpoint(f"tcp://q{number}:9441"))
    assert all(one.plan for one in kept)
    more = [keep(cache, number, uid=1) for number in range(8, 16)]
    assert all(one.plan for one in kept + more)


def test_users_that_need_plans_take_them_from_those_with_more() -> None:
    cache = cache_of(64)
    for number in range(56):
        keep(cache, number, uid=1, home=Endpoint(f"tcp://{number % 8}:9441"))
    for number in range(100, 156):
        keep(cache, number, uid=2, home=Endpoint(f"tcp://{number % 8}:9441"))
    held = Counter[int]()
    for owner, num_bytes in cache.bytes_by_owner().items():
        held[owner.uid] += num_bytes
    assert held == {1: 28 * SIZE, 2: 28 * SIZE}


def test_pulls_keep_the_plans_that_they_read_by() -> None:
    """Such plans count until the pulls have ended; what has no room is refused, the others' not."""
    cache = cache_of(32)
    others = [keep(cache, number, home=Q) for number in range(8)]
    read_by = [keep(cache, 100 + number).plan for number in range(8)]
    with pytest.raises(BusyError, match=f"of them for uid 0 from {P}; try again in 1 s") as caught:
        keep(cache, 200)
    assert caught.value.retry_after_s == 1.0
    assert all(one.plan for one in others)
    assert cache.bytes_of(PlanOwner(0, P)) == 8 * SIZE
    again = keep(cache, 100)
    assert again.plan is read_by[0]  # it was not made a second time
    del again
    read_by.clear()
    assert keep(cache, 200).plan is not None


def test_what_has_no_room_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(4)
    held = keep(cache, 0).plan
    with pytest.raises(BusyError):
        keep(cache, 1)
    monkeypatch.setattr("kvxferd.plan.plan_cache.make_plan", None)
    with pytest.raises(BusyError):
        keep(cache, 1)
    del held


USERS, HOMES = range(3), [Endpoint(f"tcp://{number}:9441") for number in range(3)]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 60), st.sampled_from(USERS), st.sampled_from(HOMES), st.booleans(), st.integers(0, 8)
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=40)
@given(STEPS)
def test_the_limits_hold_whatever_is_read(steps: list[tuple[int, int, Endpoint, bool, int]]) -> None:
    """Of the node, a user and a peer; who holds little always finds room, whatever others read by."""
    cache, reading = cache_of(32), list[Plan]()
    for clock, (number, uid, home, stays, num_ends) in enumerate(steps):
        del reading[:num_ends]
        before = held_by(cache, uid)
        try:
            plan = keep(cache, number, uid, home, now=float(clock)).plan
        except BusyError:
            assert before + SIZE > 32 * SIZE // SMALL_DIVISOR or cache.num_bytes + SIZE > 32 * SIZE
        else:
            assert plan is not None
            if stays:
                reading.append(plan)
            del plan
        assert cache.num_bytes <= 32 * SIZE
        assert all(num <= 8 * SIZE for num in cache.bytes_by_owner().values())
        for user in USERS:
            assert held_by(cache, user) <= 32 * SIZE - 32 * SIZE // RESERVE_DIVISOR
    alive = {id(plan) for plan in itertools.chain(reading, (one.plan for one in cache._kept.values()))}
    assert cache.num_bytes == len(alive) * SIZE


def held_by(cache: NodePlanCache, uid: int) -> int:
    """Return the bytes of one user's plans."""
    return sum(num for owner, num in cache.bytes_by_owner().items() if owner.uid == uid)
