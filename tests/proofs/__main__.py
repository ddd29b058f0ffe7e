"""What is long or wants the machine alone, one proof after another: `make proofs`.

    python -m tests.proofs [NAME...] [--args ARGUMENTS] [--stale] [--minutes N] [--record]

Each proof shows its own output and then one line of JSON. The last table names what ran, with its result and
its seconds, and what did not run and why. The last line counts. Exits with 1 where a proof failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.proofs.sglang import environment as sglang_environment
from tests.proofs.vllm import environment
from tests.support.nodes.processes import descendants
from tests.support.repository import ROOT

EVIDENCE = ROOT / "docs" / "evidence" / "proofs.toml"
REPORT = ROOT / "build" / "proofs.xml"  # of the last tests
PYTEST_FLAGS = ("--hypothesis-profile=proofs", f"--junitxml={REPORT}")


class Need(NamedTuple):
    """What a proof cannot run without, and how to have it."""

    name: str
    is_met: Callable[[], bool]
    how: str


def _program(name: str, package: str) -> Need:
    return Need(name, lambda: shutil.which(name) is not None, f"install Debian's {package}")


def _vllm(version: str = "") -> Need:
    how = f"make test-vllm {version and f'VERSION={version}'}".strip()
    return Need(f"vLLM {version}".strip(), lambda: environment.is_made(version), how)


def _has_image() -> bool:
    if shutil.which("podman") is None:
        return False
    return not subprocess.run(["podman", "image", "exists", _IMAGE], check=False).returncode


_IMAGE = os.environ.get("KVXFERD_IMAGE", "localhost/kvxferd:cpu")
SGLANG = Need("SGLang", sglang_environment.is_made, "make test-sglang")
IS_ROOT = Need("root", lambda: os.geteuid() == 0, "run it as root")
IP = _program("ip", "iproute2")
CC = _program("cc", "gcc")
NFT = _program("nft", "nftables")
PROMTOOL = _program("promtool", "prometheus")
PODMAN = _program("podman", "podman")
IMAGE = Need("image", _has_image, "python deploy/image/build.py --variant cpu --tag localhost/kvxferd:cpu")
ATHERIS = Need(
    "atheris",
    lambda: importlib.util.find_spec("atheris") is not None,
    "pip install -c constraints.txt atheris",
)
GPU = Need("GPU", lambda: Path("/dev/nvidiactl").exists(), "a machine with an NVIDIA GPU")


class Proof(NamedTuple):
    """A module with a command line, or tests, or both.

    size: the module's arguments where none are given. minutes: on two idle cores. paths: a change below one
    of them is a reason to run it.
    """

    name: str
    minutes: float
    module: str = ""
    size: str = ""
    tests: str = ""
    needs: tuple[Need, ...] = ()
    paths: tuple[str, ...] = ()
    on_demand: bool = False  # runs only where it is named

    def commands(self, arguments: str) -> list[list[str]]:
        """Return what it runs. With arguments of one's own: the module alone, or the tests."""
        found = []
        if self.module:
            found.append([sys.executable, "-m", self.module, *shlex.split(arguments or self.size)])
        if self.tests and not (self.module and arguments):
            words = shlex.split(f"{self.tests} {arguments}")
            found.append([sys.executable, "-m", "pytest", "-q", *PYTEST_FLAGS, *words])
        return found

    def missing(self) -> str:
        """Return what it needs and is not here; "" where nothing is."""
        return "; ".join(f"needs {need.name}: {need.how}" for need in self.needs if not need.is_met())


DECISIONS = ("kvxferd/core", "kvxferd/wire", "kvxferd/client")
MOVERS = ("kvxferd/mover", "kvxferd/memory", "kvxferd/frame_socket.py")
LAYOUTS = ("kvxferd/plan", "kvxferd/layout")
DAEMON = (*DECISIONS, *MOVERS, "kvxferd/control", "kvxferd/daemon.py")
SIMULATION = ("tests/simulation",)
CORE_WORLD = ("tests/support/sim", "tests/support/simulation.py")
APPLICATIONS = ("kvxferd/bench", "kvxferd/demo", "kvxferd/doctor", "kvxferd/tooling")
CONNECTORS = ("kvxferd/engine", "kvxferd/integrations/common")
VLLM = (
    *CONNECTORS,
    "kvxferd/integrations/vllm", "tests/proofs/vllm", "tests/support/vllm_servers", "constraints-vllm.txt",
)  # fmt: skip
SGLANG_PATHS = (
    *CONNECTORS,
    "kvxferd/integrations/sglang",
    "tests/proofs/sglang", "tests/support/sglang_servers", "constraints-sglang.txt",
)  # fmt: skip

# A result hangs on the code alone; a run with arguments of its own draws a fresh seed where it names none.
SEED = "--seed 20261124"

PROOFS = (
    Proof(
        "wheel", 1, "tests.proofs.wheel",
        paths=("kvxferd", "pyproject.toml", "constraints.txt", "README.md", "tests/proofs/wheel"),
    ),
    Proof(
        "firewall", 0.2, tests="tests/unit/deploy/test_firewall.py",
        needs=(IS_ROOT, NFT), paths=("deploy/firewall", "tests/unit/deploy/test_firewall.py"),
    ),
    Proof(
        "cuda-stub", 2, "tests.proofs.cuda_stub", needs=(IS_ROOT, CC),
        paths=(*MOVERS, "kvxferd/doctor", "tests/proofs/cuda_stub", "tests/support/cuda_stub"),
    ),
    Proof(
        "hosts", 1, tests="tests/proofs/hosts",
        needs=(IS_ROOT, IP), paths=(*DAEMON, "tests/proofs/hosts", "tests/support/network_namespaces.py"),
    ),
    Proof(
        "simulation", 7, "tests.simulation", f"--faults 10000 {SEED} --record --times",
        paths=(*DAEMON, *LAYOUTS, *SIMULATION),
    ),
    Proof(
        "model", 1.5, "tests.property.model", "--depth 1",
        paths=(*DECISIONS, "tests/support/sim", "tests/property/model"),
    ),
    Proof(
        "storms", 5, "tests.simulation.storms", "killed,cut-off,restarted 5,25",
        paths=(*DECISIONS, *SIMULATION),
    ),
    Proof(
        "checkers", 2, tests="tests/proofs/checkers tests/proofs/mutants",
        paths=(
            *SIMULATION, *CORE_WORLD, "tests/property/model", "tests/proofs/checkers", "tests/proofs/mutants",
        ),
    ),
    Proof(
        "random-pairs", 2,
        tests="tests/property/random_pairs tests/property/plan --random-pairs 2000",
        paths=(*LAYOUTS, *MOVERS, "tests/property/random_pairs", "tests/property/plan"),
    ),
    Proof(
        "packed-pages", 8, tests="tests/integration/connector/test_packed_pages.py --random-pairs 3000",
        paths=(*LAYOUTS, "kvxferd/integrations/vllm", "tests/support/vllm_pages.py"),
    ),
    Proof(
        "applications", 4, tests="tests/proofs/applications",
        paths=(*DAEMON, *APPLICATIONS, "tests/proofs/applications"),
    ),
    Proof(
        "monitoring", 5, tests="tests/unit/deploy/test_monitoring.py tests/proofs/monitoring",
        needs=(PROMTOOL,), paths=("kvxferd/telemetry", "deploy/monitoring", "tests/proofs/monitoring"),
    ),
    Proof(
        "chaos", 6, "tests.proofs.chaos", f"--faults 60 {SEED}", "tests/proofs/chaos",
        paths=(*DAEMON, "tests/support/nodes", "tests/proofs/chaos"),
    ),
    Proof(
        "game-day", 7, tests="tests/proofs/game_day -s",
        paths=("kvxferd/telemetry", "kvxferd/doctor", "tests/proofs/game_day"),
    ),
    Proof(
        "mutants", 8, "tests.proofs.mutants", f"--faults 6000 {SEED}",
        paths=(*DECISIONS, *MOVERS, *SIMULATION, "tests/proofs/mutants"),
    ),
    Proof(
        "hostile", 10, "tests.proofs.hostile", SEED, tests="tests/proofs/hostile",
        needs=(IS_ROOT,), paths=(*DAEMON, "kvxferd/run_directory.py", "tests/proofs/hostile"),
    ),
    Proof(
        "fuzz", 10, "tests.property.fuzz", "--seconds 600",
        needs=(ATHERIS,), paths=(*DECISIONS, *LAYOUTS, "tests/property/fuzz"),
    ),
    Proof(
        "image", 2, tests="tests/proofs/image",
        needs=(PODMAN, IS_ROOT, IMAGE), paths=("Dockerfile", "deploy/image", "tests/proofs/image"),
    ),
    Proof(
        "vllm-0.33", 5, "tests.proofs.vllm", "--version 0.33",
        needs=(_vllm("0.33"),), paths=(*MOVERS, *VLLM, "tests/proofs/other_nixl.py"),
    ),
    Proof("sglang", 15, "tests.proofs.sglang", needs=(SGLANG,), paths=(*DAEMON, *SGLANG_PATHS)),
    Proof("vllm", 15, "tests.proofs.vllm", needs=(_vllm(),), paths=(*DAEMON, *VLLM)),
    Proof(
        "gpu", 5, tests="tests/unit tests/integration -m gpu",
        needs=(GPU,), paths=(*MOVERS, "kvxferd/resident", "tests/integration/gpu"),
    ),
    Proof("soak", 30, "tests.proofs.chaos.soak", on_demand=True),
)  # fmt: skip


class Run(NamedTuple):
    """What became of a proof: `result` is passed, failed or skipped."""

    proof: Proof
    result: str
    seconds: float = 0.0
    why: str = ""  # or which of its tests were skipped, and why


def run(proof: Proof, arguments: str, left_s: float = float("inf")) -> Run:
    """Run a proof whose needs are met, and print its line of JSON. After `left_s` it is killed: skipped."""
    began = time.monotonic()
    REPORT.unlink(missing_ok=True)
    try:
        done = [
            _exit_status(command, began + left_s - time.monotonic()) for command in proof.commands(arguments)
        ]
        num_tests, skips = skipped_tests()
        result = "failed" if any(done) else "skipped" if skips and len(skips) == num_tests else "passed"
        why = f"{len(skips)} of {num_tests} tests skipped: {'; '.join(sorted(set(skips)))}" if skips else ""
    except subprocess.TimeoutExpired:
        result, why = "skipped", f"it did not end within the {left_s / 60:.0f} min that were left"
    finished = Run(proof, result, round(time.monotonic() - began, 1), why)
    line = {"proof": proof.name, "arguments": arguments or proof.size} | line_of(finished)
    print(json.dumps(line), flush=True)
    return finished


def _exit_status(command: Sequence[str], left_s: float) -> int:
    """Run a command. After `left_s` seconds kill it with its processes, and raise TimeoutExpired."""
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            return process.wait(None if left_s == float("inf") else left_s)
        except BaseException:
            for pid in (*descendants(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise


def skipped_tests() -> tuple[int, list[str]]:
    """Return how many tests pytest last ran, and why each skipped one was skipped."""
    if not REPORT.exists():
        return 0, []
    tests = list(ElementTree.parse(REPORT).iter("testcase"))
    return len(tests), [skip.get("message", "") for test in tests for skip in test.iter("skipped")]


def line_of(finished: Run) -> dict[str, object]:
    """Return what is kept of a run."""
    return {
        "result": finished.result,
        "seconds": finished.seconds,
        "commit": commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        **({"skipped": finished.why} if finished.why else {}),
    }


@cache
def commit() -> str:
    """Return the commit when it was first asked for: what is recorded later makes the tree dirty."""
    return _git("describe", "--always", "--dirty", "--abbrev=10", "--exclude=*") or "unknown"


def _git(*words: str) -> str | None:
    """Return what git prints; None where it fails, as it does for a commit that a shallow clone lacks."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.strip()


# --- which


def unchanged_since(proof: Proof, revision: str) -> bool:
    """Whether nothing below the proof's paths has changed since. A revision that is not here: False."""
    changed = _git("diff", "--name-only", revision, "--", *proof.paths) if revision else None
    return changed == ""


def read_evidence() -> dict[str, dict[str, object]]:
    """Return each proof's last recorded run."""
    return tomllib.loads(EVIDENCE.read_text()) if EVIDENCE.exists() else {}


def record(finished: Run) -> None:
    """Write into docs/evidence/proofs.toml how a proof has ended."""
    found = read_evidence() | {finished.proof.name: line_of(finished)}
    parts = ["# Each proof's last recorded run, on two cores: `make proofs ARGS=--record` writes it.\n"]
    for proof in PROOFS:
        if proof.name in found:
            lines = [f"{key} = {json.dumps(value)}\n" for key, value in found[proof.name].items()]
            parts.append(f"\n[{json.dumps(proof.name)}]\n{''.join(lines)}")
    EVIDENCE.write_text("".join(parts))


def why_not(proof: Proof, requested: argparse.Namespace, last: dict[str, object], left_s: float) -> str:
    """Return why a proof does not run now; "" where it does."""
    if proof.on_demand and not requested.names:
        return f"on demand: make proofs ONLY={proof.name}"
    if missing := proof.missing():
        return missing
    since = str(last.get("commit", "")) if last.get("result") == "passed" else ""
    if requested.stale and unchanged_since(proof, since):
        return f"unchanged since {since}"
    return f"no time left: {proof.minutes:g} min" if proof.minutes * 60 > left_s else ""


def main() -> int:
    """Run what was asked for, cheapest first."""
    parser = argparse.ArgumentParser(prog="proofs", description=__doc__.partition("\n")[0])
    names = [proof.name for proof in PROOFS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--args", default="", help="in place of the arguments that the table has")
    parser.add_argument(
        "--stale", action="store_true", help="those whose paths changed since they last passed"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="begin none that takes longer; kill one that does",
    )
    parser.add_argument("--record", action="store_true", help="write the results into docs/evidence")
    requested = parser.parse_args()
    if unknown := set(requested.names) - set(names):
        parser.error(f"there is no proof {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    commit()
    evidence = read_evidence()
    end = time.monotonic() + 60 * requested.minutes
    finished = []
    for proof in sorted(PROOFS, key=lambda one: one.minutes):
        if requested.names and proof.name not in requested.names:
            continue
        left_s = end - time.monotonic()
        why = why_not(proof, requested, evidence.get(proof.name, {}), left_s)
        finished.append(Run(proof, "skipped", why=why) if why else run(proof, requested.args.strip(), left_s))
        if requested.record and finished[-1].result != "skipped":
            record(finished[-1])
    show(finished)
    return int(any(one.result == "failed" for one in finished))


def show(finished: Sequence[Run]) -> None:
    """Print the table of what ran, what did not run and why, and the line that counts."""
    print("\nproof          result    seconds")
    for one in sorted(finished, key=lambda one: one.result == "skipped"):
        seconds = f"{one.seconds:7.1f}" if one.seconds else ""
        print(f"{one.proof.name:14} {one.result:9} {seconds:7} {one.why}".rstrip())
    counts = [
        f"{sum(one.result == kind for one in finished)} {kind}" for kind in ("passed", "failed", "skipped")
    ]
    print(", ".join(counts))


if __name__ == "__main__":
    sys.exit(main())
