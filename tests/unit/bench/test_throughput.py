"""Which engines the throughput measure starts for its points."""

from __future__ import annotations

import pytest

from kvxferd.bench.cases import MIB, BlockPattern, Case, blocks_for, runs_of
from kvxferd.bench.measures.throughput import by_engines, pair_of
from kvxferd.bench.workload import full_workload


@pytest.mark.parametrize(
    ("layout", "num_runs"),
    [("HND", 2 * 80), ("LBHNC", 80), ("BLHNC", 1)],  # K and V of 80 layers apart, together, or all in a page
)
def test_engines_have_the_layout_of_their_points(layout: str, num_runs: int) -> None:
    pattern = BlockPattern.CONTIGUOUS
    workload = full_workload(("llama-3-70b",), (64 * MIB,), (pattern,), (1,), 1, (layout,))
    ((_, pulls),) = by_engines(workload.throughput).items()
    pair = pair_of("d", pulls)
    assert pair is not None
    case = Case(pair, pattern, blocks_for(pair, 64 * MIB))
    assert len(runs_of(case, 0).length) == num_runs


def test_a_hybrid_has_its_own_layout_alone() -> None:
    workload = full_workload(
        ("mamba2-hybrid",), (64 * MIB,), (BlockPattern.SCATTERED,), (1,), 1, ("HND", "BLHNC")
    )
    found = {key[2]: pair_of("d", pulls) for key, pulls in by_engines(workload.throughput).items()}
    assert found["HND"] is not None
    assert found["BLHNC"] is None
