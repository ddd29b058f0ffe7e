"""The levers on real daemons, through the command line."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import TOKENS, ids_for, publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until


def kvxferd(daemon: Daemon, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "kvxferd.cli", *arguments, "--socket", daemon.control.socket_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_peers_transfers_and_a_drain(fleet: Fleet):
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    # One that is bound to every address warns of it, and is ready all the same.
    prefill = fleet.daemon(
        "prefill", "--peer-bind", f"tcp://0.0.0.0:{port}", "--peer-advertise", f"tcp://127.0.0.1:{port}",
        "--drain-limit-s", "0.5",
    )  # fmt: skip
    decode = fleet.daemon("decode")
    (source,) = fleet.engine(prefill, spec_of("prefill"))
    (sink,) = fleet.engine(decode, spec_of("decode"))
    pull_and_check([sink], publish([source], 1), 1)

    status, ready = prefill.control.request("GET", "/readyz")
    assert (status, ready["reasons"]) == (200, [])
    assert "without keys" in ready["warnings"][0]
    assert "without keys" in prefill.log.read_text()
    # A machine that is busy may add a warning of late timers.
    assert not any("keys" in text for text in decode.control.request("GET", "/readyz")[1]["warnings"])

    (peer,) = decode.status()["peers"]
    code, said = kvxferd(decode, "drop-peer", peer["endpoint"])
    assert (code, said) == (0, f"dropped {peer['endpoint']}\n")
    assert decode.status()["peers"] == []
    pull_and_check([sink], publish([source], 2), 2)

    ref = publish([source], 3)
    wait_until(lambda: "req-3" in json.dumps(prefill.status()["transfers"]), "the publish noticed")
    assert kvxferd(prefill, "cancel", "req-3")[0] == 0
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
    code, said = kvxferd(decode, "cancel", "--pull", str(pull["pull"]))
    name, failed = sink.end_of(ticket)
    assert failed["code"] == "cancelled" if code == 0 else "not-found" in said

    publish([source], 5)
    wait_until(lambda: "req-5" in json.dumps(prefill.status()["transfers"]), "the publish noticed")
    code, said = kvxferd(prefill, "drain", "--wait")
    assert (code, "transfer req-5 of prefill" in said) == (1, True)
    assert prefill.wait() == 0
    assert kvxferd(decode, "drain", "--wait") == (0, "drained: nothing was left\n")
    assert decode.wait() == 0


def test_the_service_manager_hears_when_it_is_ready_and_when_it_stops(fleet: Fleet, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        daemon = fleet.daemon("node", NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert manager.recv(4096).split(b"\n")[0] == b"READY=1"
        daemon.signal(signal.SIGTERM)
        stopping = manager.recv(4096).split(b"\n")
        assert stopping[0] == b"STOPPING=1"
        assert stopping[-1] == b"EXTEND_TIMEOUT_USEC=40000000"
        assert daemon.wait() == 0
