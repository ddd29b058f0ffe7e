"""Metrics: what is counted, what is read from the node, and what may never be a label."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import kvxferd
from kvxferd.core.limits.ledger import check_count
from kvxferd.core.limits.table import BUSY_LIMITS
from kvxferd.errors import BusyError, Code
from kvxferd.ids import Endpoint, EngineId
from kvxferd.records import PHASES, RELEASE_REASONS, NodeSnapshot, ServedRecord
from kvxferd.telemetry.bounded_labels import (
    IDLE_S,
    MAX_LABEL_CHARS,
    MAX_NAMES,
    OTHER,
    BoundedLabels,
    clean_label,
)
from kvxferd.telemetry.gauges import engine_state, transport_class
from kvxferd.telemetry.metrics import Metrics
from kvxferd.telemetry.mover_usage import MOVER_STATES, MoverExit, MoverReading
from kvxferd.telemetry.remedies import REMEDIES
from kvxferd.telemetry.warnings import WarningKind
from tests.support.node_samples import PEER, SINK, SOURCE, node_snapshot, pull_record, records


def samples_of(metrics: Metrics, node: NodeSnapshot | None = None) -> dict[str, float]:
    """Every sample as `name{label="value"}`, as a scraper reads it."""
    return {
        sample.name + "".join(f"{{{k}={v}}}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render(node or node_snapshot()).decode())
        for sample in family.samples
    }


def test_what_ended_is_counted() -> None:
    metrics = Metrics()
    for record in records():
        metrics.record(record)
    got = samples_of(metrics)
    assert got["kvxferd_pulls_total{code=none}{outcome=delivered}"] == 1
    assert got["kvxferd_pulls_total{code=lease-expired}{outcome=failed}"] == 1
    assert got["kvxferd_pulled_bytes_total"] == 1 << 20  # the failed one's do not count
    assert got["kvxferd_pulled_runs_total"] == 64
    assert got["kvxferd_read_bytes_total{way=direct}"] == 1 << 18
    assert got["kvxferd_read_bytes_total{way=covering}"] == 3 << 18
    assert got["kvxferd_handshakes_total{outcome=ok}"] == 1
    assert got["kvxferd_releases_total{why=completed}"] == 1
    assert got["kvxferd_transfer_held_seconds_sum"] == pytest.approx(1.5)
    assert got["kvxferd_pull_seconds_count{outcome=delivered}"] == 1
    assert got["kvxferd_pull_phase_seconds_sum{phase=wire}"] == pytest.approx(0.02)
    assert got["kvxferd_pull_phase_seconds_count{phase=plan}"] == 0


def test_what_is_true_now_is_read_at_the_scrape() -> None:
    metrics = Metrics()
    got = samples_of(metrics)
    assert got["kvxferd_registered_ranks{state=ready}"] == 2
    assert got["kvxferd_registered_ranks{state=mapping}"] == 1
    assert got["kvxferd_registered_ranks{state=suspended}"] == 0
    assert got["kvxferd_registered_bytes"] == 9 << 20
    assert got["kvxferd_rank_lanes{lanes=copy}{reach=itself}"] == 2
    assert got["kvxferd_rank_lanes{lanes=tcp}{reach=node}"] == 2
    assert got["kvxferd_rank_lanes{lanes=rdma}{reach=network}"] == 0
    assert got["kvxferd_engines{state=readable}"] == 1
    assert got["kvxferd_engines{state=incomplete}"] == 1
    assert got["kvxferd_peers{state=up}"] == 1
    assert got["kvxferd_live_leases{state=granted}"] == 1
    assert got["kvxferd_live_leases{state=writing}"] == 1
    assert got["kvxferd_published_bytes"] == 5 << 20
    assert got["kvxferd_oldest_published_seconds"] == 41.5
    assert got["kvxferd_limit{limit=max_ranks}"] == 1020
    assert got["kvxferd_limit_used{limit=max_ranks}"] == 102
    assert got["kvxferd_running_pulls{phase=posted}"] == 1
    assert got["kvxferd_quarantined_pulls"] == 4
    assert got["kvxferd_quarantined_bytes"] == 6 << 20
    assert got["kvxferd_retired_movers"] == 3
    assert got["kvxferd_draining"] == 0
    assert samples_of(metrics, node_snapshot(draining=True))["kvxferd_draining"] == 1


def test_transports_and_engines_are_of_few_classes() -> None:
    classes = {
        "tcp": "tcp",
        "cma": "copy",
        "xpmem": "copy",
        "rc_mlx5/mlx5_0:1, rc_mlx5/mlx5_1:1": "rdma",
        "cma, rc_mlx5/mlx5_0:1": "rdma",
        "cma, cuda_ipc/cuda": "gpu",
        "new_thing/x": "other",
    }
    assert {lanes: transport_class(lanes) for lanes in classes} == classes
    whole, lacking = node_snapshot().engines
    put_together_elsewhere = msgspec.structs.replace(lacking, lacking=())
    states = [engine_state(engine) for engine in (whole, lacking, put_together_elsewhere)]
    assert states == ["readable", "incomplete", "member"]


def test_series_that_a_rate_needs_are_there_before_the_first() -> None:
    got = samples_of(Metrics())
    assert got["kvxferd_pulls_total{code=none}{outcome=delivered}"] == 0
    assert got["kvxferd_handshakes_total{outcome=ok}"] == 0
    for name, label, values in (
        ("kvxferd_pull_phase_seconds_count", "phase", PHASES),
        ("kvxferd_movers", "state", MOVER_STATES),
        ("kvxferd_mover_exits_total", "cause", MoverExit),
        ("kvxferd_warnings", "kind", WarningKind),
        ("kvxferd_releases_total", "why", RELEASE_REASONS),
    ):
        for value in values:
            assert got[f"{name}{{{label}={value}}}"] == 0
    for code in REMEDIES:
        assert got[f"kvxferd_pulls_total{{code={code}}}{{outcome=failed}}"] == 0
    for code in (Code.BUSY, Code.ENGINE_UNKNOWN, Code.PEER_UNREACHABLE):
        assert got[f"kvxferd_handshakes_total{{outcome={code}}}"] == 0
    assert len(got) < 450  # of each node: what nothing reads is no series
    for limit in BUSY_LIMITS:
        assert f"kvxferd_busy_refusals_total{{limit={limit}}}" in got


def test_a_code_that_no_pull_should_end_with_has_a_series_once_one_does() -> None:
    metrics = Metrics()
    series = "kvxferd_pulls_total{code=bad-frame}{outcome=failed}"
    assert series not in samples_of(metrics)
    metrics.record(pull_record("failed", Code.BAD_FRAME))
    assert samples_of(metrics)[series] == 1


def test_a_refusal_counts_for_its_limit() -> None:
    def refusals(limit: str) -> float:
        return samples_of(Metrics())[f"kvxferd_busy_refusals_total{{limit={limit}}}"]

    before = refusals("max_ranks")
    with pytest.raises(BusyError):
        check_count(1, 1, "do it", "limits.max_ranks")
    assert refusals("max_ranks") == before + 1


def test_progressive_deliveries_count_what_they_hid() -> None:
    metrics = Metrics()
    more = {"progressive": True, "hidden_bytes": 3 << 18, "handover_s": 0.004}
    metrics.record(msgspec.structs.replace(pull_record(), **more))
    metrics.record(pull_record())
    metrics.record(msgspec.structs.replace(pull_record("failed", Code.TRANSPORT), progressive=True))
    got = samples_of(metrics)
    assert got["kvxferd_progressive_pulls_total"] == 1
    assert got["kvxferd_hidden_bytes_total"] == 3 << 18
    assert got["kvxferd_handover_seconds_count"] == 1
    assert got["kvxferd_handover_seconds_sum"] == pytest.approx(0.004)


def test_what_readers_acknowledge_is_served() -> None:
    metrics = Metrics()
    for num_bytes in (100, 0):
        metrics.record_served(ServedRecord(source=SOURCE, sink=SINK, peer=PEER, bytes=num_bytes))
    got = samples_of(metrics)
    assert (got["kvxferd_served_pulls_total"], got["kvxferd_served_bytes_total"]) == (2, 100)


def test_no_request_engine_or_peer_is_a_label() -> None:
    metrics = Metrics()
    for record in records():
        metrics.record(record)
    metrics.record(pull_record("cancelled", Code.CANCELLED))
    text = metrics.render(node_snapshot()).decode()
    for name in ("req-", "prefill-0", "decode-0", "10.0.0", "boot-a", "odd"):
        assert name not in text


def test_what_other_parts_count_is_read_at_the_scrape() -> None:
    metrics = Metrics(
        count_warnings=lambda: {WarningKind.PLACEMENT: 1},
        is_ready=lambda: True,
        movers=lambda: MoverReading({"ready": 2}, Counter({MoverExit.DIED: 3}), None, []),
    )
    got = samples_of(metrics)
    assert got["kvxferd_warnings{kind=placement}"] == 1
    assert got["kvxferd_warnings{kind=same-node-tcp}"] == 0
    assert got["kvxferd_ready"] == 1
    assert (got["kvxferd_movers{state=ready}"], got["kvxferd_mover_exits_total{cause=died}"]) == (2, 3)


# --- series of engines and peers are few and clean


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


# --- every refusal as `busy` is counted, also those that raise no BusyError


PACKAGE = Path(kvxferd.__file__).parent
# What runs in the daemon and refuses. Elsewhere a refusal is of another process, which counts it.
SOURCES = [
    PACKAGE / "frame_socket.py",
    *(PACKAGE / "control").rglob("*.py"),
    *(PACKAGE / "core").rglob("*.py"),
]


def refuses(call: ast.Call) -> bool:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    is_counted_itself = ast.unparse(call.func) == "BusyError"
    return not is_counted_itself and "Code.BUSY" in map(ast.unparse, given)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_refusal_without_a_busy_error_counts_itself(path: Path) -> None:
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        counts = [call for call in calls if ast.unparse(call.func) == "count_busy_refusal"]
        assert sum(map(refuses, calls)) <= len(counts), f"{function.name} does not count each refusal"
        names = {ast.literal_eval(count.args[0]) for count in counts if count.args}
        assert names <= set(BUSY_LIMITS), function.name
