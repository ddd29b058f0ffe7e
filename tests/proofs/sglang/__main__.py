"""Real SGLang: python -m tests.proofs.sglang [--only MODULE...] [words for pytest].

Makes the environment where it is not there, and runs the tests of this folder with its SGLang.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.proofs.sglang import environment
from tests.support.repository import ROOT

HERE = Path(__file__).parent


def main() -> int:
    """Return 0 where all passed."""
    parser = argparse.ArgumentParser(prog="sglang", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="MODULE", default=[""], help="test_pools, or several")
    given, words = parser.parse_known_args()
    if not environment.is_made():
        environment.make()
    environ = os.environ | {environment.PYTHON_VARIABLE: environment.python()}
    report = f"--junitxml={ROOT / 'build' / 'proofs.xml'}"
    tests = [str(HERE / (name and f"{name}.py")) for name in given.only]
    command = [sys.executable, "-m", "pytest", *tests, report, *words]
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
