"""Some episodes in every test run, and the proof that what the simulation looks for it would find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvxferd.mover.reads.pull_engine import PullEngine
from tests.property.simulation.__main__ import simulate
from tests.property.simulation.episode import Episode, Size
from tests.property.simulation.shrink import Shrinker

ROOT = Path(__file__).parents[3]
LARGE = Size(nodes=4, engines=12, faults=60)
SEED = 20261124  # `make simulate` draws another each time


@pytest.mark.slow
@pytest.mark.parametrize("size", [Size(), LARGE], ids=["small", "large"])
def test_some_faults_break_no_promise(size):
    tally = simulate(SEED, 300, size)
    assert not tally.failed_seeds, tally.line(0.0)
    assert tally.faults.total() >= 300
    # In so few episodes, some of which have limits or leases that are used up; a long run has 0.3 and more.
    assert tally.totals["delivered"] >= 0.15 * tally.totals["transfers"]
    assert tally.totals["in_flight"] >= 0.5 * tally.faults.total()


# Seeds that broke a promise when they were drawn. A later simulation may draw other faults from them, so
# tests/unit/core/ranks/test_home_and_member.py and test_retirement.py hold what was mended, too.
KEPT = {
    (
        42751477781271,
        Size(),
    ): "a rank was told Suspended by a refusal, while a mover to be killed had its memory",
    (67552097942469, Size()): "a member's rank was told Released twice: its reply to the home was late",
    (242854550273323, Size()): "a late join of a former mover left the present one polling for ever",
    (28663599413268, LARGE): "a read that failed while its rank slept was read into the rank's next memory",
    (238839865721110, LARGE): "likewise",
}


@pytest.mark.parametrize(("seed", "size"), KEPT)
def test_a_kept_seed_breaks_no_promise(seed, size):
    result = Episode(seed, size).run()
    assert not result.problem, f"{KEPT[seed, size]}: {result.problem}"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run():
    digests = {Episode(SEED, Size()).run().digest for _ in range(2)}
    assert len(digests) == 1


@pytest.mark.process
def test_the_order_of_sets_changes_nothing():
    lines = [run_line(hash_seed) for hash_seed in ("1", "2")]
    assert lines[0]["trace_sha256"] == lines[1]["trace_sha256"]
    assert lines[0]["faults"] >= 90


def run_line(hash_seed: str) -> dict:
    """The line of JSON of a run in a process of its own."""
    command = [sys.executable, "-m", "tests.property.simulation", "--faults", "90"]
    command += ["--seed", str(SEED)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.process
def test_an_interrupted_run_tells_what_it_has_found():
    command = [sys.executable, "-m", "tests.property.simulation", "--faults", "1000000", "--seed", "1"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        assert run.stderr.readline() == "seed 1\n"  # it has begun
        run.terminate()
        told = json.loads(run.communicate()[0])
    assert run.returncode == 0
    assert told["faults"] < 1_000_000


@pytest.mark.slow
def test_wrong_bytes_are_noticed_and_their_cause_is_cut_down(monkeypatch):
    """Movers that believe every fence word deliver what the source has overwritten."""
    monkeypatch.setattr(PullEngine, "_check_fence_word", lambda self, pull, now: None)
    tally = simulate(7, 5000, Size())
    assert tally.broken["wrong_bytes"] > 0, tally.line(0.0)
    (seed,) = tally.failed_seeds
    shrinker = Shrinker(seed, Size(), max_runs=60)
    shrunk = shrinker.shrink()
    assert shrunk.kind == "wrong_bytes"
    assert sum(shrunk.faults.values()) <= Size.faults / 3, shrinker.describe()
