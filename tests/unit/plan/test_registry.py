"""The registry of a rank's remote engines: what is kept of each, refused, replaced and forgotten."""

from __future__ import annotations

import gc
import weakref

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.errors import Code, EngineError, KvxferdError, PlanError
from kvxferd.ids import Endpoint, EngineId, Generation, Rank
from kvxferd.layout.validate import MAX_STAGES
from kvxferd.plan import Plan, PlanCache, TransferTopology, stage_infos
from kvxferd.plan import topology as registry
from tests.support.attention_engines import engine, layout_of, spec
from tests.support.fetched_engine import FetchedEngine, fetched

REMOTE = EngineId("remote")
P, Q = Endpoint("tcp://p:9441"), Endpoint("tcp://q:9441")


def topology() -> TransferTopology:
    """Return the topology of rank (0, 0) of a TP=1 engine."""
    own = spec()
    return TransferTopology(own, layout_of(own))


def remote(engine_id: str = REMOTE, generation: str = "g1", **facts: int | str) -> FetchedEngine:
    """Return a remote engine."""
    found = fetched(engine(**facts))  # type: ignore[arg-type]
    named = msgspec.structs.replace(
        found.spec, engine_id=EngineId(engine_id), generation=Generation(generation)
    )
    return FetchedEngine(named, found.ranks)


def register(
    made: TransferTopology,
    of: FetchedEngine,
    home: Endpoint = P,
    *,
    plans: PlanCache | None = None,
    now: float = 0.0,
) -> Plan:
    """Register an engine, with a cache of plans of its own unless one is given."""
    return made.plan_remote_engine(of, PlanCache() if plans is None else plans, home=home, now=now)


def test_an_entry_holds_facts_generation_plan_and_last_use() -> None:
    """The seeds' facts by pp_rank, and what the daemon adds."""
    made, source = topology(), remote(tp=2, pp=2)
    plan = register(made, source, now=7.0)
    (kept,) = made.engines()
    assert kept is made.find(REMOTE) is made.find(REMOTE, P)
    assert (kept.engine_id, kept.home, kept.generation, kept.last_used) == (REMOTE, P, "g1", 7.0)
    assert kept.plan is plan
    assert kept.stages == stage_infos(source.spec, source.ranks)
    assert [(s.start_layer, s.end_layer) for s in kept.stages.values()] == [(0, 1), (1, 2)]
    assert kept.manifest() is source


def test_registering_again_keeps_the_plan_and_counts_as_a_use() -> None:
    """Idempotent: with the same manifest, and with the next one of equal facts."""
    made, first = topology(), remote(tp=2)
    second = FetchedEngine(first.spec, dict(first.ranks))
    plan = register(made, first, now=1.0)
    assert made.use(REMOTE, P, first, 2.0) is plan
    assert made.use(REMOTE, P, second, 3.0) is None
    assert made.find(REMOTE).last_used == 2.0
    assert register(made, second, now=4.0) is plan  # though that cache had none
    assert made.use(REMOTE, P, first, 5.0) is None
    assert made.use(REMOTE, P, second, 5.0) is plan
    assert len(list(made.engines())) == 1


def test_the_registry_does_not_keep_a_manifest() -> None:
    """Its bytes count for a user for as long as anything refers to it. Facts and plan stay."""
    made, plans, manifest = topology(), PlanCache(), remote(tp=2)
    plan = register(made, manifest, plans=plans)
    freed = weakref.ref(manifest)
    del manifest
    gc.collect()
    assert freed() is None
    assert made.find(REMOTE).manifest() is None
    assert made.target_remote_ranks(REMOTE) == [0, 1]
    assert made.find(REMOTE).plan is plan
    assert register(made, remote(tp=2), plans=plans) is plan


def test_a_plan_that_was_evicted_is_made_again_on_the_next_use() -> None:
    """The facts stay, and which ranks are read."""
    made, source, plans = topology(), remote(tp=2, pp=2), PlanCache(max_plans=1)
    register(made, source, plans=plans)
    other = remote("other", tp=4)
    register(made, other, plans=plans)
    kept = made.find(REMOTE)
    assert kept.plan is None
    assert [made.target_remote_ranks(REMOTE, stage) for stage in (0, 1)] == [[0, 1], [0, 1]]
    assert "target_remote_ranks=[0, 1]" in made.describe(REMOTE)
    assert made.use(REMOTE, P, source, 2.0) is None
    again = register(made, source, plans=plans, now=2.0)
    assert made.find(REMOTE) is kept
    assert made.use(REMOTE, P, source, 3.0) is again is kept.plan
    assert made.find(EngineId("other")).plan is None
    with pytest.raises(EngineError, match="block_size was 4 and is 8"):
        register(made, remote(tp=2, pp=2, block_tokens=8), plans=plans)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"tp": 4}, ["tp_size was 2 and is 4", "remote_tp_size was 2 and is 4"]),
        ({"block_tokens": 8}, ["remote_block_size was 4 and is 8", "the digest of its ranks' layouts was"]),
        ({"layout": "NHD"}, ["the digest of its ranks' layouts was"]),
        ({"pp": 2}, ["pp_size was 1 and is 2", "end_layer was 2 and is 1"]),
    ],
)
def test_other_facts_under_one_generation_are_refused_field_by_field(
    other: dict[str, int | str], named: list[str]
) -> None:
    """And what was known stays, as it was last used."""
    made = topology()
    source = remote(tp=2)
    plan = register(made, source, now=1.0)
    with pytest.raises(EngineError) as caught:
        register(made, remote(**{"tp": 2} | other), now=2.0)
    assert caught.value.code is Code.SHAPE_MISMATCH
    for text in named:
        assert text in str(caught.value)
    assert made.find(REMOTE).plan is plan
    assert made.find(REMOTE).last_used == 1.0


def test_a_new_generation_replaces_everything_of_the_old_one() -> None:
    """One entry for each engine and home."""
    made = topology()
    register(made, remote(tp=2, pp=2), P)
    register(made, remote(tp=4, generation="g2"), P)
    (kept,) = made.engines()
    assert kept.generation == "g2"
    assert list(kept.stages) == [0]
    assert made.target_remote_ranks(REMOTE) == [0, 1, 2, 3]


def test_a_new_generation_that_cannot_be_read_leaves_the_old_one() -> None:
    """Nothing is dropped for it."""
    made = topology()
    plan = register(made, remote(tp=2), P)
    with pytest.raises(PlanError):
        register(made, remote(layers=3, generation="g2"), P)
    assert made.find(REMOTE).plan is plan


def test_two_homes_of_one_engine_id_have_an_entry_each() -> None:
    """With one generation and different facts: neither refuses, replaces or answers for the other."""
    made = topology()
    register(made, remote(tp=2), P, now=1.0)
    at_q = remote(tp=4)
    register(made, at_q, Q, now=2.0)
    assert [made.get_engine_info(REMOTE, home=home).remote_tp_size for home in (P, Q)] == [2, 4]
    assert [made.target_remote_ranks(REMOTE, home=home) for home in (P, Q)] == [[0, 1], [0, 1, 2, 3]]
    assert made.get_engine_info(REMOTE).remote_tp_size == 4  # of the last used
    register(made, remote(tp=2), P, now=3.0)
    assert made.get_engine_info(REMOTE).remote_tp_size == 2
    assert "remote_tp_size=4" in made.describe(REMOTE, home=Q)
    assert made.use(REMOTE, Q, at_q, 4.0) is not None
    made.expire(4.0)
    assert [kept.home for kept in made.engines()] == [Q]
    with pytest.raises(EngineError, match="of tcp://p:9441") as caught:
        made.find(REMOTE, P)
    assert caught.value.code is Code.ENGINE_UNKNOWN


def test_the_longest_unused_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """By time and by number."""
    made = topology()
    for number in range(6):
        register(made, remote(f"e{number}"), P, now=float(number))
    register(made, remote("e1"), P, now=9.0)
    made.expire(3.0)
    assert [kept.engine_id for kept in made.engines()] == ["e3", "e4", "e5", "e1"]
    monkeypatch.setattr(registry, "MAX_REMOTE_ENGINES", 3)
    made.expire()
    assert [kept.engine_id for kept in made.engines()] == ["e4", "e5", "e1"]
    made.expire(10.0)
    assert not list(made.engines())


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({1: {"start_layer": 2}}, Code.LAYERS_MISSING, r"layers \[1, 2\) are held by no stage"),
        ({1: {"start_layer": 0}}, Code.LAYERS_MISSING, "stage 0 already holds those up to 0"),
        ({1: {"end_layer": 1}}, Code.LAYERS_MISSING, r"hold layers \[0, 1\) of 2"),
        ({0: {"end_layer": 0}, 1: {"start_layer": 0}}, Code.LAYERS_MISSING, "component 'k' of layer 0"),
    ],
)
def test_stages_hold_the_model_and_every_tensor_that_is_read(
    change: dict[int, dict[str, int]], code: Code, text: str
) -> None:
    """They are checked when a manifest is fetched, too."""
    found = remote(pp=2)
    ranks = dict(found.ranks)
    for pp_rank, fields in change.items():
        ranks[Rank(pp_rank, 0)] = msgspec.structs.replace(ranks[Rank(pp_rank, 0)], **fields)
    made = topology()
    with pytest.raises(KvxferdError, match=text) as caught:
        register(made, FetchedEngine(found.spec, ranks))
    assert caught.value.code is code
    assert not list(made.engines())


SMALL = {number: remote(f"e{number % 3}", f"g{number // 3 % 2}", tp=1 + number // 6) for number in range(12)}


PLANS = PlanCache()


@given(st.lists(st.tuples(st.integers(0, 11), st.sampled_from([P, Q]), st.floats(0, 5)), max_size=20))
def test_any_order_of_registrations_keeps_the_last_accepted(steps: list[tuple[int, Endpoint, float]]) -> None:
    """Beside a model: a dict by (id, home), other facts under one generation refused, the order of use."""
    made, now = topology(), 0.0
    model: dict[tuple[str, str], tuple[str, int, float]] = {}
    for number, home, later in steps:
        spec = SMALL[number].spec
        now += later
        key, tp = (spec.engine_id, home), spec.tp_size
        known = model.get(key)
        if known is not None and known[0] == spec.generation and known[1] != tp:
            with pytest.raises(EngineError):
                register(made, SMALL[number], home, plans=PLANS, now=now)
        else:
            register(made, SMALL[number], home, plans=PLANS, now=now)
            model.pop(key, None)
            model[key] = (spec.generation, tp, now)
        if now > 8.0:
            made.expire(now - 8.0)
            model = {key: held for key, held in model.items() if held[2] >= now - 8.0}
    assert [(e.engine_id, e.home) for e in made.engines()] == list(model)
    assert [(e.generation, e.stages[0].remote_tp_size, e.last_used) for e in made.engines()] == [
        *model.values()
    ]


def test_a_refusal_of_many_stages_is_short() -> None:
    """It goes to the worker as one message."""
    found = remote(layers=2)
    beyond = msgspec.structs.replace(found.ranks[Rank(0, 0)], start_layer=2, end_layer=2, tensors=())
    many = {**found.ranks} | {Rank(number, 0): beyond for number in range(1, MAX_STAGES)}
    made = topology()
    register(made, FetchedEngine(msgspec.structs.replace(found.spec, pp_size=MAX_STAGES), many))
    with pytest.raises(EngineError, match=r"; and \d+ more; an engine") as caught:
        register(made, found)
    assert len(str(caught.value)) < 4096
