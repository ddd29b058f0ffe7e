"""When a pull reads its fence word."""

from __future__ import annotations

from kvxferd.ids import PullId, Rank
from kvxferd.mover.process.pull_state import PullState
from kvxferd.wire.common import RegionAddress
from kvxferd.wire.mover import FenceLocation, SourceRank, StartPull
from tests.support.pull_engine_harness import DIGEST, WORD, Bench


def test_the_word_waits_for_parts_that_are_not_expanded() -> None:
    """Whatever keeps the engine from expanding the next part at once."""
    agent = Bench().agents[0]
    source = SourceRank(Rank(0, 0), agent, tuple[RegionAddress, ...]())
    fence = FenceLocation(agent, 64, WORD)
    request = StartPull(PullId(1), DIGEST, (source,), {}, {}, 4, fence)
    pull = PullState(request, arrived_at=0.0, parts=iter([{}]))
    assert not pull.needs_fence_read
    pull.expand_next_part()
    assert not pull.needs_fence_read
    pull.expand_next_part()
    assert pull.needs_fence_read
