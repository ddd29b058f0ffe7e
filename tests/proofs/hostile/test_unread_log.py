"""A daemon whose standard error is a pipe that nobody reads, and one without standard descriptors."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.nodes.daemon import Daemon, UnreadLog
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_serves_and_ends_although_nobody_reads_its_log(fleet: Fleet, tmp_path: Path, number: int) -> None:
    daemon = UnreadLog(tmp_path / "node", {})
    try:
        wait_until(lambda: daemon.is_ready, "ready", 60)
        (source,) = fleet.engine(daemon, spec_of("prefill"))
        (sink,) = fleet.engine(daemon, spec_of("decode"))
        for request in range(24):  # two lines and more each, five times what the pipe holds
            pull_and_check([sink], publish([source], request), request)
            source.await_event("Released")
        movers = daemon.movers()
        daemon.send_signal(number)
        assert daemon.wait() == (0 if number == signal.SIGTERM else -number)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in movers), "its movers gone")
    finally:
        daemon.kill()
        os.close(daemon.reading)


def test_closed_standard_descriptors_go_to_no_socket(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "node", {})
    daemon.stop()
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *daemon._command]
    daemon._process = subprocess.Popen(command, env=daemon._environ)
    try:
        wait_until(lambda: daemon.is_ready, "ready", 60)
        open_as = {n: os.readlink(f"/proc/{daemon.pid}/fd/{n}") for n in range(3)}
        assert open_as == dict.fromkeys(range(3), os.devnull)
    finally:
        assert daemon.stop() == 0
