"""Metrics: what is counted, what is read from the node, and what may never be a label."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvxferd
from kvxferd.core.limits.ledger import check_count
from kvxferd.core.limits.table import BUSY_LIMITS
from kvxferd.errors import BusyError, Code
from kvxferd.records import PHASES, RELEASE_REASONS, NodeSnapshot, ServedRecord
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


@pytest.mark.parametrize(
    ("lanes", "wanted"),
    [
        ("tcp", "tcp"),
        ("cma", "copy"),
        ("xpmem", "copy"),
        ("rc_mlx5/mlx5_0:1, rc_mlx5/mlx5_1:1", "rdma"),
        ("cma, rc_mlx5/mlx5_0:1", "rdma"),
        ("cma, cuda_ipc/cuda", "gpu"),
        ("new_thing/x", "other"),
    ],
)
def test_transports_are_of_few_classes(lanes: str, wanted: str) -> None:
    assert transport_class(lanes) == wanted


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


def test_an_engine_that_its_home_puts_together_is_a_member() -> None:
    whole, lacking = node_snapshot().engines
    assert [engine_state(engine) for engine in (whole, lacking)] == ["readable", "incomplete"]
    assert engine_state(msgspec.structs.replace(lacking, lacking=())) == "member"


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
