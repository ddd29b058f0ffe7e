"""The daemon as a process: what it imports, who else may run, how it ends."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvxferd.telemetry.late_timers import LATE_S
from kvxferd.telemetry.timer_watch import INTERVAL_S
from kvxferd.tooling.child_process import ChildError
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet, mappers_of
from tests.support.nodes.requests import TOKENS, ids_for, publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until


def test_it_imports_neither_torch_nor_nixl(fleet: Fleet):
    daemon = fleet.daemon("node")
    mapped = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert not re.search(r"libtorch|nixl|libucp", mapped)
    code = (
        "import sys, kvxferd.daemon; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'nixl', 'rixl')])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_the_client_imports_msgspec_and_the_standard_library_alone():
    code = (
        "import sys; before = set(sys.modules); import kvxferd.client; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    # msgspec itself looks whether typing_extensions is there.
    assert set(ast.literal_eval(out)) - {"typing_extensions"} == {"kvxferd", "msgspec"}


def test_a_second_daemon_on_the_same_directory_says_who_holds_it(fleet: Fleet, tmp_path):
    daemon = fleet.daemon("node")
    command = [sys.executable, "-m", "kvxferd.cli", "serve", "--node-run-dir", str(daemon.directory)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode != 0
    assert f"pid {daemon.pid}" in second.stderr
    assert "already-running" in second.stderr
    assert daemon.is_ready


def test_a_worker_socket_that_another_daemon_answers_is_left_alone(fleet: Fleet, tmp_path):
    daemon = fleet.daemon("node")
    command = [sys.executable, "-m", "kvxferd.cli", "serve", "--node-run-dir", str(tmp_path / "other")]
    command += [
        "--worker-socket",
        daemon.worker_socket,
        "--http-bind",
        "",
        "--peer-bind",
        "tcp://127.0.0.1:0",
    ]
    second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode != 0
    assert "another daemon does" in second.stderr
    assert isinstance(fleet.engine(daemon, spec_of("prefill")), list)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_and_removes_its_sockets(fleet: Fleet, number):
    daemon = fleet.daemon("node")
    fleet.engine(daemon, spec_of("prefill"))
    movers = daemon.movers()
    assert movers
    daemon.signal(number)
    assert daemon.wait() == 0
    assert not list(daemon.directory.glob("*.sock"))
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in movers), "its movers gone")


def test_draining_finishes_what_was_published_and_refuses_what_is_new(fleet: Fleet):
    prefill, decode = fleet.daemon("prefill"), fleet.daemon("decode")
    (source,) = fleet.engine(prefill, spec_of("prefill"))
    (sink,) = fleet.engine(decode, spec_of("decode"))
    ref = publish([source], 1)
    wait_until(lambda: prefill.status()["transfers"], "the publish noticed")
    prefill.signal(signal.SIGTERM)
    wait_until(lambda: prefill.status()["draining"], "draining")
    source.publish("late", ids_for(2, 16), TOKENS)
    assert source.await_event("PublishRefused")["code"] == "draining"
    pull_and_check([sink], ref, 1)
    assert prefill.wait() == 0


def test_a_drain_that_nothing_ends_is_limited(fleet: Fleet):
    daemon = fleet.daemon("node", "--drain-limit-s", "0.3")
    (source,) = fleet.engine(daemon, spec_of("prefill"))
    publish([source], 1)
    wait_until(lambda: daemon.status()["transfers"], "the publish noticed")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert "drain limit reached" in daemon.log.read_text()


def test_without_nixl_it_lives_and_registrations_are_told_why(fleet: Fleet, tmp_path):
    blocked = tmp_path / "blocked"
    for name in ("nixl", "rixl"):
        (blocked / name).mkdir(parents=True)
        (blocked / name / "__init__.py").write_text("raise ImportError('blocked for a test')\n")
    daemon = Daemon(tmp_path / "bare", {"PYTHONPATH": str(blocked)})
    try:
        wait_until(
            lambda: daemon.control.socket_path and Path(daemon.worker_socket).exists(), "listening", 30
        )
        with pytest.raises(ChildError) as raised:
            fleet.register(daemon, spec_of("prefill"))
        assert raised.value.code == "nixl-unavailable"
        assert "blocked for a test" in raised.value.message
        status, answer = daemon.control.request("GET", "/readyz")
        assert status == 503
        assert "nixl" in " ".join(answer["reasons"])
    finally:
        assert daemon.stop() == 0


def test_one_line_is_logged_for_each_transfer_with_its_id(fleet: Fleet):
    daemon = fleet.daemon("node")
    (source,) = fleet.engine(daemon, spec_of("prefill"))
    (sink,) = fleet.engine(daemon, spec_of("decode"))
    for request in range(3):
        pull_and_check([sink], publish([source], request), request)
        source.await_event("Released")
    wait_until(lambda: daemon.log.read_text().count('"pull"') >= 3, "three lines")
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    pulls = [line for line in lines if line.get("event") == "pull"]
    assert [line["transfer"] for line in pulls] == [f"req-{n}" for n in range(3)]
    assert all(line["outcome"] == "delivered" and line["bytes"] > 0 for line in pulls)


def test_the_metrics_follow_what_happens(fleet: Fleet):
    daemon = fleet.daemon("node")
    (source,) = fleet.engine(daemon, spec_of("prefill"))
    (sink,) = fleet.engine(daemon, spec_of("decode"))
    ref = publish([source], 1)
    pull_and_check([sink], ref, 1)
    name, _ = sink.end_of(sink.pull(ref, ids_for(9, 16), TOKENS))
    assert name == "Failed"
    source.await_event("Released")
    wait_until(lambda: delivered(daemon) == 1, "counted")
    text = daemon.metrics()
    assert re.search(r'kvxferd_pulls_total\{.*code="released".*\} 1\.0', text)
    assert re.search(r'kvxferd_handshakes_total\{outcome="ok"\} 1\.0', text)
    for phase in ("queue", "handshake", "grant", "plan", "post", "wire", "fence", "ack"):
        assert re.search(rf'kvxferd_pull_phase_seconds_count\{{phase="{phase}"\}} [12]\.0', text), phase


def delivered(daemon: Daemon) -> float:
    match = re.search(r'kvxferd_pulls_total\{[^}]*outcome="delivered"[^}]*\} ([0-9.]+)', daemon.metrics())
    return float(match[1]) if match else 0.0


def test_what_movers_write_becomes_lines_of_the_log(fleet: Fleet):
    """UCX complains of a variable that it does not know; every line of the log is still JSON."""
    environ = {"KVXFERD_MOVER_ENVIRONMENT": "UCX_TLS=tcp,UCX_NO_SUCH_THING=1"}
    daemon = fleet.daemon("node", **environ)
    fleet.engine(daemon, spec_of("prefill"))
    wait_until(lambda: "UCX_NO_SUCH_THING" in daemon.log.read_text(), "UCX says something")
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    assert any("UCX_NO_SUCH_THING" in line["event"] and line["level"] == "warning" for line in lines)


def test_a_mover_that_dies_is_a_line_of_the_log_and_one_that_is_to_end_is_none(fleet: Fleet):
    """Killed for lack of memory, say. Those of workers that are killed, or leave, are none."""
    daemon = fleet.daemon("node")
    (source,) = fleet.engine(daemon, spec_of("prefill"))
    (sink,) = fleet.engine(daemon, spec_of("decode"))
    pull_and_check([sink], publish([source], 1), 1)
    (mover,) = set(mappers_of(sink.memory_inode())) & set(daemon.movers())
    os.kill(mover, signal.SIGKILL)
    wait_until(lambda: "mover died" in daemon.log.read_text(), "its death is logged")
    inode = source.memory_inode()
    source.kill()
    wait_until(lambda: not mappers_of(inode), "the dead worker's memory unmapped")
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    died = [line for line in lines if line["event"] == "mover died"]
    assert [(line["engine"], line["pid"], line["level"]) for line in died] == [("decode", mover, "warning")]


def test_a_daemon_that_was_stopped_reports_late_timers_and_starts_no_false_alarm(fleet: Fleet):
    """SIGSTOP is no lack of processors. A machine that is busy too may have starved it all the same."""
    daemon = fleet.daemon("node")
    resumed_at = time.monotonic() + LATE_S + 2 * INTERVAL_S
    daemon.signal(signal.SIGSTOP)
    while (left_s := resumed_at - time.monotonic()) > 0:
        time.sleep(left_s)  # the daemon cannot act before this: lateness is time that passes
    daemon.signal(signal.SIGCONT)
    wait_until(lambda: "timers late" in daemon.log.read_text(), "the late timer logged")
    warnings = daemon.control.get("/v1/status")["warnings"]
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    causes = {line["cause"] for line in lines if line["event"] == "timers late"}
    if any("starves" in warning for warning in warnings):
        assert "starved" in causes
    metrics = daemon.metrics()
    for cause in causes:
        assert re.search(rf'kvxferd_late_timers_total\{{cause="{cause}"\}} [1-9]', metrics), cause


def test_a_library_that_is_asked_for_by_name_and_missing_is_named(tmp_path):
    daemon = Daemon(tmp_path / "bare", {}, ("--mover-library", "rixl"))
    try:
        wait_until(lambda: Path(daemon.control.socket_path).exists(), "listening", 30)
        wait_until(lambda: "rixl" in str(daemon.control.request("GET", "/readyz")[1]), "the reason is told")
        status, answer = daemon.control.request("GET", "/readyz")
        assert status == 503
        assert "nixl:" not in " ".join(answer["reasons"])
    finally:
        assert daemon.stop() == 0
