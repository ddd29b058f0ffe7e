"""`kvxferd doctor --gpu` and deploy/gpu-check.sh over a driver of memfds, through real daemons."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.doctor_harness import LIMIT_S, examine
from tests.support.fake_driver import FAKE
from tests.support.repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
FLAGS = ("--gpu", "--driver", FAKE, "--check", "gpus")
ALL = ["direct", "resident", "staged"]


def test_every_placement_is_tried_checked_and_timed():
    found = examine(*FLAGS, environment={"PYTHONPATH": str(ROOT)})
    tried = {one["check"]: one for one in found.findings if one["name"] == "placements"}
    assert list(tried) == ALL
    assert {one["verdict"] for one in tried.values()} == {"ok"}
    assert all(one["facts"]["gigabytes_per_s"] > 0 for one in tried.values())
    assert tried["direct"]["facts"]["lanes"] == "cma"
    assert found.status == 0


def check_gpu(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "deploy" / "gpu-check.sh"), sys.executable, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
    )


def placements_of(output: str) -> dict[str, str]:
    """Return what doctor finds of each: "ok", or why it does not work."""
    lines = re.findall(r"^(ok|no) +placements: (.+?)  +(.+)", output, re.M)
    return {name: verdict if verdict == "ok" else found for verdict, name, found in lines}


def test_the_table_is_printed_after_tests_that_failed_and_a_placement_that_crashed(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "words = open('/proc/self/cmdline').read().split('\\0')\n"
        "if 'kvxferd.tooling.child_process' in words:\n"
        "    from kvxferd.doctor import gpu_placements\n"
        "    measure = gpu_placements.measure_placement\n"
        "    def crash_or_measure(device, placement, *rest):\n"
        "        if placement == 'direct':\n"
        "            os.kill(os.getpid(), signal.SIGSEGV)\n"
        "        return measure(device, placement, *rest)\n"
        "    gpu_placements.measure_placement = crash_or_measure\n"
    )
    done = check_gpu(
        GPU_CHECK_DRIVER="fake",
        GPU_CHECK_TESTS="tests/there_is_no_such_test.py",
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 1
    assert placements_of(done.stdout) == dict.fromkeys(ALL, "ok") | {"direct": "it was killed by SIGSEGV"}
    assert "the tests failed" in done.stdout.splitlines()[-1]


def wheel_of(name: str, folder: Path) -> None:
    """A wheel with one module in it."""
    facts = {
        f"{name}.py": "",
        f"{name}-1.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{name}-1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}-1.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
        for path, text in facts.items():
            wheel.writestr(path, text)


def test_wheels_that_were_carried_are_used_and_gone_afterwards(tmp_path: Path):
    wheels, folder = tmp_path / "wheels", tmp_path / "tmp"
    wheels.mkdir()
    folder.mkdir()
    wheel_of("carried_here", wheels)
    test = tmp_path / "test_carried.py"
    test.write_text(
        "import carried_here, kvxferd\n"
        f"def test_it(): assert carried_here.__file__.startswith({str(folder)!r})\n"
        f"def test_the_tree(): assert kvxferd.__file__.startswith({str(ROOT)!r})\n"
    )
    words = f"-p no:cacheprovider {test}"
    done = check_gpu(str(wheels), GPU_CHECK_DRIVER="fake", GPU_CHECK_TESTS=words, TMPDIR=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert [left.name for left in folder.iterdir() if (left / "carried_here.py").exists()] == []


def test_the_script_runs_every_file_that_has_tests_of_a_gpu():
    script = (ROOT / "deploy" / "gpu-check.sh").read_text()
    (named,) = [line.split('"')[1].split() for line in script.splitlines() if line.startswith("files=")]
    marked = [
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("*.py")
        if path.name != "devices.py" and path != Path(__file__) and "DRIVERS" in path.read_text()
    ]
    assert len(marked) == len(named)
    assert all(any(file.is_relative_to(name) for name in named) for file in marked)


def test_the_script_without_a_gpu():
    done = check_gpu(GPU_CHECK_DRIVER="none")
    assert done.returncode == 3
    assert "no GPU that can be used here" in done.stdout.splitlines()[-1]


def test_the_script_without_kvxferd():
    done = subprocess.run(
        [str(ROOT / "deploy" / "gpu-check.sh"), "/bin/false"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "cannot import kvxferd" in done.stderr
