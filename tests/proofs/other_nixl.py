"""Movers over another NIXL than the lock's: python -m tests.proofs.other_nixl VERSION [words for pytest].

That NIXL is installed in a folder of its own, which comes before the environment's on the module path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT

TESTS = "tests/integration/mover"  # the contract of transports, and all that movers promise with it
PACKAGES = ("nixl", "nixl-cu12", "nixl-cu13")
WHERE = "import importlib.metadata, nixl; print(importlib.metadata.version('nixl'), nixl.__file__)"


def environ_with(version: str) -> dict[str, str]:
    """Return the environment of a process that is to import a version of NIXL; it is installed by then."""
    folder = ROOT / "build" / f"nixl-{version}"
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        words = ["--quiet", "--no-deps", "--upgrade", "--target", str(partial)]
        pins = [f"{package}=={version}" for package in PACKAGES]
        subprocess.run([sys.executable, "-m", "pip", "install", *words, *pins], check=True)
        partial.rename(folder)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    environ = os.environ | {"PYTHONPATH": path}
    imported = subprocess.run([sys.executable, "-c", WHERE], env=environ, stdout=subprocess.PIPE, check=True)
    found, _, file = imported.stdout.decode().strip().partition(" ")
    if found != version or folder not in Path(file).parents:
        raise RuntimeError(f"the NIXL of {folder} is not the one that is imported: {found} of {file}")
    return environ


def main() -> int:
    """Return pytest's exit status."""
    version, *words = sys.argv[1:]
    command = [sys.executable, "-m", "pytest", "-q", TESTS, *words]
    return subprocess.run(command, cwd=ROOT, env=environ_with(version), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
