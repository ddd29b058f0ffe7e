"""The registry against in-engine connectors' formulas, for every small number of heads and of ranks.

0 to 16 KV heads (K; 0: latents), a local tensor parallelism of L and a remote one of R, 1 to 16 each, and
every local rank r: 25,000 cases. The formulas are written out here, and share no code with the package.
Connectors assume that sizes divide. Where they do not, what is read is found by looking at every head; of
those pairs half are taken, as each is planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from kvxferd.ids import EngineId, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import LayerKind, ModelFacts, StateComponent, TokenComponent, deploy
from kvxferd.layout.presets.model_facts import key_and_value
from kvxferd.plan import MambaEngineTransferInfo, TransferTopology
from tests.support.fetched_engine import HOME, FetchedEngine, fetched

SIZES = range(1, 17)
NUM_STATE_UNITS = 720720  # every size divides it

Ranks = dict[Rank, tuple[EngineSpec, RankLayout]]


@cache
def deployment(heads: int, tp: int, engine_id: str) -> Ranks:
    """Return every rank of a hybrid of one attention layer and one state layer."""
    tokens = key_and_value(heads, 2) if heads else ((TokenComponent("latent", 1, 4, is_replicated=True),),)
    kinds = (LayerKind.STATE, LayerKind.FULL)
    states = (StateComponent("ssm", NUM_STATE_UNITS, 1, itemsize=1),)
    model = ModelFacts("hybrid", heads, kinds, tokens, states)
    return deploy(model, tp=tp, num_blocks=2, block_tokens=4, engine_id=engine_id, shared_pages=False)


@cache
def remote(heads: int, tp: int) -> FetchedEngine:
    """Return a remote engine."""
    return fetched(deployment(heads, tp, f"tp{tp}"))


@cache
def held_heads(heads: int, tp: int, rank: int) -> tuple[int, ...]:
    """Return the heads of a rank: an even share, larger ones first, or a copy of one."""
    if heads == 0:
        return (0,)
    if tp > heads:
        return (rank * heads // tp,)
    sizes = [heads // tp + (one < heads % tp) for one in range(tp)]
    return tuple(range(sum(sizes[:rank]), sum(sizes[: rank + 1])))


def read_heads(heads: int, local_tp: int, rank: int, remote_tp: int) -> dict[int, list[int]]:
    """Return the heads that are read from each remote rank: of equal holders the first from r*R//L on."""
    start = rank * remote_tp // local_tp
    found: dict[int, list[int]] = {}
    for head in held_heads(heads, local_tp, rank):
        holders = [q for q in range(remote_tp) if head in held_heads(heads, remote_tp, q)]
        after = [q for q in holders if q >= start]
        found.setdefault(min(after or holders), []).append(head)
    return dict(sorted(found.items()))


def overlapping(local_tp: int, rank: int, remote_tp: int) -> list[int]:
    """Return the remote ranks whose share of anything that divides meets this rank's."""
    return [
        q
        for q in range(remote_tp)
        if q * local_tp < (rank + 1) * remote_tp and rank * remote_tp < (q + 1) * local_tp
    ]


def formula_sources(heads: int, local_tp: int, rank: int, remote_tp: int) -> list[int]:
    """Return the ranks read for attention, by the connectors' formula."""
    if heads == 0 or local_tp >= remote_tp:
        return [rank * remote_tp // local_tp]
    ratio = remote_tp // local_tp
    first_of_head: dict[int, int] = {}
    for q in range(rank * ratio, (rank + 1) * ratio):
        first_of_head.setdefault(q * heads // remote_tp, q)
    return sorted(first_of_head.values())


def divide(one: int, other: int) -> bool:
    """Whether one of two sizes divides the other."""
    return one % other == 0 or other % one == 0


def is_checked(local_tp: int, remote_tp: int) -> bool:
    """Whether the reads of a pair are checked: all whose sizes divide, and every second other one."""
    return divide(local_tp, remote_tp) or (local_tp + remote_tp) % 2 == 0


def topologies(heads: int) -> Iterator[tuple[int, int, TransferTopology]]:
    """Yield each local size and rank, with the remote sizes registered whose reads are checked."""
    for local_tp in SIZES:
        for rank in range(local_tp):
            made = TransferTopology(*deployment(heads, local_tp, "local")[Rank(0, rank)])
            for remote_tp in SIZES:
                if is_checked(local_tp, remote_tp):
                    made.plan_remote_engine(remote(heads, remote_tp), home=HOME)
            yield local_tp, rank, made


@pytest.mark.slow  # nine seconds together
@pytest.mark.parametrize("heads", range(17))
def test_every_rank_of_every_pair_of_sizes(heads: int) -> None:
    """All answers; those of latents for 0 heads."""
    for local_tp, rank, made in topologies(heads):
        for remote_tp in SIZES:
            check_ratio(made, local_tp, rank, remote_tp)
            if is_checked(local_tp, remote_tp):
                check_reads(made, heads, remote_tp)
            if divide(local_tp, remote_tp):
                check_formulas(made, heads, remote_tp)


def check_ratio(made: TransferTopology, local_tp: int, rank: int, remote_tp: int) -> None:
    """Ratios of sizes, and whom to shake hands with."""
    assert made.handshake_target_ranks(remote_tp) == overlapping(local_tp, rank, remote_tp)
    if local_tp % remote_tp == 0:
        ratio = local_tp // remote_tp
        assert made.tp_ratio(remote_tp) == ratio
        assert made.handshake_target_ranks(remote_tp) == [rank // ratio]
    elif remote_tp % local_tp == 0:
        ratio = remote_tp // local_tp
        assert made.tp_ratio(remote_tp) == -ratio
        assert made.handshake_target_ranks(remote_tp) == [rank * ratio + i for i in range(ratio)]
    else:
        with pytest.raises(ValueError, match=f"{local_tp}.*{remote_tp}"):
            made.tp_ratio(remote_tp)


def check_reads(made: TransferTopology, heads: int, remote_tp: int) -> None:
    """What is read of whom, head by head, also where sizes do not divide."""
    engine_id = EngineId(f"tp{remote_tp}")
    reads = read_heads(heads, made.spec.tp_size, made.spec.tp_rank, remote_tp)
    states = overlapping(made.spec.tp_size, made.spec.tp_rank, remote_tp)
    sources = sorted({*reads, *states})
    assert made.target_remote_ranks(engine_id) == sources
    assert made.is_kv_replicated(engine_id) is (max(1, heads) < remote_tp)
    assert made.replicates_kv_cache(engine_id) is (heads < remote_tp or heads == 0)
    info = made.get_engine_info(engine_id)
    assert isinstance(info, MambaEngineTransferInfo)
    assert info.remote_tp_size == remote_tp
    assert info.remote_fa_source_ranks == tuple(reads)
    assert info.remote_all_source_ranks == tuple(sources)
    assert (info.remote_num_fa_reads, info.remote_num_mamba_reads) == (len(reads), len(states))
    assert info.remote_physical_heads == len(held_heads(heads, remote_tp, 0))


def check_formulas(made: TransferTopology, heads: int, remote_tp: int) -> None:
    """The connectors' formulas, where heads divide as they assume."""
    if heads and not (divide(heads, made.spec.tp_size) and divide(heads, remote_tp)):
        return
    engine_id, is_wider = EngineId(f"tp{remote_tp}"), remote_tp > made.spec.tp_size
    sources = formula_sources(heads, made.spec.tp_size, made.spec.tp_rank, remote_tp)
    info = made.get_engine_info(engine_id)
    assert isinstance(info, MambaEngineTransferInfo)
    assert list(info.remote_fa_source_ranks) == sources
    assert info.needs_split_handles is (is_wider and heads > 0)
    slots = {source * heads // remote_tp: slot for slot, source in enumerate(sources)}
    for q in info.remote_all_source_ranks:
        assert info.should_skip_fa(q) is (q not in sources)
        assert info.fa_head_slot(q) == (slots[q * heads // remote_tp] if heads else 0)
