"""Daemons with few descriptors, with none left, and without standard ones."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from contextlib import ExitStack, suppress

import pytest

from kvxferd.control.fd_budget import RESERVED_FDS
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until
from tests.support.ports import free_port

DESCRIPTORS = 300
NONE_LEFT = 3  # every new descriptor would have a higher number
HEAD = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("sent", [HEAD, HEAD + b"\r\n"], ids=["unfinished", "idle after an answer"])
def test_requests_leave_workers_their_descriptors(fleet: Fleet, sent: bytes) -> None:
    port = free_port()
    limited = ("prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}")
    daemon = fleet.daemon("node", "--http-bind", f"127.0.0.1:{port}", prefix=limited)
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
        source, sink = fleet.pair(daemon)
        pull_and_check([sink], publish([source], 1), 1)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as honest:
            honest.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert honest.recv(64).startswith(b"HTTP/1.0 200")
    assert "RLIMIT_NOFILE is 300" in daemon.log_text()


def test_the_soft_limit_is_raised(fleet: Fleet) -> None:
    soft, hard = resource.prlimit(fleet.daemon("node").pid, resource.RLIMIT_NOFILE)
    assert soft == hard - RESERVED_FDS  # kept for the daemon's own end


def test_a_mover_that_no_worker_can_watch_gets_no_memory(fleet: Fleet) -> None:
    daemon = fleet.daemon("node")
    source, sink = fleet.pair(daemon)
    pull_and_check([sink], publish([source], 1), 1)
    inode = sink.memory_inode()
    (bound,) = daemon.movers_of(inode)
    limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (NONE_LEFT, limits[1]))
    os.kill(bound, signal.SIGKILL)
    wait_until(lambda: "mover pidfd not sent" in daemon.log_text(), "the offer has failed")
    assert not daemon.movers_of(inode)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: daemon.movers_of(inode), "offered again")
    pull_and_check([sink], publish([source], 2), 2)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_daemon_without_descriptors_ends_in_order(fleet: Fleet, signal_number: int) -> None:
    """It has some in reserve: to write whose engine ids are, and to close its event loop."""
    daemon = fleet.daemon("node")
    fleet.engine(daemon, spec_of("prefill"))
    _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (NONE_LEFT, hard))
    daemon.send_signal(signal_number)
    assert daemon.wait() == 0
    lines = [json.loads(line) for line in daemon.log_text().splitlines()]  # no traceback among them
    assert lines[-1]["event"] == "stopped"
    assert not [line for line in lines if line["level"] == "error"]
    assert "prefill" in (daemon.directory / "private" / "owners.json").read_text()


def test_closed_standard_descriptors_go_to_no_socket(fleet: Fleet) -> None:
    daemon = fleet.daemon("node", prefix=("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"))
    open_as = {n: os.readlink(f"/proc/{daemon.pid}/fd/{n}") for n in range(3)}
    assert open_as == dict.fromkeys(range(3), os.devnull)
