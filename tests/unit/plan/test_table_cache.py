"""The tables of a mover's plans: one limit, nothing wrong after eviction, and their memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

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


@pytest.fixture
def traced() -> Iterator[None]:
    """Count the memory that Python and numpy take."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_tables_of_direct_reads_are_counted_as_the_memory_that_they_take() -> None:
    tables = TableCache()
    listed = blocks([0]), blocks([0])
    for plan in plans():  # numpy's own first allocations
        Expander(plan).expand(*listed, 4, *AT)
    tracemalloc.clear_traces()
    for plan in plans():
        Expander(plan, tables).expand(*listed, 4, *AT)
    taken, _ = tracemalloc.get_traced_memory()
    assert len(tables) == len(plans())
    assert tables.num_bytes <= taken <= 1.25 * tables.num_bytes


@pytest.mark.usefixtures("traced")
def test_tables_of_many_small_forms_are_counted_as_the_memory_that_they_take() -> None:
    """Some ten bytes of arrays each. Block lists may begin at any token."""
    plan = plan_between(engine(block_tokens=256), engine(block_tokens=256))
    tables = TableCache()
    expander = CoverExpander(plan, tables)
    tracemalloc.clear_traces()
    for first in range(1, 256, 3):
        expander.prepare(blocks([0], first), blocks([0]))
        expander.prepare(blocks([0]), blocks([0], first))
    taken, _ = tracemalloc.get_traced_memory()
    assert len(tables) == 2 * 85
    assert taken <= 1.25 * tables.num_bytes


@pytest.mark.usefixtures("traced")
def test_a_request_of_many_shapes_holds_those_of_one_part_at_a_time() -> None:
    """Blocks of 509 and 512 tokens have a shape for each segment: 1,000 of up to 4,000 runs."""
    mine = engine(block_tokens=509, layers=4, layout="NHD")
    theirs = engine(block_tokens=512, layers=4, layout="HND")
    expander = Expander(plan_between(mine, theirs), TableCache(max_bytes=1 << 20))
    listed = blocks([0] * 400), blocks([0] * 400)
    tracemalloc.clear_traces()
    parts = expander.parts(*listed, 509 * 400, *AT, max_runs=10_000)
    num_runs = sum(len(part[SOURCE].local) for part in parts)
    _, peak = tracemalloc.get_traced_memory()
    assert num_runs > 1_000_000
    assert peak < num_runs * 24 // 4


@pytest.mark.usefixtures("traced")
def test_a_block_that_is_listed_again_and_again_is_not_held_in_memory_as_often() -> None:
    """328,000 runs a block, of which eight are read together: they are given up before all are made."""
    mine, theirs = (engine(block_tokens=512, layers=80, layout=order) for order in ("NHD", "HND"))
    expander = CoverExpander(plan_between(mine, theirs))
    tracemalloc.clear_traces()
    assert expander.prepare(blocks(range(10)), blocks([1] * 10, 256)) is None
    _, peak = tracemalloc.get_traced_memory()
    assert peak < 48 << 20


def test_the_table_of_a_plan_hardly_grows_with_its_layers() -> None:
    """A form is kept once, and of each layer where it begins."""
    sizes = []
    for layers in (2, 20):
        tables = TableCache()
        plan = plan_between(engine(layout="NHD", layers=layers), engine(layers=layers))
        CoverExpander(plan, tables).prepare(blocks([1]), blocks([2]))
        sizes.append(tables.num_bytes)
    assert sizes[1] - sizes[0] <= 18 * 2 * 2 * 8
