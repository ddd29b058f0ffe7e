"""Builds wheel and sdist, installs the wheel into fresh environments, and uses it there.

    python -m tests.proofs.wheel

All of it is below a temporary directory; the working tree is not written. The last line says what ran, or
what failed. Versions are those of constraints.txt; torch and NIXL are not installed.
"""

from __future__ import annotations

import email.parser
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import kvxferd
from tests.support.repository import ROOT, files_in

CONSTRAINTS = ROOT / "constraints.txt"
SOURCES = ("kvxferd", "pyproject.toml", "README.md", "LICENSE")
STEP_TIMEOUT_S = 170
EXTRA_HINT = "pip install 'kvxferd[daemon]'"
# Modules that an engine imports, and of which nothing but msgspec may be needed.
ENGINE_IMPORTS = "kvxferd.client, kvxferd.layout, kvxferd.layout.presets, kvxferd.memory, kvxferd.errors"
CONSUMER = """
from kvxferd.client import Client
from kvxferd.layout import EngineSpec, Group, RegionSpec

ids: tuple[str, ...] = ("prefill", "generation", "full", "kv")  # an engine's own ids are plain texts
described = EngineSpec(ids[0], ids[1], 4), Group(ids[2], 8, 16), RegionSpec(ids[3], 1 << 20)

def close(client: Client) -> None:
    client.close()
    client.no_such_method()
"""


class Failure(Exception):
    """A check did not hold; the message says which."""


class Built(NamedTuple):
    """What the build made."""

    wheel: Path
    sdist: Path
    wheel_of_tree: Path  # built without the way over the sdist


def main() -> int:
    """Run every step in order; return the exit status."""
    began = time.monotonic()
    steps: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvxferd-wheel-") as directory:
        work = Path(directory)
        try:
            tools = _tools(work)
            built = _build(work, tools)
            for title, step in STEPS.items():
                step(work, tools, built)
                steps.append(title)
        except (Failure, subprocess.TimeoutExpired) as error:
            print(f"wheel-test: failed after {', '.join(steps) or 'nothing'}: {error}")
            return 1
    print(
        f"wheel-test: {built.wheel.name}, Python {platform.python_version()}, "
        f"{time.monotonic() - began:.0f} s, passed: {'; '.join(steps)}"
    )
    return 0


# --- making


def _tools(work: Path) -> Path:
    """Return the scripts of an environment with the build tools."""
    scripts = _fresh_environment(work / "tools")
    _pip(scripts, "build", "pipx", "setuptools")
    return scripts


def _build(work: Path, tools: Path) -> Built:
    tree = work / "tree"
    for path in files_in(*SOURCES):
        target = tree / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    # Without isolation: the locked setuptools of the tools' environment builds.
    build = [str(tools / "python"), "-m", "build", "--no-isolation", "--outdir"]
    _run([*build, str(work / "dist"), str(tree)])
    _run([*build, str(work / "direct"), "--wheel", str(tree)])
    (wheel,) = (work / "dist").glob("*.whl")
    (sdist,) = (work / "dist").glob("*.tar.gz")
    (wheel_of_tree,) = (work / "direct").glob("*.whl")
    return Built(wheel, sdist, wheel_of_tree)


# --- steps


def check_sdist(work: Path, tools: Path, built: Built) -> None:
    """The wheel that is built from the sdist has the files of that built from the tree, byte for byte."""
    of_sdist, of_tree = _contents(built.wheel), _contents(built.wheel_of_tree)
    differing = sorted(n for n in of_sdist.keys() | of_tree.keys() if of_sdist.get(n) != of_tree.get(n))
    _expect(not differing, f"the wheel of the sdist differs from the tree's in {differing}")
    committed = {str(p.relative_to(ROOT)) for p in files_in("kvxferd")}
    lacking = sorted(committed - of_sdist.keys())
    _expect(not lacking, f"the wheel lacks {lacking}")


def check_contents(work: Path, tools: Path, built: Built) -> None:
    """Sample, types, licence, version and entry points are in the wheel, and nothing beside the package."""
    contents = _contents(built.wheel)
    info = f"kvxferd-{kvxferd.__version__}.dist-info"
    tops = {name.partition("/")[0] for name in contents}
    _expect(tops == {"kvxferd", info}, f"the wheel has {sorted(tops)} at its top")
    sample = (ROOT / "config" / "kvxferd.toml").read_bytes()
    _expect(contents.get("kvxferd/config/kvxferd.toml") == sample, "the wheel has no sample configuration")
    _expect("kvxferd/py.typed" in contents, "the wheel has no py.typed")
    _expect(f"{info}/licenses/LICENSE" in contents, "the wheel has no licence")
    metadata = email.parser.BytesParser().parsebytes(contents[f"{info}/METADATA"])
    _expect(metadata["Version"] == kvxferd.__version__, f"the wheel is of version {metadata['Version']}")
    unconditional = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    is_msgspec = len(unconditional) == 1 and unconditional[0].startswith("msgspec")
    _expect(is_msgspec, f"it requires {unconditional}")


def check_client(work: Path, tools: Path, built: Built) -> None:
    """Without an extra: the client imports with msgspec alone, is typed, and the command names the extra."""
    scripts = _fresh_environment(work / "client")
    _pip(scripts, str(built.wheel))
    installed = _installed(scripts) - {"pip", "setuptools", "wheel"}
    _expect(installed == {"kvxferd", "msgspec"}, f"the client installs {sorted(installed)}")
    _run([str(scripts / "python"), "-I", "-c", f"import {ENGINE_IMPORTS}"], cwd=work)
    for verb in ("status", "doctor", "--version"):
        done = _run([str(scripts / "kvxferd"), verb], code=2, cwd=work)
        is_one_line = done.stderr.startswith("kvxferd: cannot ") and done.stderr.count("\n") == 1
        _expect(is_one_line and EXTRA_HINT in done.stderr, f"`kvxferd {verb}` prints {done.stderr!r}")
    (work / "consumer.py").write_text(CONSUMER)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull]
    command += ["--python-executable", str(scripts / "python"), "consumer.py"]
    done = _run(command, code=1, cwd=work)
    _expect('"Client" has no attribute "no_such_method"' in done.stdout, f"mypy prints {done.stdout!r}")
    _expect("Found 1 error in" in done.stdout, f"mypy prints {done.stdout!r}")


def check_pipx(work: Path, tools: Path, built: Built) -> None:
    """With [daemon], under pipx: the command runs, doctor reports, and the sample passes its own check."""
    places = {"HOME": "pipx", "BIN_DIR": "bin", "MAN_DIR": "man"}
    home = {f"PIPX_{name}": str(work / folder) for name, folder in places.items()}
    install = [str(tools / "pipx"), "install", "--python", sys.executable, "--pip-args", f"-c {CONSTRAINTS}"]
    _run([*install, f"{built.wheel}[daemon]"], **home)
    command = str(work / "bin" / "kvxferd")
    version = _run([command, "--version"]).stdout
    _expect(version == f"kvxferd, version {kvxferd.__version__}\n", f"--version prints {version!r}")
    run_dir = {"KVXFERD_NODE_RUN_DIR": str(work / "run")}
    # Exit status 1: without the extra `nixl` there are no movers, and doctor says so.
    doctor = _run([command, "doctor", "--json"], code=1, **run_dir)
    findings = {finding["check"]: finding for finding in json.loads(doctor.stdout)["findings"]}
    _expect(findings["python"]["verdict"] == "ok", f"doctor finds {findings['python']}")
    _expect("pip install" in findings["nixl"]["todo"], f"doctor finds {findings['nixl']}")
    broken = [f for f in findings.values() if "this check failed" in f["found"]]
    _expect(not broken, f"checks of doctor failed: {broken}")
    table = _run([command, "doctor"], code=1, **run_dir).stdout
    _expect("nixl" in table, f"doctor prints {table!r}")
    sample = _run([command, "config", "defaults"]).stdout
    tomllib.loads(sample)
    (work / "sample.toml").write_text(sample)
    _run([command, "config", "check", str(work / "sample.toml")])
    shown = json.loads(_run([command, "config", "show", "--here", "--json"], **run_dir).stdout)["settings"]
    found = shown["node.run_dir"]
    _expect(found["source"] == "KVXFERD_NODE_RUN_DIR", f"config show: {found}")


STEPS: dict[str, Callable[[Path, Path, Built], None]] = {
    "the sdist builds the same files": check_sdist,
    "sample, types and metadata": check_contents,
    "client with msgspec alone": check_client,
    "[daemon] under pipx: doctor and config": check_pipx,
}

# ---


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise Failure(message)


def _fresh_environment(place: Path) -> Path:
    """Return the scripts of a new virtual environment."""
    venv.create(place, with_pip=True, symlinks=True)
    return place / "bin"


def _pip(scripts: Path, *requirements: str) -> None:
    pip = [str(scripts / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "-c", str(CONSTRAINTS), *requirements])


def _installed(scripts: Path) -> set[str]:
    pip = [str(scripts / "python"), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    return {package["name"] for package in json.loads(_run(pip).stdout)}


def _contents(wheel: Path) -> dict[str, bytes]:
    """Return the wheel's files, without the list of them."""
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if not name.endswith(("/", ".dist-info/RECORD"))]
        return {name: file.read(name) for name in names}


def _run(
    command: list[str], *, code: int = 0, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command without this repository's settings. Raises Failure for another exit code."""
    ours = ("KVXFERD_", "PYTHON")
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=STEP_TIMEOUT_S,
        cwd=cwd or tempfile.gettempdir(),
        env=inherited | environ,
    )
    if done.returncode != code:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise Failure(f"`{' '.join(command)}` ended with {done.returncode} in place of {code}:\n{tail}")
    return done


if __name__ == "__main__":
    sys.exit(main())
