"""The daemon as a process: who else may run, what it logs, what operators do with it, how it drains."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from kvxferd.mover.ucx_settings import tls_with_cuda
from kvxferd.tooling.child_process import ChildError
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.processes import mappers_of
from tests.support.nodes.requests import TOKENS, ids_for, publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until
from tests.support.ports import free_port
from tests.support.python_process import run_kvxferd


def test_it_maps_neither_transfer_libraries_nor_pages_nor_regions_and_logs_each_transfer(fleet: Fleet):
    """What a process has not mapped cannot end it by SIGBUS."""
    daemon = fleet.shared("node")
    source, sink = fleet.pair(daemon)
    for request in range(3):
        pull_and_check([sink], publish([source], request), request)
        source.await_event("Released")
    mapped = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert not re.search(r"libtorch|nixl|libucp|memfd:", mapped)
    assert "memfd:" in Path(f"/proc/{source.pid}/maps").read_text()  # its own regions
    wait_until(lambda: len(daemon.logged("pull")) >= 3, "three lines")
    pulls = daemon.logged("pull")
    assert [line["transfer_id"] for line in pulls] == [f"req-{n}" for n in range(3)]
    assert all(line["outcome"] == "delivered" and line["bytes"] > 0 for line in pulls)


def test_a_second_daemon_on_the_same_directory_says_who_holds_it(fleet: Fleet):
    daemon = fleet.shared("node")
    second = run_kvxferd("serve", "--node-run-dir", daemon.directory)
    assert second.returncode != 0
    assert f"pid {daemon.pid}" in second.stderr
    assert "already-running" in second.stderr
    assert daemon.is_ready


def test_a_worker_socket_that_another_daemon_answers_is_left_alone(fleet: Fleet, tmp_path):
    daemon = fleet.shared("node")
    flags = ("--node-run-dir", tmp_path / "other", "--worker-socket", daemon.worker_socket)
    second = run_kvxferd("serve", *flags, "--http-bind", "", "--peer-bind", "tcp://127.0.0.1:0")
    assert second.returncode != 0
    assert "another daemon does" in second.stderr
    assert isinstance(fleet.engine(daemon, spec_of("prefill")), list)


def test_draining_finishes_what_was_published_and_refuses_what_is_new(fleet: Fleet):
    prefill, decode = fleet.daemon("prefill"), fleet.shared("decode")
    source, sink = fleet.pair(prefill, decode)
    ref = publish([source], 1)
    wait_until(lambda: prefill.status()["transfers"], "the publish noticed")
    prefill.send_signal(signal.SIGTERM)
    wait_until(lambda: prefill.status()["draining"], "draining")
    source.publish("late", ids_for(2, 16), TOKENS)
    assert source.await_event("PublishRefused")["code"] == "draining"
    pull_and_check([sink], ref, 1)
    assert prefill.wait() == 0


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
        status, reply = daemon.control.request("GET", "/readyz")
        assert status == 503
        assert "nixl" in " ".join(reply["reasons"])
    finally:
        assert daemon.stop() == 0


def test_what_movers_write_becomes_lines_of_the_log(fleet: Fleet):
    """UCX complains of a variable that it does not know; every line of the log is still JSON."""
    environ = {"UCX_TLS": tls_with_cuda("tcp"), "KVXFERD_MOVER_ENVIRONMENT": "UCX_NO_SUCH_THING=1"}
    daemon = fleet.daemon("node", **environ)
    fleet.engine(daemon, spec_of("prefill"))
    wait_until(lambda: "UCX_NO_SUCH_THING" in daemon.log_text(), "UCX says something")
    lines = [json.loads(line) for line in daemon.log_text().splitlines()]
    assert any("UCX_NO_SUCH_THING" in line["event"] and line["level"] == "warning" for line in lines)


def test_a_mover_that_dies_is_a_line_of_the_log_and_one_that_is_to_end_is_none(fleet: Fleet):
    """Killed for lack of memory, say. Those of workers that are killed, or leave, are none."""
    daemon = fleet.daemon("node")
    source, sink = fleet.pair(daemon)
    pull_and_check([sink], publish([source], 1), 1)
    (mover,) = daemon.movers_of(sink.memory_inode())
    os.kill(mover, signal.SIGKILL)
    wait_until(lambda: "mover died" in daemon.log_text(), "its death is logged")
    inode = source.memory_inode()
    source.kill()
    wait_until(lambda: not mappers_of(inode), "the dead worker's memory unmapped")
    assert daemon.stop() == 0
    died = daemon.logged("mover died")
    assert [(line["engine"], line["pid"], line["level"]) for line in died] == [("decode", mover, "warning")]


def test_peers_transfers_and_a_drain(fleet: Fleet):
    port = free_port()
    # One that is bound to every address warns of it, and is ready all the same.
    prefill = fleet.daemon(
        "prefill", "--peer-bind", f"tcp://0.0.0.0:{port}", "--peer-advertise", f"tcp://127.0.0.1:{port}",
        "--drain-limit-s", "0.5",
    )  # fmt: skip
    decode = fleet.daemon("decode")
    source, sink = fleet.pair(prefill, decode)
    pull_and_check([sink], publish([source], 1), 1)

    status, ready = prefill.control.request("GET", "/readyz")
    assert (status, ready["reasons"]) == (200, [])
    assert "without keys" in ready["warnings"][0]["message"]
    assert "without keys" in prefill.log_text()
    # A machine that is busy may add a warning of late timers.
    assert not any("keys" in str(one) for one in decode.control.request("GET", "/readyz")[1]["warnings"])

    (peer,) = decode.status()["peers"]
    done = decode.verb("drop-peer", peer["endpoint"])
    assert (done.returncode, done.stdout) == (0, f"dropped {peer['endpoint']}\n")
    assert decode.status()["peers"] == []
    pull_and_check([sink], publish([source], 2), 2)

    ref = publish([source], 3)
    wait_until(lambda: "req-3" in json.dumps(prefill.status()["transfers"]), "the publish noticed")
    assert prefill.verb("cancel", "req-3").returncode == 0
    while source.await_event("Released") != {"transfer_id": "req-3", "why": "cancelled"}:
        pass
    name, failed = sink.end_of(sink.pull(ref, ids_for(9, 16), TOKENS))
    assert (name, failed["safe_to_reuse"]) == ("Failed", True)

    # A pull that waits for a rank that never says ready, until an operator ends it.
    waiting = source.publish("half", ids_for(4, 16), TOKENS)
    source.unpublish(waiting)
    ticket = sink.pull(waiting | {"transfer_id": "never"}, ids_for(9, 16), TOKENS, 30.0)
    wait_until(lambda: decode.status()["pulls"], "the pull running")
    (pull,) = decode.status()["pulls"]
    done = decode.verb("cancel", "--pull", str(pull["pull"]))
    name, failed = sink.end_of(ticket)
    assert failed["code"] == "cancelled" if done.returncode == 0 else "not-found" in done.stderr

    publish([source], 5)
    wait_until(lambda: "req-5" in json.dumps(prefill.status()["transfers"]), "the publish noticed")
    done = prefill.verb("drain", "--wait")
    assert (done.returncode, "transfer req-5 of prefill" in done.stdout + done.stderr) == (1, True)
    assert prefill.wait() == 0
    done = decode.verb("drain", "--wait")
    assert (done.returncode, done.stdout) == (0, "drained: nothing was left\n")
    assert decode.wait() == 0
