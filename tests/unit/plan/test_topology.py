"""The field's vocabulary, pinned to the golden numbers (rows 1 to 3), and the registry of remote engines."""

from __future__ import annotations

import gc
import weakref

import msgspec
import pytest

from kvxferd.errors import Code, EngineError, NotPPAwareError, PlanError
from kvxferd.ids import Endpoint, EngineId, Generation, Rank
from kvxferd.layout.presets import deploy
from kvxferd.layout.sharding import shard_units
from kvxferd.layout.tensors import num_units
from kvxferd.plan import Plan, PlanJob, PlanKey, TransferTopology
from kvxferd.plan import topology as registry
from tests.support.attention_engines import engine, layout_of, spec
from tests.support.fetched_engine import FetchedEngine, fetched

REMOTE = EngineId("remote")
P, Q = Endpoint("tcp://p:9441"), Endpoint("tcp://q:9441")


def topology(tp: int = 1, rank: int = 0, *, heads: int = 4, block_tokens: int = 4) -> TransferTopology:
    """Return the topology of one rank of a plain engine."""
    own = spec(tp=tp, heads=heads, rank=(0, rank))
    return TransferTopology(own, layout_of(own, block_tokens=block_tokens))


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


@pytest.mark.parametrize(("tp", "remote_tp", "want"), [(4, 2, 2), (2, 4, -2), (2, 2, 1), (1, 8, -8)])
def test_tp_ratio(tp: int, remote_tp: int, want: int) -> None:
    """GOLDEN row 1."""
    assert topology(tp).tp_ratio(remote_tp) == want


@pytest.mark.parametrize(("tp", "remote_tp"), [(3, 2), (6, 4)])
def test_tp_sizes_that_do_not_divide_have_no_ratio(tp: int, remote_tp: int) -> None:
    """GOLDEN row 1: an error that names both, and a description nonetheless."""
    made = topology(tp)
    with pytest.raises(ValueError, match=f"{tp}.*{remote_tp}"):
        made.tp_ratio(remote_tp)
    register(made, remote(tp=remote_tp))
    assert "tp_ratio=None" in made.describe(REMOTE)


def test_block_size_ratio() -> None:
    """GOLDEN row 1."""
    assert topology(1, block_tokens=32).block_size_ratio(16) == 2
    with pytest.raises(ValueError, match=r"16.*32"):
        topology(1, block_tokens=16).block_size_ratio(32)


@pytest.mark.parametrize(
    ("heads", "tp", "first", "counts"),
    [
        (2, 8, [0, 0, 0, 0, 1, 1, 1, 1], [1] * 8),
        (4, 8, [0, 0, 1, 1, 2, 2, 3, 3], [1] * 8),
        (8, 2, [0, 4], [4, 4]),
        (8, 8, list(range(8)), [1] * 8),
        (8, 3, [0, 3, 6], [3, 3, 2]),
    ],
)
def test_heads_of_each_rank(heads: int, tp: int, first: list[int], counts: list[int]) -> None:
    """GOLDEN row 1: of a rank beyond the heads r*K//TP; for unequal shards, the rank's real count."""
    held = [shard_units(heads, tp, rank) for rank in range(tp)]
    assert [units[0].start for units in held] == first
    assert [num_units(units) for units in held] == counts
    assert [layout.tensors[0].num_units for _, layout in engine(tp=tp, heads=heads).values()] == counts


@pytest.mark.parametrize(
    ("tp", "remote_tp", "want"),
    [
        (4, 2, [[0], [0], [1], [1]]),
        (2, 4, [[0, 1], [2, 3]]),
        (3, 2, [[0], [0, 1], [1]]),  # sizes that do not divide: those whose share meets ours
    ],
)
def test_handshake_target_ranks(tp: int, remote_tp: int, want: list[list[int]]) -> None:
    """GOLDEN row 2."""
    assert [topology(tp, rank).handshake_target_ranks(remote_tp) for rank in range(tp)] == want


@pytest.mark.parametrize(
    ("dcp", "tp", "remote_dcp", "remote_tp", "want"),
    [
        # Each is (dcp_size in 1, tp_size) of vLLM's formula: r % local DCP, or local rank % remote DCP.
        (1, 2, 4, 4, [[0, 1, 2, 3]] * 2),
        (2, 2, 4, 4, [[0, 2], [1, 3]]),
        (4, 4, 2, 2, [[0], [1], [0], [1]]),
        (2, 2, 1, 2, [[0], [1]]),
        # Two shares of the heads and two of the tokens on both sides: one rank each.
        (2, 4, 2, 4, [[0], [1], [2], [3]]),
        (3, 3, 2, 2, [[0, 1]] * 3),  # sizes that do not divide
    ],
)
def test_handshake_target_ranks_of_engines_that_share_tokens(
    dcp: int, tp: int, remote_dcp: int, remote_tp: int, want: list[list[int]]
) -> None:
    ranks = deploy("tiny-mla", tp=tp // dcp, cp=dcp)
    found = [
        TransferTopology(*ranks[Rank(0, rank)]).handshake_target_ranks(remote_tp, remote_dcp)
        for rank in range(tp)
    ]
    assert found == want
    made = TransferTopology(*ranks[Rank(0, tp - 1)])
    register(made, fetched(deploy("tiny-mla", tp=remote_tp // remote_dcp, cp=remote_dcp, engine_id=REMOTE)))
    terms = made.terms(REMOTE)
    assert (terms["local_dcp_size"], terms["remote_dcp_size"]) == (dcp, remote_dcp)
    assert terms["handshake_target_ranks"] == want[-1]


@pytest.mark.parametrize(
    ("remote_tp", "is_replicated", "handshake", "target"),
    [(1, False, [0], [0]), (2, False, [1], [1]), (4, True, [2, 3], [2])],
)
def test_target_remote_ranks(
    remote_tp: int, is_replicated: bool, handshake: list[int], target: list[int]
) -> None:
    """GOLDEN row 2: K2, L2, r1."""
    made = topology(2, 1, heads=2)
    register(made, remote(tp=remote_tp, heads=2))
    assert made.is_kv_replicated(REMOTE) is is_replicated
    assert made.replicates_kv_cache(REMOTE) is is_replicated
    assert made.handshake_target_ranks(remote_tp) == handshake
    assert made.target_remote_ranks(REMOTE) == target


def test_two_stages_are_kept_apart() -> None:
    """GOLDEN row 3: the default pp_rank is stage 0; keys (e, 0) and (e, 1); layers (0, 16) and (16, 32)."""
    own = spec(layers=32)
    made = TransferTopology(own, layout_of(own))
    register(made, remote(tp=2, pp=2, layers=32))
    first, second = made.get_engine_info(REMOTE), made.get_engine_info(REMOTE, 1)
    assert made.get_engine_info(REMOTE, 0) is first
    assert (first.remote_pp_rank, second.remote_pp_rank) == (0, 1)
    assert (first.start_layer, first.end_layer) == (0, 16)
    assert (second.start_layer, second.end_layer) == (16, 32)
    with pytest.raises(EngineError, match="engine 'remote', stage 2: it is not registered") as caught:
        made.get_engine_info(REMOTE, 2)
    assert caught.value.code is Code.ENGINE_UNKNOWN


def test_terms_of_a_stage_of_attention() -> None:
    """No words for states. A log has them as one line."""
    made = topology(2, 1, heads=2, block_tokens=16)
    register(made, remote(tp=4, heads=2, block_tokens=16))
    terms = made.terms(REMOTE)
    assert (terms["local_rank"], terms["generation"], terms["home"]) == (Rank(0, 1), "g1", P)
    assert (terms["remote_block_len"], terms["remote_block_size"]) == (64, 16)  # 16 tokens of 4 bytes
    assert (terms["tp_ratio"], terms["block_size_ratio"]) == (-2, 1)
    assert (terms["handshake_target_ranks"], terms["target_remote_ranks"]) == ([2, 3], [2])
    assert "fa_head_slots" not in terms
    line = made.describe(REMOTE)
    assert line.startswith("TransferTopology(local_engine_id=prefill, local_rank=pp0.tp1, ")
    assert "\n" not in line


# --- the registry of a rank's remote engines: what is kept of each, refused, replaced and forgotten


def job_of(of: TransferTopology, source: FetchedEngine) -> PlanJob:
    """Return what is to be planned of an engine, of which nothing is planned yet."""
    jobs: list[PlanJob] = []

    def find_none(job: PlanJob) -> None:
        jobs.append(job)

    assert of.register_remote_engine(source, find_none, home=P) is None
    assert not list(of.engines())
    return jobs[0]


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
    """Either layout, its size, and the rank that reads; another engine that is equal has the same plan."""
    (reader,) = engine(**mine).values()
    assert key(TransferTopology(*reader), remote(**theirs)) != key(topology(), remote())
    assert key(topology(), remote("other", "g7", tp=2)) == key(topology(), remote(tp=2))
    assert len({key(TransferTopology(*own), remote()) for own in engine(tp=2).values()}) == 2


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
