"""The registry of a rank's remote engines: what is kept of each, refused, replaced and forgotten."""

from __future__ import annotations

import gc
import weakref

import msgspec
import pytest

from kvxferd.errors import Code, EngineError, NotPPAwareError, PlanError
from kvxferd.ids import Endpoint, EngineId, Generation, Rank
from kvxferd.plan import Plan, PlanJob, PlanKey, TransferTopology, make_plan, stage_infos
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


def register(made: TransferTopology, of: FetchedEngine, home: Endpoint = P, *, now: float = 0.0) -> Plan:
    """Register an engine, with a plan made here and now."""
    return made.plan_remote_engine(of, home=home, now=now)


def job_of(of: TransferTopology, source: FetchedEngine) -> PlanJob:
    """Return what is to be planned of an engine, of which nothing is planned yet."""
    jobs: list[PlanJob] = []

    def find_none(job: PlanJob) -> None:
        jobs.append(job)

    assert of.register_remote_engine(source, find_none, home=P) is None
    return jobs[0]


def test_an_entry_holds_facts_generation_sources_and_last_use() -> None:
    """The seeds' facts by pp_rank, and what the daemon adds."""
    made, source = topology(), remote(tp=2, pp=2)
    register(made, source, now=7.0)
    (kept,) = made.engines()
    assert kept is made.find(REMOTE) is made.find(REMOTE, P)
    assert (kept.engine_id, kept.home, kept.generation, kept.last_used) == (REMOTE, P, "g1", 7.0)
    assert kept.stages == stage_infos(source.spec, source.ranks)
    assert [(s.start_layer, s.end_layer) for s in kept.stages.values()] == [(0, 1), (1, 2)]
    assert [made.target_remote_ranks(REMOTE, stage) for stage in (0, 1)] == [[0, 1], [0, 1]]
    assert "target_remote_ranks=[0, 1]" in made.describe(REMOTE)


def test_the_door_returns_what_is_planned_and_none_until_it_is() -> None:
    """Until then nothing has changed."""
    made, source = topology(), remote(tp=2)
    job = job_of(made, source)
    assert not list(made.engines())
    reads = job.make()
    assert made.register_remote_engine(source, lambda again: {job.key: reads}[again.key], home=P) is reads
    assert reads.sources == (Rank(0, 0), Rank(0, 1))
    assert reads.plan == make_plan(made.spec, made.layout, source.spec, source.ranks)


def test_the_registry_keeps_neither_manifest_nor_plan() -> None:
    """Their bytes count for users. The facts stay, and which ranks are read."""
    made, manifest = topology(), remote(tp=2)
    reads = made.register_remote_engine(manifest, PlanJob.make, home=P)
    assert reads is not None
    freed = weakref.ref(manifest), weakref.ref(reads)
    del manifest, reads
    gc.collect()
    assert [one() for one in freed] == [None, None]
    assert made.target_remote_ranks(REMOTE) == [0, 1]
    with pytest.raises(EngineError, match="the digest of its ranks' layouts was"):
        register(made, remote(tp=2, block_tokens=8))


def key(of: TransferTopology, source: FetchedEngine) -> PlanKey:
    """Return what the plan of a pair depends on."""
    return job_of(of, source).key


@pytest.mark.parametrize(
    ("mine", "theirs"), [({}, {"tp": 4}), ({}, {"layout": "NHD"}), ({"block_tokens": 8}, {})]
)
def test_what_a_plan_depends_on_is_in_its_key(mine: dict[str, int], theirs: dict[str, int]) -> None:
    """Either layout, and its size; another engine that is equal has the same plan."""
    (reader,) = engine(**mine).values()
    assert key(TransferTopology(*reader), remote(**theirs)) != key(topology(), remote())
    assert key(topology(), remote("other", "g7", tp=2)) == key(topology(), remote(tp=2))


def test_each_rank_has_a_key_of_its_own() -> None:
    keys = {key(TransferTopology(*own), remote()) for own in engine(tp=2).values()}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"tp": 4}, ["tp_size was 2 and is 4", "the digest of its ranks' layouts was"]),
        ({"layout": "NHD"}, ["the digest of its ranks' layouts was"]),
        ({"pp": 2}, ["pp_size was 1 and is 2"]),
    ],
)
def test_other_facts_under_one_generation_are_refused_field_by_field(
    other: dict[str, int | str], named: list[str]
) -> None:
    """And what was known stays, as it was last used."""
    made = topology()
    source = remote(tp=2)
    register(made, source, now=1.0)
    with pytest.raises(EngineError) as caught:
        register(made, remote(**{"tp": 2} | other), now=2.0)
    assert caught.value.code is Code.SHAPE_MISMATCH
    for text in named:
        assert text in str(caught.value)
    assert made.find(REMOTE).spec is source.spec
    assert made.find(REMOTE).last_used == 1.0


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
    with pytest.raises(PlanError):
        register(made, remote(layers=3, generation="g2"), Q, now=3.0)  # cannot be read: nothing is dropped
    assert made.find(REMOTE, Q).generation == "g1"
    register(made, at_q, Q, now=4.0)
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
    monkeypatch.setattr(registry, "MAX_REMOTE_ENGINES", 4)
    register(made, remote("e6"), P, now=9.0)
    assert [kept.engine_id for kept in made.engines()] == ["e4", "e5", "e1", "e6"]
    made.expire(10.0)
    assert not list(made.engines())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({1: {"start_layer": 2}}, r"layer 1, and its stage the layers \[2, 2\)"),
        ({1: {"end_layer": 1}}, r"layer 1, and its stage the layers \[1, 1\)"),
        ({0: {"end_layer": 0}}, "component 'k' of layer 0"),
    ],
)
def test_stages_hold_every_tensor_that_is_read(change: dict[int, dict[str, int]], text: str) -> None:
    """That they hold every layer once is checked when a manifest is fetched."""
    found = remote(pp=2)
    ranks = dict(found.ranks)
    for pp_rank, fields in change.items():
        ranks[Rank(pp_rank, 0)] = msgspec.structs.replace(ranks[Rank(pp_rank, 0)], **fields)
    made = topology()
    with pytest.raises(PlanError, match=text) as caught:
        register(made, FetchedEngine(found.spec, ranks))
    assert caught.value.code is Code.LAYERS_MISSING
    assert not list(made.engines())


def test_an_engine_that_is_no_other_or_too_deep_is_not_registered() -> None:
    made = topology()
    with pytest.raises(EngineError, match="it is this rank's own") as caught:
        register(made, remote(made.spec.engine_id))
    assert caught.value.code is Code.NOT_ALLOWED
    shallow = TransferTopology(msgspec.structs.replace(made.spec, pp_aware=False), made.layout)
    register(shallow, remote(tp=2))
    with pytest.raises(NotPPAwareError, match="is not PP-aware"):
        register(shallow, remote("deep", pp=2))
