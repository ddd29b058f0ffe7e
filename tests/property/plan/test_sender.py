"""What all producers send is what all consumers read, in the same runs; every byte of those is checked.

`test_any_to_any` compares the readers' runs with brute force.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvxferd.ids import GroupName, Rank
from kvxferd.layout import PackedBlocks, RankLayout
from kvxferd.plan import Expander, Plan, make_plan, sender_plan
from tests.support import brute_force
from tests.support.layout_strategies import Model, engines, lists, models

Lists = Mapping[GroupName, PackedBlocks]
Layouts = Mapping[Rank, RankLayout]
# (producer, consumer, address at the producer, address at the consumer, length), ascending
RunTable = list[tuple[Rank, Rank, int, int, int]]

BUDGET = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@pytest.mark.slow
@BUDGET
@given(st.data())
def test_the_producers_together_send_what_the_consumers_read(data: st.DataObject) -> None:
    """Whatever the layouts: all of it, once, in the same runs."""
    model: Model = data.draw(models())
    sink, source = data.draw(engines(model, "sink")), data.draw(engines(model, "source"))
    num_tokens = data.draw(st.integers(1, 40))
    mine = data.draw(lists(sink, num_tokens, latest=num_tokens - 1))
    theirs = data.draw(lists(source, num_tokens, latest=num_tokens - 1))
    plans = {
        rank: make_plan(sink.spec_of(rank), layout, source.spec, source.ranks)
        for rank, layout in sink.ranks.items()
    }
    moved = check(sink.ranks, source.ranks, plans, mine=mine, theirs=theirs, num_tokens=num_tokens)
    event("moved" if moved else "nothing to move")


def check(
    sink: Layouts, source: Layouts, plans: Mapping[Rank, Plan], *, mine: Lists, theirs: Lists, num_tokens: int
) -> int:
    """Compare what every producer sends with what every consumer reads; return the number of runs."""
    here = {rank: brute_force.bases(layout, i) for i, (rank, layout) in enumerate(sorted(sink.items()))}
    there = {
        rank: brute_force.bases(layout, len(sink) + i)
        for i, (rank, layout) in enumerate(sorted(source.items()))
    }
    read: RunTable = []
    for consumer, plan in plans.items():
        for producer, runs in Expander(plan).expand(mine, theirs, num_tokens, here[consumer], there).items():
            local, remote, lengths = (column.tolist() for column in runs)
            read += [(producer, consumer, *run) for run in zip(remote, local, lengths, strict=True)]
    sent: RunTable = []
    for producer in source:
        plan = sender_plan(producer, plans.values())
        for consumer, runs in Expander(plan).expand(theirs, mine, num_tokens, there[producer], here).items():
            local, remote, lengths = (column.tolist() for column in runs)
            sent += [(producer, consumer, *run) for run in zip(local, remote, lengths, strict=True)]
    assert sorted(sent) == sorted(read)
    return len(sent)
