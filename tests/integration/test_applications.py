"""Each application once, as a process. What else they promise: `make proofs ONLY=applications`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.doctor_harness import examine
from tests.support.tool_process import DEMO, left_behind, start_tool, tool_directory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 200
BENCH = (
    *("--measure", "throughput", "--shape", "qwen3-8b", "--size", "1M"),
    *("--transport", "cma"),
)


def run(name: str, *flags: str) -> dict[str, Any]:
    """Run a tool that succeeds and leaves nothing behind; return the object that it printed."""
    with tool_directory() as place:
        process = start_tool(place, name, "--json", *flags)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, out + err
        assert left_behind(place) == []
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_demo_moves_every_byte_and_changes_no_other() -> None:
    seen = run("demo", *DEMO)
    assert seen["pulls"] == seen["delivered"] == 3
    assert seen["failed"] == seen["wrong_items"] == seen["spilled_bytes"] == 0
    # 2 layers, K and V, 2 heads of 16 bfloat16: every token once.
    assert seen["bytes"] >= 3 * 70 * 2 * 2 * 2 * 32
    assert seen["checked_items"] == 3 * 70 * 2 * 2 * 2
    assert seen["runs"] > 0


def test_every_contender_of_the_bench_moves_the_same_bytes() -> None:
    for point in run("bench", *BENCH)["points"]:
        assert set(point["contenders"]) == {"kvxferd", "raw", "engine"}
        assert abs(point["bytes"] - point["size_bytes"]) <= point["size_bytes"] / 4
        assert point["contenders"]["kvxferd"]["runs"] == point["contenders"]["raw"]["runs"] >= 1


def test_all_of_the_doctor_on_this_machine(tmp_path: Path) -> None:
    found = examine("--socket", str(tmp_path / "nobody.sock"))
    names = [finding["check"] for finding in found.findings]
    for check in ("python", "nixl", "kernel", "sealed memory", "same_node", "tcp",
                  "shared_memory", "memlock", "run_directory", "daemon", "gpu", "rdma"):  # fmt: skip
        assert check in names
    assert found.status == 0, found.findings
    assert found.of("nixl")["found"].startswith("nixl 1.")
    assert "UCX" in found.of("nixl")["facts"]["plugins"]
    assert found.of("nixl")["facts"]["ucx"]
    same_node, tcp = found.of("same_node")["facts"], found.of("tcp")["facts"]
    assert same_node["intact"]
    assert tcp["over_tcp"]
    assert not same_node["over_tcp"], "CMA works wherever these tests run"
    assert same_node["lanes"] == "cma"
    assert min(same_node["gigabytes_per_s"], tcp["gigabytes_per_s"]) > 0
    assert found.of("daemon")["verdict"] == "no"
    assert "kvxferd serve" in found.of("daemon")["todo"]
