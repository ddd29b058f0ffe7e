"""Builds a stand-in for a GPU's driver, over which the real NIXL and UCX run: see stub.h."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-O1", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden")
# A function's first instruction must be one that UCX can move when it patches the function.
UNPROTECTED = "-fcf-protection=none"


def compiler() -> str | None:
    """Return the C compiler, None where there is none."""
    return shutil.which("cc")


def build(directory: Path) -> Path:
    """Build the libraries in a directory, and return it. Raises CalledProcessError."""
    cc = compiler()
    assert cc is not None, "there is no C compiler"
    version_script = directory / "cudart.map"
    version_script.write_text("libcudart.so.13 { global: *; };\n")
    libraries = {
        "libcuda.so.1": ("devices.c", "memory.c", "copies.c", "-pthread", "-ldl"),
        "libnvidia-ml.so.1": ("nvml.c",),
        "libcudart.so.13": ("cudart.c", f"-Wl,--version-script={version_script}"),
    }
    for name, parts in libraries.items():
        command = [cc, *FLAGS, UNPROTECTED, f"-Wl,-soname,{name}", "-o", str(directory / name), *parts]
        subprocess.run(command, cwd=SOURCES, check=True)
    return directory


def environment(directory: Path, **settings: object) -> dict[str, str]:
    """Return this process's environment with the stand-in first; `settings` as in stub.h, without prefix."""
    named = {f"CUDA_STUB_{name}": str(value) for name, value in settings.items()}
    return {**os.environ, "LD_LIBRARY_PATH": str(directory), **named}
