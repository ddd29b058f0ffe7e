"""Bench and demo as processes: they do what they say, they can fail, and they leave nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxferd.bench.cases import MIB, BlockPattern
from kvxferd.bench.measures import layouts
from kvxferd.bench.runner import BenchOptions, run_bench
from kvxferd.bench.workload import HandoverSize, LayoutsSize, ThroughputPulls, Workload
from tests.support.nodes.processes import started_with
from tests.support.nodes.waiting import comes_true
from tests.support.python_process import run_kvxferd
from tests.support.tool_process import DEMO, left_behind, start_tool, tool_directory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 200
BENCH = ("bench", "--transport", "cma", "--size", "256K")
FIGURES = {
    *("throughput_ratio_64m", "throughput_ratio_64m_lowest"),
    *("throughput_ratio_4m", "throughput_ratio_4m_lowest"),
    *("added_latency_us_p50", "added_latency_us_p99"),
    *("pull_call_us_p99", "pull_call_few_us_p99", "pull_call_one_us_p99"),
    *("first_pull_ms", "idle_cpu_percent", "daemon_rss_mb", "mover_private_mb"),
    *("small_behind_large_p99_ratio", "handover_ratio", "handover_ratio_one_chunk"),
    *("layouts_ratio", "layouts_ratio_lowest", "layouts_speedup_short_runs", "worst_against_direct"),
}


@pytest.fixture
def place() -> Iterator[Path]:
    """A tool's temporary directory."""
    with tool_directory() as path:
        yield path


def run_demo(place: Path, *flags: str, **environ: str) -> tuple[int, dict[str, Any]]:
    """Run a small demo; return its exit code and the object that it printed."""
    process = start_tool(place, "demo", *DEMO, "--json", *flags, **environ)
    out, err = process.communicate(timeout=LIMIT_S)
    try:
        return process.returncode, json.loads(out)
    except ValueError:
        pytest.fail(f"not one JSON object: {out!r}\n{err}")


def read_until(stream: Any, text: str) -> str:
    """Return the first line of a process's output that contains a text."""
    while text not in (line := stream.readline()):
        assert line, "it ended"
    return str(line)


def end(process: subprocess.Popen[str], place: Path, number: signal.Signals = signal.SIGINT) -> int:
    """End a tool by a signal, and return its exit status; nothing of it may be left."""
    pids = started_with("TMPDIR", place)
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    # A daemon that was being started ends once it looks for its parent.
    assert comes_true(lambda: not left_behind(place), 20.0), left_behind(place)
    assert [pid for pid in pids if Path(f"/dev/shm/kvxferd-movers-{pid}").exists()] == []
    return process.returncode


def test_every_figure_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "ALL_LAYOUTS", layouts.ALL_LAYOUTS[:1])
    effort = Workload(
        (
            ThroughputPulls("qwen3-8b", BlockPattern.FRAGMENTED, 4 * MIB, 1),
            ThroughputPulls("mamba2-hybrid", BlockPattern.SCATTERED, 64 * MIB, 1),
        ),
        rounds=2,
        small_per_round=4,
        calls_per_round=2,
        first_rounds=1,
        behind_pulls=40,
        behind_bytes=64 * MIB,
        idle_s=0.5,
        layouts_sizes=(LayoutsSize(4 * MIB, 2),),
        handover_sizes=(HandoverSize(3, 2 * MIB), HandoverSize(1, 2 * MIB)),
    )
    said: list[str] = []
    result = run_bench(BenchOptions(effort, ("cma",), is_quick=True), said.append)
    assert {figure.name for figure in result.figures} == FIGURES
    assert all(figure.value >= 0 for figure in result.figures), result.figures
    handovers = [point.bytes for point in result.points if point.measure == "handover"]
    assert handovers == [6 * MIB, 2 * MIB]
    assert "idle (cma)" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("command", "sign"),
    [
        ((*BENCH, "--measure", "throughput"), "of raw"),
        ((*BENCH, "--measure", "first"), "first pulls"),
        (("demo", *DEMO, "--requests", "100000"), "request 1 of 100000"),
    ],
    ids=["bench in a round", "bench with daemons that start", "demo"],
)
def test_a_signal_leaves_nothing_behind(
    place: Path, number: signal.Signals, command: tuple[str, ...], sign: str
) -> None:
    process = start_tool(place, *command)
    read_until(process.stdout if command[0] == "demo" else process.stderr, sign)
    assert end(process, place, number) == 130


@pytest.mark.parametrize(("damage", "field"), [("item", "wrong_items"), ("spill", "spilled_bytes")])
def test_one_spoilt_byte_fails_the_demo(place: Path, damage: str, field: str) -> None:
    code, seen = run_demo(place, "--requests", "1", "--damage", damage)
    assert (code, seen["ok"]) == (1, False)
    assert seen[field] == seen["delivered"] == 1


def test_the_demo_goes_on_until_ctrl_c_and_shows_what_to_look_at(place: Path) -> None:
    process = start_tool(place, "demo", *DEMO, "--requests", "1", "--keep")
    page = read_until(process.stdout, "look: ").removeprefix("look: ").strip()
    read_until(process.stdout, "requests go on until Ctrl-C")
    commands = [read_until(process.stdout, "--socket").split() for _ in range(4)]
    with urllib.request.urlopen(page) as reply:
        assert b"kvxferd" in reply.read()
    for _, verb, *arguments in commands[1:]:
        told = run_kvxferd(verb, *arguments)
        assert told.returncode == 0, told.stderr
    assert end(process, place) == 0


def test_a_daemon_that_cannot_work_ends_the_demo_with_a_reason(place: Path, tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("raise ImportError('no nixl on this machine')\n")
    code, seen = run_demo(place, PYTHONPATH=str(tmp_path))
    assert code == 1
    assert "no nixl on this machine" in seen["error"]
    assert left_behind(place) == []
