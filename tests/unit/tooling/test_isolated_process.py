"""Whatever a probe does, doctor goes on: it crashes, hangs, says nonsense or nothing, or leaves children."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvxferd.tooling.isolated_process import IsolatedProcess, run_isolated

pytestmark = pytest.mark.process


PROBES = {
    "well": "print('noise'); print('{\"speed\": 3}')",
    "refuses": "import sys; sys.exit('cannot do it: the driver says no')",
    "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "silent": "",
    "nonsense": "print('not json')",
    "hangs": "import time; print('{}', flush=True); time.sleep(1000)",
    "leaves": (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "open(os.environ['CHILD'], 'w').write(str(child.pid))\n"
        "time.sleep(1000)"
    ),
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, text in PROBES.items():
        (tmp_path / f"{name}.py").write_text(text)
    return {**os.environ, "PYTHONPATH": str(tmp_path), "CHILD": str(tmp_path / "child")}


@pytest.mark.parametrize(
    ("probe", "value", "refusal"),
    [
        ("well", {"speed": 3}, ""),
        ("refuses", None, "cannot do it: the driver says no"),
        ("crashes", None, "it was killed by SIGSEGV"),
        ("silent", None, "it ended with status 0 and said nothing"),
        ("nonsense", None, "it ended with status 0 and said nothing"),
    ],
)
def test_how_a_probe_ends(environment, probe, value, refusal):
    outcome = run_isolated(probe, [], environment, 30.0)
    assert (outcome.value, outcome.failure) == (value, refusal)


def test_a_probe_that_hangs_is_ended_in_time(environment):
    outcome = run_isolated("hangs", [], environment, 1.5)  # it would hang for longer than a test may take
    assert outcome.failure == "it has not ended within 1.5 s"


def test_what_a_probe_started_goes_with_it(environment):
    probe = IsolatedProcess("leaves", [], environment)
    child = Path(environment["CHILD"])
    deadline = time.monotonic() + 20
    while not (child.exists() and child.read_text()):
        assert time.monotonic() < deadline
    probe.finish(0.1)
    pid = int(child.read_text())
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "its child lives on"


def test_the_first_line_of_one_that_goes_on(environment):
    probe = IsolatedProcess("hangs", [], environment)
    assert probe.read_first_line(20.0).value == {}
    assert "has not ended" in probe.finish(0.1).failure


def test_a_first_line_that_is_nonsense(environment):
    probe = IsolatedProcess("nonsense", [], environment)
    assert "is not JSON" in probe.read_first_line(20.0).failure
    probe.finish(20.0)


def test_the_first_line_of_one_that_says_nothing(environment):
    probe = IsolatedProcess("refuses", [], environment)
    assert probe.read_first_line(20.0).failure == "cannot do it: the driver says no"
