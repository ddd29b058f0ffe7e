"""Which engines the throughput measure starts for its points."""

from __future__ import annotations

import pytest

from kvxferd.bench.cases import BlockPattern, Case, blocks_for, runs_of
from kvxferd.bench.measures.throughput import by_deployment, deployment_of
from kvxferd.bench.shapes import FIRST_RANK
from kvxferd.bench.workload import MIB, full_workload


@pytest.mark.parametrize(
    ("layout", "num_runs"),
    [("HND", 2 * 80), ("LBHNC", 80), ("BLHNC", 1)],  # K and V of 80 layers apart, together, or all in a page
)
def test_engines_have_the_layout_of_their_points(layout: str, num_runs: int) -> None:
    lists = BlockPattern.CONTIGUOUS
    points = full_workload(("llama-3-70b",), (64 * MIB,), (lists,), (1,), 1, (layout,)).points
    ((_, pulls),) = by_deployment(points).items()
    deployment = deployment_of("d", pulls)
    assert deployment is not None
    case = Case(deployment=deployment, lists=lists, blocks=blocks_for(deployment, 64 * MIB))
    assert len(runs_of(case, FIRST_RANK, 0).length) == num_runs


def test_a_hybrid_has_its_own_layout_alone() -> None:
    points = full_workload(
        ("mamba2-hybrid",), (64 * MIB,), (BlockPattern.SCATTERED,), (1,), 1, ("HND", "BLHNC")
    ).points
    found = {key[2]: deployment_of("d", pulls) for key, pulls in by_deployment(points).items()}
    assert found["HND"] is not None
    assert found["BLHNC"] is None
