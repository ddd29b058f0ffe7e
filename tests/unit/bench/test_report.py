"""The bench's report: the tables of its points and figures, and how each figure was taken."""

from __future__ import annotations

import pytest

from kvxferd.bench.figures import ContenderStats, Machine, Point, Result, at_least
from kvxferd.bench.report import print_report

MACHINE = Machine(
    cores=2, processor="a processor", kernel="6.1", python="3.11", kvxferd="1", nixl="nixl 1.5.1",
    busy_before_percent=1.0, load_before=0.5,
)  # fmt: skip
STATS = ContenderStats(n=7, gb_per_s=4.5, median_s=0.015, p99_s=0.02, engine_thread_median_s=0.0001, runs=3)
POINT = Point(
    measure="throughput",
    transport="cma",
    case={"shape": "qwen3-8b"},
    size_bytes=64 << 20,
    bytes=64 << 20,
    rounds=7,
    contenders={"kvxferd": STATS, "raw": STATS},
    ratios={"raw": 0.97},
    facts={"runs": 1234, "inside_pull_s": 0.0001, "not_direct_share": 0.5},
)


def test_each_value_of_a_point_stands_below_its_title(capsys: pytest.CaptureFixture[str]) -> None:
    met, missed = at_least("a", "a ratio", 0.97, 0.95, "by hand"), at_least("b", "other", 0.5, 0.95, "again")
    print_report(Result(machine=MACHINE, quick=True, points=[POINT], figures=[met, missed]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert " ".join(lines[1]) == "OVER SHAPE SIZE KVXFERD RAW KVXFERD BY RAW RUNS INSIDE PULL NOT DIRECT"
    assert lines[2] == ["cma", "qwen3-8b", "64.0", "MiB", "4.50", "4.50", "0.97", "1,234", "100", "us", "50%"]
    assert ["a", "ratio", "0.97", "at", "least", "0.95", "yes", "[1]"] in lines
    assert ["other", "0.5", "at", "least", "0.95", "NO", "[2]"] in lines
    assert ["[2]", "again"] in lines
