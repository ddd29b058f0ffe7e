"""Two daemons on one machine in different PID namespaces: what is read goes over TCP, and they say so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvxferd.tooling.daemon_process import DaemonProcess
from tests.support import lone_rank

pytestmark = [pytest.mark.netns, pytest.mark.slow]
APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def pulled(prefix: tuple[str, ...], tmp_path: Path) -> dict:
    """What a daemon that was started so, with a rank of its own, has to say after a pull from one here."""
    near, far = tmp_path / "near", tmp_path / "far"
    near.mkdir()
    far.mkdir()
    daemon = DaemonProcess(near)
    command = [*prefix, sys.executable, "-P", lone_rank.__file__, str(far)]
    pipe = subprocess.PIPE
    other = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    try:
        daemon.wait_ready()
        rank = lone_rank.lone_rank(daemon.worker_socket, "prefill")
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(lone_rank.publish(rank) + "\n")
        other.stdin.flush()
        said = json.loads(other.stdout.readline())
        rank.close()
    finally:
        other.communicate()  # the end of its input is its end
        daemon.stop()
    assert said["checked"]["checked_items"] > 0
    assert said["checked"]["wrong_items"] == 0
    return said


@pytest.fixture
def needs_namespaces() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("PID namespaces need root and unshare")
    if subprocess.run([*APART, "true"], check=False).returncode:
        pytest.skip("no PID namespaces here")


@pytest.fixture(autouse=True)
def as_a_unit_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # A shell may set it, and then what UCX logs has no buffer to wait in.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


def slow_lanes(said: dict) -> list[str]:
    ranks = [rank for engine in said["node"]["engines"] for rank in engine["ranks"]]
    return [lanes["lanes"] for rank in ranks for lanes in rank["lanes"] if lanes["slow"]]


@pytest.mark.usefixtures("needs_namespaces")
def test_tcp_between_pid_namespaces_of_one_machine_is_a_warning(tmp_path: Path):
    said = pulled(APART, tmp_path)
    assert slow_lanes(said) == ["tcp"]
    (warning,) = [found for found in map(str, said["warnings"]) if "goes over TCP" in found]
    assert "hostPID" in warning
    assert "decode pp0.tp0" in warning


def test_two_daemons_in_one_pid_namespace_are_fast_and_quiet(tmp_path: Path):
    said = pulled((), tmp_path)
    assert slow_lanes(said) == []
    assert not [found for found in map(str, said["warnings"]) if "TCP" in found]
    ranks = [rank for engine in said["node"]["engines"] for rank in engine["ranks"]]
    assert [rank["placement"]["lanes"] for rank in ranks] == ["cma"]
    assert {"node": "cma"}.items() <= {way["reach"]: way["lanes"] for way in ranks[0]["lanes"]}.items()
