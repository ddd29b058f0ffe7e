"""Recovery, release and quarantine are measured, in virtual time."""

from __future__ import annotations

import random

import pytest

from tests.property.simulation.episode import Size
from tests.property.simulation.liveness import MEASURES, Distributions, LivenessEpisode

pytestmark = pytest.mark.slow

SIZE = Size(faults=6)
SEED = 160215742132725


def test_an_episode_measures_how_long_things_take_after_each_fault():
    found = Distributions()
    seeds = random.Random(1)
    results = [LivenessEpisode(found, seeds.getrandbits(48), SIZE).run() for _ in range(3)]
    assert not [result.problem for result in results if result.problem]
    rows = found.rows()
    assert {row["measure"] for row in rows} >= {"recovery", "registration", "release"}  # few are in doubt
    assert all(0.0 <= row["p50_s"] <= row["p99_s"] <= row["worst_s"] for row in rows)
    by_measure = {m: sum(row["n"] for row in rows if row["measure"] == m) for m in MEASURES}
    assert by_measure["recovery"] == by_measure["registration"] > 0


def test_the_worst_is_found_again_by_its_seed():
    found = Distributions()
    first = LivenessEpisode(found, SEED, SIZE).run()
    again = Distributions()
    assert LivenessEpisode(again, SEED, SIZE, keeps_trace=True).run().digest == first.digest
    assert again.rows() == found.rows()
