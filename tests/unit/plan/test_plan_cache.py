"""Plans are kept by content, not by object."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvxferd.errors import PlanError
from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan import Plan, PlanCache, decode_plan, encode_plan, make_plan
from tests.support.attention_engines import engine

Engine = dict[Rank, tuple[EngineSpec, RankLayout]]
FIRST = Rank(0, 0)


def asked(cache: PlanCache, sink: Engine, source: Engine, rank: Rank = FIRST) -> Plan:
    """Ask for the plan of one rank."""
    remote = {r: held[1] for r, held in source.items()}
    return cache.get(*sink[rank], source[Rank(0, 0)][0], remote)


def test_equal_layouts_share_a_plan() -> None:
    """Another engine with the same layouts is planned for already."""
    cache = PlanCache()
    first = asked(cache, engine(tp=2), engine(tp=4))
    assert asked(cache, engine(tp=2), engine(tp=4)) is first
    assert len(cache) == 1


@pytest.mark.parametrize(
    ("sink", "source", "rank"),
    [
        (engine(tp=2), engine(tp=4), Rank(0, 1)),  # another rank
        (engine(tp=2), engine(tp=2), Rank(0, 0)),  # another source
        (engine(tp=2, layout="NHD"), engine(tp=4), Rank(0, 0)),  # another layout
        (engine(tp=2), engine(tp=4, block_tokens=8), Rank(0, 0)),
    ],
)
def test_whatever_differs_is_planned_anew(sink: Engine, source: Engine, rank: Rank) -> None:
    """Rank, either layout."""
    cache = PlanCache()
    first = asked(cache, engine(tp=2), engine(tp=4))
    assert asked(cache, sink, source, rank).digest != first.digest
    assert len(cache) == 2


def test_the_oldest_plan_is_given_up_first() -> None:
    """Least recently used, and layouts do not pile up either."""
    cache = PlanCache(max_plans=2, max_layouts=2)
    source = engine(tp=4)
    first = asked(cache, engine(tp=1), source)
    asked(cache, engine(tp=2), source)
    assert asked(cache, engine(tp=1), source) is first
    asked(cache, engine(tp=4), source)
    assert len(cache) == 2
    assert asked(cache, engine(tp=1), source) is first


def test_layouts_are_kept_up_to_so_many_tensors() -> None:
    """A peer may make up as many different ones as it likes."""
    cache = PlanCache(max_tensors=20)
    for layers in range(1, 6):
        asked(cache, engine(layers=layers), engine(layers=layers))
        kept = [layout for layout, _ in cache._layouts.values()]
        assert sum(len(layout.tensors) for layout in kept) == cache._num_tensors <= 20
    plan = asked(cache, engine(layers=1), engine(layers=1))
    assert asked(cache, engine(layers=1), engine(layers=1)) is plan


def test_a_refusal_is_kept_and_costs_no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer with a layout that cannot be read would else cost a whole planning for each pull."""
    cache = PlanCache()
    made = []

    def counted(*args: Any) -> Plan:
        made.append(args)
        return make_plan(*args)

    monkeypatch.setattr("kvxferd.plan.plan_cache.make_plan", counted)
    refusals = []
    for _ in range(3):
        with pytest.raises(PlanError) as caught:
            asked(cache, engine(layers=2), engine(layers=3))
        refusals.append((str(caught.value), caught.value.code))
    assert len(made) == len(set(refusals)) == 1
    assert len(cache) == 0
    assert asked(cache, engine(layers=2), engine(layers=2))


def test_a_refusal_names_its_own_engine() -> None:
    """Of two that are alike, of two users: neither gets the other's text."""
    cache = PlanCache()
    for name in ("one", "two", "one"):
        source = {
            r: (msgspec.structs.replace(s, engine_id=name), x) for r, (s, x) in engine(layers=3).items()
        }
        with pytest.raises(PlanError, match=f"'{name}'"):
            asked(cache, engine(layers=2), source)


def test_refusals_are_kept_up_to_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """By number, and by the characters of their texts."""
    cache = PlanCache()
    for limit, least in (("MAX_REFUSALS", 4), ("MAX_REFUSAL_CHARS", 300)):
        monkeypatch.setattr(f"kvxferd.plan.plan_cache.{limit}", least)
        for layers in range(3, 13):
            with pytest.raises(PlanError):
                asked(cache, engine(layers=2), engine(layers=layers))
        assert 1 <= len(cache._refusals) <= 4
    assert sum(len(kept.message) for kept in cache._refusals.values()) <= 300


def test_a_refusal_that_is_kept_again_takes_no_room_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pull that waited for a plan keeps its refusal."""
    cache, (reader, *_) = PlanCache(), engine(layers=2).values()
    jobs = [
        cache.job(*reader, source[FIRST][0], {FIRST: source[FIRST][1]})
        for source in (engine(layers=3), engine(layers=4))
    ]
    refusals = [job.make() for job in jobs]
    monkeypatch.setattr("kvxferd.plan.plan_cache.MAX_REFUSAL_CHARS", sum(len(str(made)) for made in refusals))
    for number in (0, 1, 1, 1):
        with pytest.raises(PlanError):
            cache.put(jobs[number], refusals[number])
    for job, refusal in zip(jobs, refusals, strict=True):
        with pytest.raises(PlanError) as caught:
            cache.find(job)
        assert str(caught.value) == str(refusal)


def test_plans_travel_as_bytes() -> None:
    """Equal layouts give equal digests wherever they are planned; decoding gives the plan back."""
    sink, source = engine(tp=3, heads=6), engine(tp=2, pp=2, heads=6, layout="NHD")
    remote = {r: held[1] for r, held in source.items()}
    plan = make_plan(*sink[Rank(0, 1)], source[Rank(0, 0)][0], remote)
    again = decode_plan(encode_plan(plan))
    assert again == plan
    assert again.sources == plan.sources == tuple(source)
    assert isinstance(again.sources[0], Rank)
