"""The table of proofs: what it names is there, and a run tells what failed and what did not run."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tests.proofs.__main__ as runner
from tests.proofs.__main__ import PROOFS, ROOT


def run(*words: str) -> tuple[int, list[str]]:
    """Run the runner; return its exit status and its lines."""
    command = [sys.executable, "-m", "tests.proofs", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def test_what_the_table_names_is_there() -> None:
    for proof in PROOFS:
        assert not proof.module or importlib.util.find_spec(proof.module), proof.name
        for path in (*proof.paths, *re.findall(r"tests/\S+", proof.tests)):
            assert (ROOT / path).exists(), f"{proof.name}: {path}"


def test_one_that_passes_is_a_line_of_json_and_a_row() -> None:
    status, lines = run("model", "--args=--depth 1 --max-states 10")
    assert status == 0
    (line,) = [json.loads(line) for line in lines if line.startswith('{"proof"')]
    assert (line["proof"], line["result"]) == ("model", "passed")
    assert lines[-2].split()[:2] == ["model", "passed"]
    assert lines[-1] == "1 passed, 0 failed, 0 skipped"


def test_one_that_fails_fails_the_run_and_what_did_not_run_says_why() -> None:
    status, lines = run("model", "soak", "--args=--no-such-option", "--minutes", "2")
    assert status == 1
    assert lines[-3].split()[:2] == ["model", "failed"]
    assert lines[-2].split() == ["soak", "skipped", "no", "time", "left:", "30", "min"]
    assert lines[-1] == "0 passed, 1 failed, 1 skipped"


def test_what_has_not_changed_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "one.py").touch()
    (tmp_path / "other.py").touch()
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "-q"], ["add", "."], ["commit", "--quiet", "--message=made"]):
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    proof = runner.Proof("one", 1, paths=("tests",))
    (tmp_path / "other.py").write_text("changed = True")
    assert runner.unchanged_since(proof, "HEAD")
    (tmp_path / "tests" / "one.py").write_text("changed = True")
    assert not runner.unchanged_since(proof, "HEAD")
    assert not runner.unchanged_since(proof, "a1b2c3d4e5")  # a shallow clone lacks it
    assert not runner.unchanged_since(proof, "")  # it never passed
