"""The sum of several seeds tells which of them failed, and counts the others."""

from __future__ import annotations

import json

from tests.proofs.chaos.long import summary
from tests.support.cluster.results import Tally


def test_a_seed_that_fails_is_named_and_the_others_are_summed():
    tally = Tally()
    tally.faults["cut link"] = 3
    tally.recovery_ms["cut link"] += [100.0, 900.0]
    good = json.loads(tally.line(1, elapsed_s=2.0)) | {"exit_status": 0}
    tally.problem("hung", "no transfer works")
    bad = json.loads(tally.line(2, elapsed_s=2.0)) | {"exit_status": 1}
    found = summary([1, 2, 3], [good, bad, None])
    assert found["failed_seeds"] == [2, 3]
    assert (found["faults"], found["hung"], found["recovery_ms_worst"]) == (6, 1, 900)
    assert found["faults_by_kind"] == {"cut link": 6}
    assert found["problems"] == ["seed 2: hung: no transfer works"]
