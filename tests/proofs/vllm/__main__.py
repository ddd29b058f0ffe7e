"""Real vLLM: python -m tests.proofs.vllm [--version VERSION] [words for pytest].

Without a version its engines run; of another version the classes and the planning code are asked.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.proofs.vllm.environment import PYTHON_VARIABLE, ROOT, python_of

HERE = Path(__file__).parent


def main() -> int:
    """Return pytest's exit status."""
    parser = argparse.ArgumentParser(prog="vllm", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", default="", help="that of an environment beside .venv-vllm")
    requested, words = parser.parse_known_args()
    tests = HERE / "test_real_vllm.py" if requested.version else HERE
    environ = os.environ | {PYTHON_VARIABLE: python_of(requested.version)}
    command = [sys.executable, "-m", "pytest", str(tests), *words]
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
