"""What one engine's backend wrote another's reads, whatever the layout, sizes and packing of either."""

from __future__ import annotations

import pytest

from kvxferd.client.arguments import pack_blocks
from kvxferd.errors import Code, PlanError
from kvxferd.ids import Rank
from kvxferd.plan import Expander, Plan, make_plan
from tests.support.in_process_pull import addresses
from tests.support.vllm_families import DENSE
from tests.support.vllm_pages import LAYOUTS, How, PagedEngine, pull


@pytest.mark.parametrize("source_layout", LAYOUTS)
@pytest.mark.parametrize("sink_layout", LAYOUTS)
def test_every_order_of_axes_reads_every_other(sink_layout: str, source_layout: str) -> None:
    sink, source = (
        PagedEngine(DENSE, How(tp=2, layout=sink_layout)),
        PagedEngine(DENSE, How(layout=source_layout)),
    )
    assert pull(sink, source, 75) == []


@pytest.mark.parametrize(
    ("sink", "source"),
    [
        (How(tp=4), How(tp=2)),
        (How(tp=2, layout="LBNHC"), How(tp=4)),
        (How(tp=1), How(tp=8)),  # more ranks than heads: neighbours hold copies
        (How(tp=8), How(tp=1)),
        (How(pp=3), How(pp=2, tp=2)),
        (How(block_tokens=16), How(block_tokens=64)),
        (How(block_tokens=48), How(block_tokens=32, tp=2)),  # neither divides the other
        (How(block_tokens=64, kernel_blocks=4, layout="LBHNC"), How(block_tokens=32)),
        (How(block_tokens=64, isa="vec"), How(block_tokens=32, tp=4, isa="vec")),
        (How(block_tokens=96, kernel_blocks=3, layout="LBHNC", isa="vec"), How(block_tokens=64, isa="vec")),
        (How(isa="vec"), How(layout="LBNHC")),  # a CPU reads a GPU's
        (How(layout="BLHNC", tp=2), How(block_tokens=64, isa="vec16")),
        (How(block_tokens=64, isa="amx"), How(block_tokens=32, tp=2, pp=2, isa="amx")),
    ],
    ids=str,
)
@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [192, 75])
def test_sizes_and_packings_may_differ(sink: How, source: How, num_tokens: int) -> None:
    assert pull(PagedEngine(DENSE, sink), PagedEngine(DENSE, source), num_tokens) == []


def plan_of(sink: PagedEngine, source: PagedEngine) -> Plan:
    """Return the plan of engines of one rank."""
    layouts = {rank: derived.layout for rank, derived in source.derived.items()}
    return make_plan(sink.spec(), sink.derived[Rank(0, 0)].layout, source.spec(), layouts)


@pytest.mark.parametrize(
    ("sink", "source", "field"),
    [
        (How(isa="amx"), How(isa="vec"), "encoding"),
        (How(isa="neon"), How(isa="vec"), "encoding"),
        (How(isa="neon"), How(isa="rvv"), "'cpu-attn.neon'"),
        (How(isa="neon"), How(block_tokens=64, isa="neon"), "granule_tokens"),
        (How(), How(isa="amx"), "encoding"),
    ],
    ids=str,
)
def test_packings_that_cannot_be_read_are_refused_by_name(sink: How, source: How, field: str) -> None:
    with pytest.raises(PlanError, match=field) as caught:
        plan_of(PagedEngine(DENSE, sink), PagedEngine(DENSE, source))
    assert caught.value.code is Code.LAYOUT_INCOMPATIBLE


def test_a_block_of_equal_packing_moves_as_one_run() -> None:
    """Column-major keys are 2-byte chunks in the plan, and still one copy for a block of all heads."""
    sink, source = (PagedEngine(DENSE, How(isa="vec", layout="LBHNC")) for _ in range(2))
    lists = pack_blocks(sink.groups.select_blocks([[1, 3]], 64), None, "pull")
    bases = {rank: addresses(derived) for rank, derived in source.derived.items()}
    expander = Expander(plan_of(sink, source))
    (runs,) = expander.expand(lists, lists, 64, addresses(sink.derived[Rank(0, 0)]), bases).values()
    assert len(runs.length) == 2 * DENSE.num_layers
    assert set(runs.length.tolist()) == {4 * 32 * 2 * 16 * 2}  # heads, tokens, keys and values, size, bytes
