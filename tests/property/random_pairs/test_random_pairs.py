"""Random models between random deployments, through real movers and NIXL: every byte.

`make test-random N=2000` runs more pairs, and others each time. The model of what must arrive is
`plan.brute_force`, which shares no code with the planner.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from kvxferd.errors import PlanError
from kvxferd.ids import Rank
from tests.property.random_pairs.checked_pulls import Movers, check, in_pool
from tests.support.attention_engines import blocks, engine
from tests.support.layout_strategies import Pull, pulls

pytestmark = pytest.mark.process


@pytest.mark.timeout(3600)
def test_every_byte_of_random_pairs_through_real_movers(movers: Movers, pytestconfig: pytest.Config) -> None:
    num_pairs = pytestconfig.getoption("--random-pairs")
    counts: Counter[str] = Counter()

    @settings(
        max_examples=num_pairs,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(pulls())
    def one_pair(pull: Pull) -> None:
        sink, source = pull.sink, pull.source
        request = {"mine": pull.mine, "theirs": pull.theirs, "num_tokens": pull.num_tokens}
        counts["pairs"] += 1
        try:
            moved = movers.transfer(
                sink.spec_of(pull.rank), sink.ranks[pull.rank], source.spec, source.ranks, **request
            )
        except PlanError as error:
            counts[f"refused: {error.code}"] += 1
        else:
            counts["moved" if moved else "nothing to move"] += 1

    one_pair()
    print(f"{counts['pairs']} pairs through real movers: {dict(counts)}")
    assert counts["pairs"] >= num_pairs
    assert counts["moved"] > num_pairs // 3, counts


def test_the_check_can_fail(movers: Movers) -> None:
    """A byte that changes after the delivery is found, inside the blocks and outside of them."""
    (spec, layout), (remote_spec, theirs) = engine(tp=2)[Rank(0, 0)], engine()[Rank(0, 0)]
    mine, source = blocks([3, 5]), {Rank(0, 0): theirs}
    assert movers.transfer(spec, layout, remote_spec, source, mine=mine, theirs=mine, num_tokens=8)
    view = movers.sink.array[: layout.regions[0].size_bytes + 4096]
    good = view.copy()
    assert check(view, good, in_pool(layout), mine, source, mine) > 0
    for victim in (layout.tensors[0].offset + 3 * layout.tensors[0].block_stride, 0, len(view) - 1):
        view[victim] ^= 0xFF
        with pytest.raises(AssertionError):
            check(view, good, in_pool(layout), mine, source, mine)
        view[victim] ^= 0xFF
