"""A few faults in every test run, and the proof that what the suite looks for it would find."""

from __future__ import annotations

import random

import pytest

from tests.property.chaos.__main__ import chaos

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("read", ["covering", ""])
def test_a_few_faults_break_no_promise(tmp_path, read):
    seed = random.SystemRandom().randrange(1 << 32)
    tally = chaos(seed, 15, tmp_path, read=read)
    assert tally.is_good, tally.line(seed)
    assert tally.faults.total() == 15
    assert tally.delivered > 15
    assert tally.progressive["pulls"] > 0


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


def test_a_chunk_that_is_reported_before_it_is_written_is_noticed(tmp_path):
    tally = chaos(6, 3, tmp_path, "early", only="slow link")
    assert tally.progressive["transfers"] > 0, tally.line(6)
    assert tally.wrong_items > 0, tally.line(6)


def test_a_publish_of_memory_that_slept_is_noticed(tmp_path):
    """Daemons that publish whatever memory is there: without their mend this delivers other bytes."""
    tally = chaos(3, 4, tmp_path, "unbound", only="suspend prefill, daemon dead")
    assert tally.wrong_items > 0, tally.line(3)
