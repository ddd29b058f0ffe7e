"""Random models, random pairs of deployments, random requests: every byte against brute force."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, event, given, settings

from kvxferd.errors import PlanError
from kvxferd.ids import Rank
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import (
    Expander,
    Runs,
    block_rules,
    check_blocks,
    check_request,
    decode_plan,
    encode_plan,
    make_plan,
)
from tests.support import brute_force
from tests.support.layout_strategies import Pull, lacks_tokens, pulls, required_from

pytestmark = pytest.mark.slow

BUDGET = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def moved_by(pull: Pull) -> int:
    """Plan, expand, and check one pull against brute force; returns bytes moved."""
    spec, layout = pull.sink.spec_of(pull.rank), pull.sink.ranks[pull.rank]
    ranks, mine, theirs, num_tokens = pull.source.ranks, pull.mine, pull.theirs, pull.num_tokens
    plan = make_plan(spec, layout, pull.source.spec, ranks)
    assert decode_plan(encode_plan(plan)) == plan
    check_blocks(block_rules(layout), mine, num_tokens)
    for other in ranks.values():
        check_blocks(block_rules(other), theirs, num_tokens)
    check_request(plan, mine, theirs, num_tokens)
    local_at = brute_force.bases(layout, 0)
    at = {r: brute_force.bases(ranks[r], i + 1) for i, r in enumerate(sorted(ranks))}
    runs = Expander(plan).expand(mine, theirs, num_tokens, local_at, at)
    assert set(runs) <= set(plan.sources)
    expander = Expander(plan)
    parts = list(expander.parts(mine, theirs, num_tokens, local_at, at, max_runs=50))
    assert moved_bytes(parts) == moved_bytes([runs])
    for _ in range(2):  # a short request's runs come from its form, which is kept; and so do the next one's
        whole = list(expander.parts(mine, theirs, num_tokens, local_at, at))
        assert [columns_of(part) for part in whole] == ([columns_of(runs)] if runs else [])
    return brute_force.check_pull(
        local=(layout, mine),
        remote=ranks,
        remote_lists=theirs,
        required=required_from(pull.sink, mine, num_tokens),
        num_tokens=num_tokens,
        runs=runs,
    )


def moved_bytes(parts: list[dict[Rank, Runs]]) -> int:
    """Return how many bytes some runs name."""
    return sum(int(runs.length.sum()) for part in parts for runs in part.values())


def columns_of(part: dict[Rank, Runs]) -> dict[Rank, list[list[int]]]:
    """Return a part's runs as lists, which can be compared."""
    return {rank: [column.tolist() for column in runs] for rank, runs in part.items()}


@BUDGET
@given(pulls())
def test_any_deployment_reads_any_other(pull: Pull) -> None:
    """Whatever the two layouts are, the right bytes land, once, and nothing else changes."""
    for engine in (pull.sink, pull.source):
        for other, layout in engine.ranks.items():
            validate_layout(engine.spec_of(other), layout)
    if lacks_tokens(pull):
        # Not certain yet: the group that begins late may hold nothing that this rank reads.
        event("the source's lists begin late")
        with contextlib.suppress(PlanError):
            moved_by(pull)
        return
    event("moved" if moved_by(pull) else "nothing to move")
