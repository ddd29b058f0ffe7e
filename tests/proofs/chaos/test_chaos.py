"""What the suite looks for it finds: promises that are broken on purpose."""

from __future__ import annotations

import pytest

from tests.proofs.chaos.__main__ import chaos

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("sabotage", "broken"),
    [
        ("corrupt", "wrong_items"),  # a delivered byte is changed before it is checked
        ("late-write", "wrong_items"),  # a block that is safe to reuse is written
        ("hang", "hung"),  # a terminal event is swallowed
        ("leak", "leaked"),  # a worker that nobody knows of stays, with a lease
    ],
)
def test_a_broken_promise_is_noticed(tmp_path, sabotage, broken):
    # A fault that kills nobody: what is sabotaged must not die before it is noticed.
    tally = chaos(7, 1, tmp_path, sabotage, only="slow link")
    counts = {name: getattr(tally, name) for name in ("wrong_items", "hung", "leaked")}
    assert counts[broken] > 0, tally.line(7)
    assert not tally.is_good


def test_a_chunk_that_is_reported_and_not_written_is_noticed(tmp_path):
    # Until a transfer that grows is delivered: on a busy machine deadlines end some.
    for seed in range(6, 16):
        tally = chaos(seed, 3, tmp_path / str(seed), "unwritten", only="slow link")
        if tally.wrong_items:
            return
    pytest.fail(f"not noticed: {tally.line(seed)}")
