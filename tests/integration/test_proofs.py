"""The table of proofs: what it names is there, and a run tells what failed and what did not run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

from tests.proofs.__main__ import PROOFS, ROOT, Proof, run
from tests.support.nodes.processes import descendants


def test_what_the_table_names_is_there() -> None:
    for proof in PROOFS:
        assert not proof.module or importlib.util.find_spec(proof.module), proof.name
        for path in (*proof.paths, *re.findall(r"tests/\S+", proof.tests)):
            assert (ROOT / path).exists(), f"{proof.name}: {path}"


def test_one_that_fails_fails_the_run_and_what_did_not_run_says_why() -> None:
    names, arguments = ("model", "soak"), ("--args=--no-such-option", "--minutes", "2")
    command = [sys.executable, "-m", "tests.proofs", *names, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[-3].split()[:2] == ["model", "failed"]
    assert lines[-2].split() == ["soak", "skipped", "no", "time", "left:", "30", "min"]
    assert lines[-1] == "0 passed, 1 failed, 1 skipped"


def test_one_that_does_not_end_in_time_is_killed_and_says_so() -> None:
    before = set(descendants(os.getpid()))
    endless = Proof("endless", 0, "http.server", "--bind 127.0.0.1 0")
    finished = run(endless, "", left_s=1.0)
    assert (finished.result, finished.why) == ("skipped", "it did not end within the 0 min that were left")
    assert set(descendants(os.getpid())) <= before
