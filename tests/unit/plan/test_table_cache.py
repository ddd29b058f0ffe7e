"""The tables of a mover's plans: one limit for both expanders, and nothing wrong after eviction."""

from __future__ import annotations

import tracemalloc

import numpy as np

from kvxferd.ids import Rank
from kvxferd.plan import Expander, Plan
from kvxferd.plan.covering import CoverExpander
from kvxferd.plan.table_cache import ENTRY_DIVISOR, TableCache
from tests.support.attention_engines import KV, blocks, engine, plan_between

SOURCE = Rank(0, 0)
AT = ({KV: 0}, {SOURCE: {KV: 0}})


def plans() -> list[Plan]:
    """Return plans of different tables: 500 to 2,500 runs a block."""
    layers = range(16, 80, 4)
    return [plan_between(engine(layout="NHD", layers=count), engine(layers=count)) for count in layers]


def test_both_expanders_of_all_plans_share_one_limit_and_read_the_same_after_eviction() -> None:
    tables = TableCache(max_bytes=200_000)
    lists = blocks([3, 1]), blocks([0, 9])
    for _ in range(2):
        for plan in plans():
            found = Expander(plan, tables).expand(*lists, 8, *AT)[SOURCE]
            wanted = Expander(plan).expand(*lists, 8, *AT)[SOURCE]
            assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
            assert CoverExpander(plan, tables).prepare(*lists) is not None
            assert 0 < tables.num_bytes <= 200_000
    assert 2 < len(tables) < 2 * len(plans())


def test_what_is_larger_than_its_part_is_not_kept() -> None:
    tables = TableCache(max_bytes=ENTRY_DIVISOR * 1000)
    kept = [tables.get(size, lambda: [], lambda _, size=size: size) for size in (100, 1001, 100, 1001)]
    assert kept[0] is kept[2]
    assert kept[1] is not kept[3]
    assert len(tables) == 1


def test_tables_of_direct_reads_are_counted_as_the_memory_that_they_take() -> None:
    tables = TableCache()
    listed = blocks([0]), blocks([0])
    for plan in plans():  # numpy's own first allocations
        Expander(plan).expand(*listed, 4, *AT)
    tracemalloc.start()
    try:
        for plan in plans():
            Expander(plan, tables).expand(*listed, 4, *AT)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(tables) == len(plans())
    assert tables.num_bytes <= taken <= 1.25 * tables.num_bytes


def test_a_request_of_many_shapes_holds_those_of_one_part_at_a_time() -> None:
    """Blocks of 509 and 512 tokens have a shape for each segment: 1,000 of up to 4,000 runs."""
    sizes = (509, 512)
    mine, theirs = (
        engine(block_tokens=size, layers=4, layout=order)
        for size, order in zip(sizes, ("NHD", "HND"), strict=True)
    )
    expander = Expander(plan_between(mine, theirs), TableCache(max_bytes=1 << 20))
    listed = blocks([0] * 400), blocks([0] * 400)
    tracemalloc.start()
    try:
        num_runs = sum(
            len(part[SOURCE].local) for part in expander.parts(*listed, 509 * 400, *AT, max_runs=10_000)
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_runs > 1_000_000
    assert peak < num_runs * 24 // 4
