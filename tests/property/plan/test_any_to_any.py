"""Random models, random pairs of deployments, random requests: every byte against brute force."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvxferd.errors import PlanError
from kvxferd.ids import GroupName, Rank
from kvxferd.layout import PackedBlocks
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
from tests.support.layout_strategies import Engine, Model, engines, lacks_tokens, lists, models, required_from

pytestmark = pytest.mark.slow

BUDGET = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def pull(
    sink: Engine,
    rank: Rank,
    source: Engine,
    *,
    mine: dict[GroupName, PackedBlocks],
    theirs: dict[GroupName, PackedBlocks],
    num_tokens: int,
) -> int:
    """Plan, expand, and check one pull against brute force; returns bytes moved."""
    spec, layout = sink.spec_of(rank), sink.ranks[rank]
    plan = make_plan(spec, layout, source.spec, source.ranks)
    assert decode_plan(encode_plan(plan)) == plan
    check_blocks(block_rules(layout), mine, num_tokens)
    for other in source.ranks.values():
        check_blocks(block_rules(other), theirs, num_tokens)
    check_request(plan, mine, theirs, num_tokens)
    at = {r: brute_force.bases(source.ranks[r], i + 1) for i, r in enumerate(sorted(source.ranks))}
    runs = Expander(plan).expand(mine, theirs, num_tokens, brute_force.bases(layout, 0), at)
    assert set(runs) <= set(plan.sources)
    parts = list(
        Expander(plan).parts(mine, theirs, num_tokens, brute_force.bases(layout, 0), at, max_runs=50)
    )
    assert moved_bytes(parts) == moved_bytes([runs])
    return brute_force.check_pull(
        local=(layout, mine),
        remote=source.ranks,
        remote_lists=theirs,
        required=required_from(sink, mine, num_tokens),
        num_tokens=num_tokens,
        runs=runs,
    )


def moved_bytes(parts: list[dict[Rank, Runs]]) -> int:
    """Return how many bytes some runs name."""
    return sum(int(runs.length.sum()) for part in parts for runs in part.values())


@BUDGET
@given(st.data())
def test_any_deployment_reads_any_other(data: st.DataObject) -> None:
    """Whatever the two layouts are, the right bytes land, once, and nothing else changes."""
    model: Model = data.draw(models())
    sink, source = data.draw(engines(model, "sink")), data.draw(engines(model, "source"))
    num_tokens = data.draw(st.integers(1, 40))
    rank = data.draw(st.sampled_from(sorted(sink.ranks)))
    for engine in (sink, source):
        for other, layout in engine.ranks.items():
            validate_layout(engine.spec_of(other), layout)
    mine = data.draw(lists(sink, num_tokens, latest=num_tokens - 1))
    theirs = data.draw(lists(source, num_tokens, latest=num_tokens - 1))
    if lacks_tokens(sink, source, mine, theirs, num_tokens):
        # Not certain yet: the group that begins late may hold nothing that this rank reads.
        event("the source's lists begin late")
        with contextlib.suppress(PlanError):
            pull(sink, rank, source, mine=mine, theirs=theirs, num_tokens=num_tokens)
        return
    moved = pull(sink, rank, source, mine=mine, theirs=theirs, num_tokens=num_tokens)
    event("moved" if moved else "nothing to move")
