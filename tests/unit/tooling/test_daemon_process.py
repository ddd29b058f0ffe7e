"""A tool's daemon: ready or an error in time, ended with the tool, and started again at will."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kvxferd.errors import KvxferdError
from kvxferd.fd_wait import wait_readable
from kvxferd.tooling.daemon_process import DaemonProcess
from tests.support.tool_process import tool_directory


@pytest.mark.process
def test_a_daemon_starts_ends_and_starts_again() -> None:
    with tool_directory() as place:
        daemon = DaemonProcess(place / "node", ["--mover-pool-size", "1"])
        try:
            daemon.wait_ready()
            assert daemon.is_ready
            assert Path(daemon.worker_socket).exists()
            assert daemon.stop() == 0
            assert daemon.stop() == 0
            assert not daemon.is_ready
            daemon.start()
            daemon.wait_ready()
        finally:
            assert daemon.stop() == 0
        assert not Path(f"/proc/{daemon.pid}").exists()
        assert "serving" in daemon.log.read_text()


@pytest.mark.parametrize(
    ("flags", "environ"),
    [(["--transfer-lease-s", "never"], {}), ([], {"KVXFERD_TRANSFER_LEASE_S": "never"})],
)
def test_a_daemon_that_cannot_start_is_an_error_and_its_log_tells_why(
    tmp_path: Path, flags: list[str], environ: dict[str, str]
) -> None:
    daemon = DaemonProcess(tmp_path / "node", flags, environ)
    with pytest.raises(KvxferdError, match="cannot start the node daemon: it ended with 2"):
        daemon.wait_ready()
    assert "transfer.lease_s" in daemon.log_tail()


def test_one_that_never_responds_is_an_error_in_time_and_is_killed(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\ntime.sleep(1000)\n"
    )
    environ = {"PYTHONPATH": str(tmp_path)}
    daemon = DaemonProcess(tmp_path / "node", environ=environ, module="stubborn")
    with pytest.raises(KvxferdError, match="is not ready: it does not respond"):
        daemon.wait_ready(0.1)
    while daemon.log_tail() != "deaf":
        assert daemon.exit_code is None
    assert daemon.stop(0.1) == -signal.SIGKILL


KILLED = """
import os, signal, sys
from pathlib import Path
from kvxferd.tooling.daemon_process import DaemonProcess

daemon = DaemonProcess(Path(sys.argv[1]) / "node", ["--mover-pool-size", "1"])
daemon.wait_ready()
print(daemon.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_daemon_ends_with_a_tool_that_is_killed() -> None:
    with tool_directory() as place:
        command = [sys.executable, "-c", KILLED, str(place)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        with suppress(ProcessLookupError), open(os.pidfd_open(int(ended.stdout))) as daemon:
            assert wait_readable([daemon.fileno()], 60), "it lives on"
