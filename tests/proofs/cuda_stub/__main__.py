"""Runs what needs a GPU, and no torch of CUDA's, over the stand-in of tests/support/cuda_stub.

    python -m tests.proofs.cuda_stub

Needs root, for a mount namespace in which the PCI bus has two NVIDIA cards, and a C compiler. It runs on a
node without NVLinks and on one with them. Prints pytest's output of each, then one line of JSON. Exits with
1 where a test failed, was skipped or did not run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

from tests.support import cuda_stub
from tests.support.repository import ROOT

CHECKS = "tests/proofs/cuda_stub/checks.py"
OF_DEVICES = (
    "tests/unit/memory/test_driver_contract.py",
    "tests/integration/gpu/test_device_transfers.py",
    "tests/integration/gpu/test_covering.py",
)
NODES = {"without NVLinks": (0, (CHECKS, *OF_DEVICES)), "with NVLinks": (18, (CHECKS,))}
NUM_DEVICES = 2
NVIDIA, CONTROLLER_3D = "0x10de", "0x030200"
# Under `unshare --mount`: $0 is the directory that the PCI bus shows, the rest the command.
WITH_CARDS = 'mount --bind "$0" /sys/bus/pci/devices && exec "$@"'


def main() -> int:
    """Run all, and return the exit status."""
    began, results = time.monotonic(), {}
    with tempfile.TemporaryDirectory(prefix="kvxferd-cuda-stub-") as name:
        directory = Path(name)
        stub = cuda_stub.build(directory)
        cards = make_cards(directory / "pci")
        for node, (num_links, files) in NODES.items():
            print(f"--- a GPU node {node}", flush=True)
            environment = cuda_stub.environment(stub, DEVICES=NUM_DEVICES, NVLINKS=num_links)
            # A check sets variables for daemons and workers: no other may lend it its own.
            environment["KVXFERD_TEST_OWN"] = "1"
            results[node] = run(files, cards, directory / "report.xml", environment)
    is_right = all(one["passed"] == one["tests"] > 0 for one in results.values())
    seconds = round(time.monotonic() - began, 1)
    print(
        json.dumps({"proof": "cuda-stub", "ok": is_right, "seconds": seconds, "nodes": results}), flush=True
    )
    return 0 if is_right else 1


def make_cards(directory: Path) -> Path:
    """Make what sysfs has of the stand-in's devices, and return the directory."""
    for number in range(NUM_DEVICES):
        card = directory / f"0000:{0x11 + number:02x}:00.0"
        card.mkdir(parents=True)
        (card / "vendor").write_text(f"{NVIDIA}\n")
        (card / "class").write_text(f"{CONTROLLER_3D}\n")
    return directory


def run(files: tuple[str, ...], cards: Path, report: Path, environment: dict[str, str]) -> dict[str, int]:
    """Run the files' tests that need a GPU. Returns how many there are, and how many passed."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", *files]
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", WITH_CARDS, str(cards), *pytest]
    report.unlink(missing_ok=True)
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if not report.exists():
        return {"tests": 0, "passed": 0}
    tests = list(ElementTree.parse(report).iter("testcase"))
    bad = {"error", "failure", "skipped"}
    return {"tests": len(tests), "passed": sum(bad.isdisjoint(part.tag for part in test) for test in tests)}


if __name__ == "__main__":
    sys.exit(main())
