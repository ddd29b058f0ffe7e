"""What is made of what was measured: ratios in the same round, and aims that are judged."""

import pytest

from kvxferd.bench.contenders import ENGINE, KVXFERD, RAW, Round
from kvxferd.bench.figures import Figure
from kvxferd.bench.measures.handover import ratio_of
from kvxferd.bench.measures.layouts import ALL_LAYOUTS, gains_of_auto
from kvxferd.bench.measures.small_pulls import added_latency
from kvxferd.bench.measures.throughput import ratios
from kvxferd.bench.rank import Sample
from tests.support import bench_results
from tests.support.bench_results import MIB


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    assert all(figure.how and figure.aim for figure in figures)
    return {figure.name: figure for figure in figures}


def test_throughput_is_judged_by_its_median_and_its_lowest_point() -> None:
    points = [
        bench_results.point(4 * MIB, bench_results.steady(0.010, 0.009)),
        bench_results.point(64 * MIB, bench_results.steady(0.020, 0.020)),
        bench_results.point(64 * MIB, bench_results.steady(0.020, 0.010)),
        bench_results.point(256 * MIB, bench_results.steady(0.020, 0.019)),
    ]
    figures = by_name(list(ratios(points)))
    assert {name: (round(one.value, 3), one.met) for name, one in figures.items()} == {
        "throughput_ratio_64m": (0.95, True),  # of 1.0, 0.5 and 0.95
        "throughput_ratio_64m_lowest": (0.5, False),
        "throughput_ratio_4m": (0.9, True),
        "throughput_ratio_4m_lowest": (0.9, True),
    }
    assert "3 points over cma" in figures["throughput_ratio_64m"].how


def test_layouts_are_judged_by_their_median_and_by_the_worst_choice() -> None:
    points = [
        bench_results.layouts_point(ALL_LAYOUTS[0], 14.0, 0.5, not_direct=1.0),
        bench_results.layouts_point(ALL_LAYOUTS[1], 12.0, 0.4, not_direct=1.0),
        bench_results.layouts_point(ALL_LAYOUTS[2], 0.95, 0.3, not_direct=0.5),
        bench_results.layouts_point(ALL_LAYOUTS[4], 0.7, 0.6, not_direct=0.0),  # by chance: read directly
        bench_results.layouts_point(ALL_LAYOUTS[-1], 0.98, 0.1, not_direct=0.1),  # without short runs
        bench_results.layouts_point(ALL_LAYOUTS[-1], 0.5, 0.1, not_direct=1.0, rounds=3),  # of few rounds
    ]
    figures = by_name(list(gains_of_auto(points)))
    assert {name: (round(one.value, 3), one.met) for name, one in figures.items()} == {
        "layouts_ratio": (0.45, True),
        "layouts_ratio_lowest": (0.3, True),
        "layouts_speedup_short_runs": (14.0, True),
        "worst_against_direct": (0.95, True),
    }


def test_a_handover_is_judged_by_its_chunks() -> None:
    several, one = (ratio_of(*bench_results.handover_point(*of)) for of in ((8, 0.2), (1, 1.1)))
    assert (several.name, several.met) == ("handover_ratio", True)
    assert (one.name, one.met) == ("handover_ratio_one_chunk", False)


def test_a_ratio_compares_within_a_round() -> None:
    # The machine was twice as slow in the second round, for both.
    uneven = {KVXFERD: [0.2, 0.4, 0.2], RAW: [0.1, 0.2, 0.1], ENGINE: [0.2, 0.4, 0.2]}
    point = bench_results.point(1 << 20, uneven)
    assert point.ratios == pytest.approx({RAW: 0.5, ENGINE: 1.0})
    assert point.contenders[KVXFERD].n == 3
    assert point.contenders[KVXFERD].median_s == pytest.approx(0.2)
    assert point.contenders[KVXFERD].engine_thread_median_s == pytest.approx(0.02)


def test_added_latency_is_over_raw_in_the_same_round() -> None:
    ours = [Round([Sample(0.0, 0.0, 0.0, taken, 1, 1)], 1, 1) for taken in (0.5, 0.9)]
    theirs = [Round([Sample(0.0, 0.1, 0.1, 0.1 + taken, 1, 1)], 1, 1) for taken in (0.2, 0.4)]
    assert added_latency({KVXFERD: ours, RAW: theirs}) == pytest.approx([0.3, 0.5])
