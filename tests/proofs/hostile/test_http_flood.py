"""A daemon with few descriptors, and clients that hold HTTP connections open."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvxferd.control.fd_budget import RESERVED_FDS
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until
from tests.support.ports import free_port

DESCRIPTORS = 300


HEAD = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("sent", [HEAD, HEAD + b"\r\n"], ids=["unfinished", "idle after an answer"])
def test_requests_leave_workers_their_descriptors(fleet: Fleet, tmp_path: Path, sent: bytes) -> None:
    port = free_port()
    limited = ("prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}")
    daemon = Daemon(tmp_path / "node", {}, ("--http-bind", f"127.0.0.1:{port}"), prefix=limited)
    try:
        wait_until(lambda: daemon.is_ready, "ready", 60)
        with ExitStack() as held:
            clients = []
            for _ in range(2 * DESCRIPTORS):
                client = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
                client.sendall(sent)
                clients.append(client)
            wait_until(lambda: daemon.status() is not None, "the flood is accepted")
            assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < DESCRIPTORS // 2
            for client in clients * 4:  # their headers never end
                with suppress(OSError):
                    client.send(b"X-More: y\r\n")
            (source,) = fleet.engine(daemon, spec_of("prefill"))
            (sink,) = fleet.engine(daemon, spec_of("decode"))
            pull_and_check([sink], publish([source], 1), 1)
            with socket.create_connection(("127.0.0.1", port), timeout=10) as honest:
                honest.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
                assert honest.recv(64).startswith(b"HTTP/1.0 200")
        assert "RLIMIT_NOFILE is 300" in daemon.log.read_text()
    finally:
        code = daemon.stop()
    assert code == 0


def test_the_soft_limit_is_raised(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "node", {})
    try:
        wait_until(lambda: daemon.is_ready, "ready", 60)
        limits = Path(f"/proc/{daemon.pid}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
        soft, hard = line.split()[3:5]
        assert int(soft) == int(hard) - RESERVED_FDS  # kept for the daemon's own end
    finally:
        assert daemon.stop() == 0
