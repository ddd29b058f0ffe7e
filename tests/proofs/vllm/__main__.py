"""Real vLLM: python -m tests.proofs.vllm [--version VERSION] [--only MODULE] [--record] [words for pytest].

Makes the environment of a version where it is not there, and runs what can run in it: with a build for CPUs
its engines serve; of any other the classes and the planning code are asked (`CLASS_TESTS`). Where vLLM pins
another NIXL than the lock's, movers are tried over that one too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.proofs.__main__ import commit
from tests.proofs.vllm import environment
from tests.proofs.vllm.runs import ReleaseRun, keep, read_report
from tests.support.repository import ROOT

HERE = Path(__file__).parent
REPORT, MOVERS_REPORT = ROOT / "build" / "vllm.xml", ROOT / "build" / "vllm-nixl.xml"
CLASS_TESTS = "test_real_vllm"
# Releases whose requirements/kv_connectors.txt pins a NIXL that is not the lock's.
PINNED_NIXL = {"0.33": "1.5.0"}


def main() -> int:
    """Return 0 where all passed."""
    parser = argparse.ArgumentParser(prog="vllm", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", default="", help="a release, 0.33, or a version of one; else the lock's")
    parser.add_argument("--only", nargs="+", metavar="MODULE", help="test_layouts, or several: those alone")
    parser.add_argument("--record", action="store_true", help="write the results into docs/evidence")
    given, words = parser.parse_known_args()
    if given.record and words:
        parser.error("a record is of whole modules: --record takes no words for pytest")
    if not environment.is_made(given.version):
        environment.make(given.version)
    python = environment.python_of(given.version)
    build = environment.build_of(python)
    print(f"{' '.join(build)}, {'real engines' if build.runs_engines else 'classes alone'}", flush=True)
    if given.only and not build.runs_engines and given.only != [CLASS_TESTS]:
        parser.error(f"{' '.join(build)} is no build for CPUs: of it {CLASS_TESTS} alone can run")
    for report in (REPORT, MOVERS_REPORT):
        report.unlink(missing_ok=True)  # an earlier run's
    began = commit()
    modules = given.only or ([""] if build.runs_engines else [CLASS_TESTS])
    tests = [str(HERE / (name and f"{name}.py")) for name in modules]
    environ = os.environ | {environment.PYTHON_VARIABLE: python}
    command = [sys.executable, "-m", "pytest", *tests, f"--junitxml={REPORT}", *words]
    failed = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
    nixl = PINNED_NIXL.get(build.release, "")
    over_nixl = nixl and not words and not given.only
    if over_nixl:
        command = [sys.executable, "-m", "tests.proofs.other_nixl", nixl, f"--junitxml={MOVERS_REPORT}"]
        failed |= subprocess.run(command, cwd=ROOT, check=False).returncode
    if given.record and failed in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        found = read_report(REPORT, began) | read_report(MOVERS_REPORT, began)
        keep(ReleaseRun(build, nixl, found))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
