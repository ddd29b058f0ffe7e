"""Recovery, release and quarantine are measured, in virtual time."""

from __future__ import annotations

import pytest

from tests.property.simulation.episode import Size
from tests.property.simulation.liveness import MEASURES, Distributions, LivenessEpisode

pytestmark = pytest.mark.slow

SIZE = Size(faults=4)
SEED = 160215742132725


def test_each_fault_is_measured_and_a_seed_measures_the_same_again():
    found, again = Distributions(), Distributions()
    first = LivenessEpisode(found, SEED, SIZE).run()
    assert not first.problem
    rows = found.rows()
    assert {row["measure"] for row in rows} >= {"recovery", "registration", "release"}  # few are in doubt
    assert all(0.0 <= row["p50_s"] <= row["p99_s"] <= row["worst_s"] for row in rows)
    by_measure = {m: sum(row["n"] for row in rows if row["measure"] == m) for m in MEASURES}
    assert by_measure["recovery"] == by_measure["registration"] > 0
    assert LivenessEpisode(again, SEED, SIZE, keeps_trace=True).run().digest == first.digest
    assert again.rows() == rows
