"""The bench as processes: it has every figure, it says what is wrong, and it leaves nothing behind."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxferd.bench.cases import BlockPattern
from kvxferd.bench.measures import layouts
from kvxferd.bench.runner import BenchOptions, run_bench
from kvxferd.bench.workload import HandoverSize, LayoutsSize, ThroughputPulls, Workload
from tests.support.nodes.waiting import comes_true
from tests.support.tool_process import left_behind, processes_of, start_tool, tool_directory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BENCH_S = 200
MIB = 1 << 20


@pytest.fixture
def place() -> Iterator[Path]:
    """The bench's temporary directory."""
    with tool_directory() as path:
        yield path


def start(place: Path, *flags: str, **environ: str) -> subprocess.Popen[str]:
    """Start a bench."""
    return start_tool(place, "bench", *flags, **environ)


FIGURES = {
    *(
        "throughput_ratio_64m",
        "throughput_ratio_64m_lowest",
        "throughput_ratio_4m",
        "throughput_ratio_4m_lowest",
    ),
    *("added_latency_us_p50", "added_latency_us_p99"),
    *("pull_call_us_p99", "pull_call_few_us_p99", "pull_call_one_us_p99"),
    *(
        "first_pull_ms",
        "idle_cpu_percent",
        "daemon_rss_mb",
        "mover_private_mb",
        "small_behind_large_p99_ratio",
    ),
    *("layouts_ratio", "layouts_ratio_lowest", "layouts_speedup_short_runs", "worst_against_direct"),
    *("handover_ratio", "handover_ratio_one_chunk"),
}


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
@pytest.mark.parametrize("measure", ["throughput", "first"])
def test_a_signal_leaves_nothing_behind(place: Path, number: signal.Signals, measure: str) -> None:
    flags = ("--transport", "cma", "--size", "256K")
    process = start(place, "--measure", measure, *flags)
    assert process.stderr is not None
    # In the middle of a round, or with daemons starting.
    sign = "of raw" if measure == "throughput" else "first pulls"
    while sign not in (line := process.stderr.readline()):
        assert line, "it ended before it was measuring"
    pids = processes_of(place)
    process.send_signal(number)
    process.communicate(timeout=BENCH_S)
    assert process.returncode == 130
    # A daemon that was being started ends once it looks for its parent.
    assert comes_true(lambda: not left_behind(place), 20.0), left_behind(place)
    assert [pid for pid in pids if Path(f"/dev/shm/kvxferd-movers-{pid}").exists()] == []
