"""What is made of what was measured: ratios in the same round, a summary of exactly these keys."""

import pytest

from kvxferd.bench.figures import Measurements, figures_of, summary_of
from kvxferd.bench.implementations import ENGINE, KVXFERD, RAW
from kvxferd.bench.measures.first_pull import FirstPull
from kvxferd.bench.measures.latency import added_latency
from kvxferd.bench.rounds import Round, Rounds
from kvxferd.bench.samples import Sample
from kvxferd.bench.workload import MIB
from tests.support import bench_results

KEYS = {
    "throughput_ratio_64m",
    "throughput_ratio_4m",
    "added_latency_us_p50",
    "added_latency_us_p99",
    "pull_call_us_p99",
    "first_pull_ms",
    "idle_cpu_percent",
    "small_behind_large_p99_ratio",
    "daemon_rss_mb",
    "mover_private_mb",
    "crossing_ratio",
    "crossing_ratio_lowest",
    "worst_against_direct",
    "handover_ratio",
    "handover_ratio_one_chunk",
}


def test_the_summary_has_exactly_its_keys_and_what_was_measured() -> None:
    summary = summary_of(figures_of(bench_results.findings()))
    assert set(summary) == KEYS
    assert summary == {
        "throughput_ratio_64m": pytest.approx(0.95),  # of 1.0, 0.5 and 0.95
        "throughput_ratio_4m": pytest.approx(0.9),
        "added_latency_us_p50": pytest.approx(250),
        "added_latency_us_p99": pytest.approx(1200),
        "pull_call_us_p99": pytest.approx(25 + 65.536),
        "first_pull_ms": pytest.approx(100),
        "idle_cpu_percent": pytest.approx(0.01),
        "small_behind_large_p99_ratio": pytest.approx(8),
        "daemon_rss_mb": pytest.approx(76),
        "mover_private_mb": pytest.approx(16),
        "crossing_ratio": pytest.approx(0.45),  # of 0.5, 0.4, 0.3 and 0.6: without PP2, and over CMA
        "crossing_ratio_lowest": pytest.approx(0.3),
        "worst_against_direct": pytest.approx(
            0.95
        ),  # not 0.7, which auto read directly, nor 0.5 of three rounds
        "handover_ratio": pytest.approx(0.2),
        "handover_ratio_one_chunk": pytest.approx(1.1),
    }


def test_aims_are_judged() -> None:
    figures = {figure.name: figure for figure in figures_of(bench_results.findings())}
    assert figures["throughput_ratio_4m"].met is True
    assert figures["throughput_ratio_64m_lowest"].met is False
    assert figures["throughput_ratio_64m_lowest"].value == pytest.approx(0.5)
    assert figures["added_latency_us_p99"].met is False
    assert (figures["handover_ratio"].met, figures["handover_ratio_one_chunk"].met) == (True, False)
    assert all(figure.how and figure.aim for figure in figures.values())


def test_first_pulls_of_several_layouts_are_figures_of_their_own() -> None:
    pulls = [FirstPull(MIB, "LBNHC", [0.2]), FirstPull(MIB, "BLHNC", [0.1, 0.3, 0.1])]
    found = {figure.name: figure.value for figure in figures_of(Measurements(first_pulls=pulls))}
    assert found == {
        "first_pull_ms_LBNHC": pytest.approx(200),
        "first_pull_ms_BLHNC": pytest.approx(100),
    }


def test_what_was_not_measured_is_null_and_not_made_up() -> None:
    assert summary_of(figures_of(Measurements())) == dict.fromkeys(KEYS)


def test_a_ratio_compares_within_a_round() -> None:
    # The machine was twice as slow in the second round, for both.
    uneven = {KVXFERD: [0.2, 0.4, 0.2], RAW: [0.1, 0.2, 0.1], ENGINE: [0.2, 0.4, 0.2]}
    point = bench_results.point(1 << 20, uneven)
    assert point.ratio_to_raw == pytest.approx(0.5)
    assert point.ratio_to_engine == pytest.approx(1.0)
    assert point.contenders[KVXFERD].n == 3
    assert point.contenders[KVXFERD].median_s == pytest.approx(0.2)
    assert point.contenders[KVXFERD].engine_thread_median_s == pytest.approx(0.02)


def test_ratios_of_one_transport_are_not_mixed_with_those_of_another() -> None:
    over_cma = bench_results.point(64 << 20, bench_results.steady(0.02, 0.01))
    over_tcp = bench_results.point(64 << 20, bench_results.steady(0.02, 0.02), transport="tcp")
    figures = {figure.name: figure for figure in figures_of(Measurements([over_cma, over_tcp, over_tcp]))}
    assert figures["throughput_ratio_64m"].value == pytest.approx(0.5)
    assert "1 points over cma" in figures["throughput_ratio_64m"].how


def test_added_latency_is_over_raw_in_the_same_round() -> None:
    ours = [Round([Sample(0.0, 0.0, 0.0, taken, 1, 1)], 1) for taken in (0.5, 0.9)]
    theirs = [Round([Sample(0.0, 0.1, 0.1, 0.1 + taken, 1, 1)], 1) for taken in (0.2, 0.4)]
    assert added_latency(Rounds(bench_results.a_case(), 1, {KVXFERD: ours, RAW: theirs})) == pytest.approx(
        [0.3, 0.5]
    )
