"""A daemon that has no descriptor left for a mover's pidfd gives that mover nothing."""

from __future__ import annotations

import json
import os
import resource
import signal

import pytest

from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until

NONE_LEFT = 3  # every new descriptor would have a higher number


def test_a_mover_that_no_worker_can_watch_gets_no_memory(fleet: Fleet):
    daemon = fleet.daemon("node")
    (source,) = fleet.engine(daemon, spec_of("prefill"))
    (sink,) = fleet.engine(daemon, spec_of("decode"))
    pull_and_check([sink], publish([source], 1), 1)
    inode = sink.memory_inode()
    (bound,) = daemon.movers_of(inode)
    limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (NONE_LEFT, limits[1]))
    os.kill(bound, signal.SIGKILL)
    wait_until(lambda: "mover pidfd not sent" in daemon.log.read_text(), "the offer has failed")
    assert not daemon.movers_of(inode)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: daemon.movers_of(inode), "offered again")
    pull_and_check([sink], publish([source], 2), 2)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_daemon_without_descriptors_ends_in_order(fleet: Fleet, signal_number: int):
    """It has some in reserve: to write whose engine ids are, and to close its event loop."""
    daemon = fleet.daemon("node")
    fleet.engine(daemon, spec_of("prefill"))
    _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (NONE_LEFT, hard))
    daemon.send_signal(signal_number)
    assert daemon.wait() == 0
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]  # no traceback among them
    assert lines[-1]["event"] == "stopped"
    assert not [line for line in lines if line["level"] == "error"]
    assert "prefill" in (daemon.directory / "private" / "owners.json").read_text()
