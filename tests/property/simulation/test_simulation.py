"""Some episodes in every test run, and the proof that what the simulation looks for it would find."""

from __future__ import annotations

import datetime

import pytest

from kvxferd.mover.process.pull_engine import PullEngine
from tests.property.simulation.__main__ import simulate
from tests.property.simulation.episode import Episode, Size
from tests.property.simulation.shrink import Shrinker

pytestmark = pytest.mark.slow

SEED_OF_THE_DAY = datetime.datetime.now(datetime.UTC).date().toordinal()


def test_a_few_hundred_faults_break_no_promise():
    tally = simulate(SEED_OF_THE_DAY, 300, Size())
    assert not tally.failed_seeds, tally.line(0.0)
    assert tally.faults.total() >= 300
    # In so few episodes, some of which have limits or leases that are used up; a long run has 0.3 and more.
    assert tally.totals["delivered"] >= 0.15 * tally.totals["transfers"]
    assert tally.totals["in_flight"] >= 0.5 * tally.faults.total()


# Seeds that broke a promise when they were drawn. A later simulation may draw other faults from them, so
# tests/unit/core/test_home_and_member.py holds what was mended, too.
KEPT = {
    42751477781271: "a rank was told Suspended by a refusal, while a mover that was to die had its memory",
    67552097942469: "a member's rank was told Released twice, because its reply to the home was late",
    242854550273323: "a late join of a former mover left the present one polling for ever",
}


@pytest.mark.parametrize("seed", KEPT)
def test_a_kept_seed_breaks_no_promise(seed):
    result = Episode(seed, Size()).run()
    assert not result.problem, f"{KEPT[seed]}: {result.problem}"


def test_the_same_seed_gives_the_same_run():
    digests = {Episode(SEED_OF_THE_DAY, Size()).run().digest for _ in range(2)}
    assert len(digests) == 1


def test_wrong_bytes_are_noticed_and_their_cause_is_cut_down(monkeypatch):
    """Movers that believe every fence word deliver what the source has overwritten."""
    monkeypatch.setattr(PullEngine, "_check_fence_word", lambda self, pull, now: None)
    tally = simulate(5, 5000, Size())
    assert tally.broken["wrong_bytes"] > 0, tally.line(0.0)
    (seed,) = tally.failed_seeds
    shrinker = Shrinker(seed, Size(), max_runs=60)
    shrunk = shrinker.shrink()
    assert shrunk.kind == "wrong_bytes"
    assert sum(shrunk.faults.values()) <= Size.faults / 3, shrinker.describe()
