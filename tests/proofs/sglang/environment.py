"""The environment of the SGLang proofs: python -m tests.proofs.sglang.environment.

It has SGLang's wheel of PyPI, some 3 GB with what it imports. KVXFERD_SGLANG_PYTHON names the interpreter of
an SGLang that is elsewhere.
"""

from __future__ import annotations

import os
import venv

from tests.proofs.vllm.environment import install, install_torch, locked_versions, pins
from tests.support.repository import ROOT

LOCK = ROOT / "constraints-sglang.txt"
DIRECTORY = ROOT / ".venv-sglang"
STAMP = DIRECTORY / ".installed"
PYTHON_VARIABLE = "KVXFERD_SGLANG_PYTHON"


def is_made() -> bool:
    """Whether it is there, and not older than the lock; or another interpreter is named."""
    fresh = STAMP.exists() and STAMP.stat().st_mtime >= LOCK.stat().st_mtime
    return fresh or bool(os.environ.get(PYTHON_VARIABLE))


def python() -> str:
    """Return its interpreter, or the one that is named."""
    return os.environ.get(PYTHON_VARIABLE, "") or str(DIRECTORY / "bin" / "python")


def make() -> None:
    """Install it. The lock is complete, so nothing is resolved. Raises CalledProcessError."""
    print(f"making {DIRECTORY}: some GB, which takes minutes", flush=True)
    venv.create(DIRECTORY, with_pip=True)
    locked = locked_versions(LOCK)
    install_torch(DIRECTORY, locked["torch"])
    install(DIRECTORY, "--no-deps", *pins(locked))
    install(DIRECTORY, "--no-deps", "-e", str(ROOT))
    STAMP.touch()


if __name__ == "__main__":
    if not is_made():
        make()
    print(python())
