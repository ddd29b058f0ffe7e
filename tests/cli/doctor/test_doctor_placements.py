"""`kvxferd doctor --gpu` and deploy/gpu-check.sh over a driver of memfds, through real daemons."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from examining import LIMIT_S, examine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[3]
FAKE = ("--gpu", "--driver", "fake", "--check", "gpus")
ALL = ["device copy", "direct", "resident", "staged"]


def test_every_placement_is_tried_checked_and_timed():
    found = examine(*FAKE)
    tried = {one["placement"]: one for one in found.said["placements"]}
    assert list(tried) == ALL
    assert [one.get("refusal", "") for one in tried.values()] == [""] * 4
    assert all(one["gigabytes_per_s"] > 0 for one in tried.values())
    assert tried["direct"]["lanes"] == "cma"
    assert found.status == 0


def check_gpu(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "deploy" / "gpu-check.sh"), sys.executable],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
    )


def test_the_script_ends_with_the_table():
    done = check_gpu(GPU_CHECK_DRIVER="fake", GPU_CHECK_TESTS="tests/cli/doctor/test_report.py")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("│").split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows[-4:]] == ALL
    assert [row[1].strip().split(",")[0] for row in rows[-4:]] == ["yes"] * 4


def test_the_table_is_printed_after_tests_that_failed_and_a_placement_that_crashed(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "words = open('/proc/self/cmdline').read().split('\\0')\n"
        "if 'kvxferd.cli.doctor.placing' in words and 'direct' in words:\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    done = check_gpu(
        GPU_CHECK_DRIVER="fake", GPU_CHECK_TESTS="tests/there_is_no_such_test.py", PYTHONPATH=str(tmp_path)
    )
    assert done.returncode == 1
    rows = [line.strip("│").split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    said = {row[0].strip(): row[1].strip().split(",")[0] for row in rows[-4:]}
    assert said == dict.fromkeys(ALL, "yes") | {"direct": "it was killed by SIGSEGV"}
    assert "the tests failed" in done.stdout.splitlines()[-1]


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
