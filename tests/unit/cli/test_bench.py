"""Flags: what is refused, before anything is started."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from kvxferd.bench import runner
from kvxferd.bench.cases import SHAPES
from kvxferd.bench.figures import Finding, at_most
from kvxferd.bench.testbed import TRANSPORTS, Site
from kvxferd.bench.workload import Workload
from kvxferd.cli import bench
from kvxferd.cli.root import root
from kvxferd.errors import KvxferdError
from tests.support import bench_results


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--size", "3K"], "64K"),
        (["--shape", "gpt-5"], "llama-3-70b"),
        (["--transport", "rdma"], "cma"),
        (["--measure", "speed"], "throughput"),
        (["--quick", "--size", "4M"], "--quick has its own shapes and sizes"),
    ],
)
def test_what_cannot_be_done_is_said(flags: list[str], says: str) -> None:
    said = CliRunner().invoke(root, ["bench", *flags])
    assert said.exit_code == 2
    assert says in said.output


def test_what_flags_offer_is_what_there_is() -> None:
    assert tuple(SHAPES) == bench.SHAPE_NAMES
    assert tuple(TRANSPORTS) == bench.TRANSPORT_NAMES
    assert tuple(runner.MEASURES) == bench.MEASURE_NAMES


def test_tables_show_every_point_and_what_fell_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_bench", lambda options, say: bench_results.result())
    said = CliRunner().invoke(root, ["bench", "--quick"])
    assert said.exit_code == 0
    assert said.stdout.count("qwen3-8b") == 2
    parts = ("HND/16 TP4 to NHD/32 TP2", "8 chunks of 64.0 MiB", "NO", "added latency, 64 KiB, p99", "[1]")
    for part in parts:
        assert part in said.stdout


def test_too_much_for_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_bytes", lambda: 3 << 30)
    said = CliRunner().invoke(root, ["bench", "--quick"])
    assert said.exit_code == 2
    assert "3.0 GiB is available" in said.output


def test_movers_that_alone_are_told_how_to_move_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFERD_MOVER_ENVIRONMENT", "UCX_TLS=tcp")
    said = CliRunner().invoke(root, ["bench", "--quick", "--measure", "idle"])
    assert said.exit_code == 2
    assert "KVXFERD_MOVER_ENVIRONMENT is set" in said.output


@pytest.mark.parametrize(
    ("failure", "is_over_every"),
    [(OSError("a process is gone"), True), (KvxferdError("a process is gone"), False)],
)
def test_what_was_measured_is_kept_when_a_later_measure_fails(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, is_over_every: bool
) -> None:
    taken: list[str] = []

    def take(site: Site, workload: Workload) -> Iterator[Finding | str]:
        taken.append(site.transport)
        yield bench_results.point(4 << 20, bench_results.steady(0.01, 0.009))
        yield "half of it"
        yield at_most("a", "a figure", 1, 2, "so", "us")
        if site.transport == "tcp":
            raise failure

    def fail(site: Site, workload: Workload) -> Iterator[Finding | str]:
        yield from ()
        raise failure

    measures = {"throughput": runner.Measure("throughput", take, is_over_every)}
    monkeypatch.setattr(runner, "MEASURES", measures | {"idle": runner.Measure("idle", fail)})
    flags = ["--measure", "throughput", *([] if is_over_every else ["--measure", "idle"])]
    said = CliRunner().invoke(root, ["bench", *flags, "--size", "64K", "--json"])
    assert said.exit_code == 2
    result = json.loads(said.stdout)
    assert "a process is gone" in result["error"]
    assert "half of it" in said.stderr
    assert taken == ["cma", "tcp"][: 1 + is_over_every]
    assert len(result["points"]) == len(taken)
    assert [figure["name"] for figure in result["figures"]] == ["a"]  # of the first transport alone
