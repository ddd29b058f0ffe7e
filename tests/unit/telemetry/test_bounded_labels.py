"""Series of engines and peers: few and clean."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.errors import Code
from kvxferd.ids import Endpoint, EngineId
from kvxferd.records import ServedRecord
from kvxferd.telemetry.bounded_labels import (
    IDLE_S,
    MAX_LABEL_CHARS,
    MAX_NAMES,
    OTHER,
    BoundedLabels,
    clean_label,
)
from kvxferd.telemetry.metrics import Metrics
from tests.support.node_samples import node_snapshot, pull_record


@given(st.text(max_size=300))
def test_a_label_is_short_and_of_few_characters(text: str) -> None:
    label = clean_label(text)
    assert re.fullmatch(r"[A-Za-z0-9._:/\[\]-]+", label)
    assert len(label) <= MAX_LABEL_CHARS


def bounded(clock: Callable[[], float]) -> tuple[BoundedLabels, list[tuple[str, ...]]]:
    """Labels on a test's clock, and those that have series now."""
    there: list[tuple[str, ...]] = []
    return BoundedLabels(there.append, there.remove, clock), there


@given(st.lists(st.tuples(st.integers(0, 150), st.floats(0, 300)), max_size=400))
def test_what_has_series_is_what_is_used_and_bounded(uses: list[tuple[int, float]]) -> None:
    now = 0.0
    labels, there = bounded(lambda: now)
    for number, elapsed_s in uses:
        now += elapsed_s
        assert labels.of(f"engine-{number}") in there
        assert set(labels.used_at) == set(there) - {(OTHER,)}
        assert len(there) == len(set(there)) <= MAX_NAMES + 1


def test_a_place_that_is_idle_goes_to_a_newcomer_and_one_in_use_does_not() -> None:
    now = 0.0
    labels, there = bounded(lambda: now)
    for number in range(MAX_NAMES):
        labels.of(f"engine-{number}")
    assert labels.of("late") == (OTHER,)
    now = IDLE_S + 1
    labels.of("engine-1")
    assert labels.of("later") == ("later",)
    assert ("engine-1",) in there
    assert ("engine-0",) not in there


def test_names_that_are_invented_take_no_place_of_a_name_in_use_and_make_few_series() -> None:
    now = 0.0
    labels, there = bounded(lambda: now)
    invented = (f"engine-{number}" for number in itertools.count())
    honest = [f"honest-{number}" for number in range(4)]
    seen = set[tuple[str, ...]]()
    for second in range(0, int(IDLE_S), 4):
        now = float(second)
        for name in (*honest, *(next(invented) for _ in range(40))):
            labels.of(name)
        seen |= set(there)
    assert all((name,) in there for name in honest)
    assert len(seen) == MAX_NAMES + 1  # of 6,000 names


def test_pulls_and_acknowledgements_are_counted_by_pair_and_by_peer() -> None:
    metrics = Metrics(by_engine=True, by_peer=True)
    evil = msgspec.structs.replace(pull_record(), source=EngineId('a"}\n1 <b>\x1b[31m'))
    metrics.record(evil)
    metrics.record(msgspec.structs.replace(evil, outcome="failed", code=Code.DEADLINE))
    served = ServedRecord(
        source=EngineId("p"), sink=EngineId("d"), peer=Endpoint("tcp://10.0.0.9:1"), bytes=7
    )
    metrics.record_served(served)
    text = metrics.render(node_snapshot()).decode()
    assert (
        'kvxferd_engine_pulls_total{outcome="delivered",sink="decode-0",source="a___1__b__[31m"} 1.0' in text
    )
    assert 'kvxferd_engine_pulls_total{outcome="failed",sink="decode-0",source="a___1__b__[31m"} 1.0' in text
    assert 'kvxferd_engine_pulled_bytes_total{sink="decode-0",source="a___1__b__[31m"} 1.048576e+06' in text
    assert 'kvxferd_engine_served_bytes_total{sink="d",source="p"} 7.0' in text
    assert 'kvxferd_peer_served_pulls_total{peer="10.0.0.9:1"} 1.0' in text
    for number in range(2 * MAX_NAMES):
        metrics.record(
            msgspec.structs.replace(evil, source=EngineId(f"{number}"), peer=Endpoint(f"tcp://{number}"))
        )
    text = metrics.render(node_snapshot()).decode()
    for name in ("engine_pulled_bytes_total", "peer_pulled_bytes_total"):
        assert text.count(f"\nkvxferd_{name}{{") == MAX_NAMES + 1
