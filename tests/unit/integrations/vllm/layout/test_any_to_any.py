"""What one engine's backend wrote another's reads, whatever the layout, sizes and packing of either."""

from __future__ import annotations

import pytest
import torch

from kvxferd.client.arguments import pack_blocks
from kvxferd.errors import Code, PlanError
from kvxferd.ids import Rank
from kvxferd.plan import Expander, make_plan
from tests.support.in_process_pull import addresses, move
from tests.support.vllm_caches import CPU, FLASH, LAYOUTS, Deployment, Model, TorchEngine, TorchRank

VEC = {"backend": CPU, "isa": "vec"}
AMX = {"backend": CPU, "isa": "amx"}


def pull(sink: TorchEngine, source: TorchEngine, num_tokens: int, num_cached: int = 0) -> list[str]:
    """Write at the source, read into every rank of the sink by plan and runs; return what is wrong."""
    source_ids = [5, 2, 7, 1, 8, 3, 6, 4, 13, 9, 11, 10][: -(-num_tokens // source.how.block_tokens)]
    sink_ids = [3, 4, 1, 6, 8, 2, 5, 7, 12, 9, 10, 13][: -(-num_tokens // sink.how.block_tokens)]
    source.write(source_ids, num_tokens)
    published = source.groups.select_blocks([source_ids], num_tokens)
    into = sink.groups.select_blocks([sink_ids], num_tokens, num_cached)
    wrong = []
    for held in sink.ranks.values():
        before = [tensor.clone() for tensor in held.tensors.values()]
        move(
            held.spec,
            held.derived,
            source.ranks[Rank(0, 0)].spec,
            {rank: other.derived for rank, other in source.ranks.items()},
            into=into,
            published=published,
            num_tokens=num_tokens,
        )
        first = into["0.full"].first_token
        listed = sink_ids[first // sink.how.block_tokens :]
        wrong += sink.wrong(held, listed, first, num_tokens)
        wrong += _touched_elsewhere(sink, held, before, listed)
    return wrong


def _touched_elsewhere(
    engine: TorchEngine, held: TorchRank, before: list[torch.Tensor], ids: list[int]
) -> list[str]:
    """Return the layers in which a block that is not listed has changed."""
    per_id = engine.how.per_id
    others = [
        block * per_id + inside
        for block in range(engine.how.num_blocks)
        if block not in ids
        for inside in range(per_id)
    ]
    return [
        f"{name} outside its blocks"
        for (name, tensor), old in zip(held.tensors.items(), before, strict=True)
        if not torch.equal(tensor[others], old[others])
    ]


@pytest.mark.parametrize("source_layout", LAYOUTS)
@pytest.mark.parametrize("sink_layout", LAYOUTS)
def test_every_order_of_axes_reads_every_other(sink_layout: str, source_layout: str) -> None:
    sink = TorchEngine(Model(), Deployment(tp=2, layout=sink_layout))
    source = TorchEngine(Model(), Deployment(layout=source_layout))
    assert pull(sink, source, 75) == []


@pytest.mark.parametrize(
    ("sink", "source"),
    [
        (Deployment(tp=4), Deployment(tp=2)),
        (Deployment(tp=2, layout="LBNHC"), Deployment(tp=4)),
        (Deployment(tp=1), Deployment(tp=8)),  # more ranks than heads: neighbours hold copies
        (Deployment(tp=8), Deployment(tp=1)),
        (Deployment(pp=3), Deployment(pp=2, tp=2)),
        (Deployment(block_tokens=16), Deployment(block_tokens=64)),
        (Deployment(block_tokens=48), Deployment(block_tokens=32, tp=2)),  # neither divides the other
        (Deployment(block_tokens=64, kernel_tokens=16), Deployment(block_tokens=32)),
        (Deployment(block_tokens=64, **VEC), Deployment(block_tokens=32, tp=4, **VEC)),
        (Deployment(block_tokens=96, kernel_tokens=32, **VEC), Deployment(block_tokens=64, **VEC)),
        (Deployment(**VEC), Deployment(layout="LBNHC", backend=FLASH)),  # a CPU reads a GPU's
        (Deployment(layout="BLHNC", tp=2), Deployment(block_tokens=64, backend=CPU, isa="vec16")),
        (Deployment(block_tokens=64, **AMX), Deployment(block_tokens=32, tp=2, pp=2, **AMX)),
    ],
    ids=repr,
)
@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [192, 75])
def test_sizes_and_packings_may_differ(sink: Deployment, source: Deployment, num_tokens: int) -> None:
    assert pull(TorchEngine(Model(), sink), TorchEngine(Model(), source), num_tokens) == []


@pytest.mark.parametrize(
    ("sink", "source", "field"),
    [
        (Deployment(**AMX), Deployment(**VEC), "encoding"),
        (Deployment(backend=CPU, isa="neon"), Deployment(**VEC), "encoding"),
        (Deployment(backend=CPU, isa="neon"), Deployment(backend=CPU, isa="rvv"), "'cpu-attn.neon'"),
        (
            Deployment(backend=CPU, isa="neon"),
            Deployment(block_tokens=64, backend=CPU, isa="neon"),
            "granule_tokens",
        ),
        (Deployment(), Deployment(**AMX), "encoding"),
    ],
    ids=repr,
)
def test_packings_that_cannot_be_read_are_refused_by_name(
    sink: Deployment, source: Deployment, field: str
) -> None:
    local, remote = TorchEngine(Model(), sink), TorchEngine(Model(), source)
    held = local.ranks[Rank(0, 0)]
    other = remote.ranks[Rank(0, 0)]
    with pytest.raises(PlanError, match=field) as caught:
        make_plan(held.spec, held.derived.layout, other.spec, {Rank(0, 0): other.derived.layout})
    assert caught.value.code is Code.LAYOUT_INCOMPATIBLE


def test_a_block_of_equal_packing_moves_as_one_run() -> None:
    """Column-major keys are 2-byte chunks in the plan, and still one copy for a block of all heads."""
    sink, source = TorchEngine(Model(), Deployment(**VEC)), TorchEngine(Model(), Deployment(**VEC))
    held, other = sink.ranks[Rank(0, 0)], source.ranks[Rank(0, 0)]
    plan = make_plan(held.spec, held.derived.layout, other.spec, {Rank(0, 0): other.derived.layout})
    lists = pack_blocks(sink.groups.select_blocks([[1, 3]], 64), None, "pull")
    bases = {Rank(0, 0): addresses(other.derived)}
    (runs,) = Expander(plan).expand(lists, lists, 64, addresses(held.derived), bases).values()
    assert len(runs.length) == 2 * Model().num_layers
    assert set(runs.length.tolist()) == {4 * 32 * 2 * 16 * 2}  # heads, tokens, keys and values, size, bytes
