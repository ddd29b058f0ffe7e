"""What signals do to a daemon, at any time, and what its service manager is told."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.processes import lives
from tests.support.nodes.requests import publish, spec_of
from tests.support.nodes.waiting import wait_until
from tests.support.other_user import NOBODY, needs_root, open_directory, script


def hang_up(daemon: Daemon, event: str = "configuration reloaded") -> None:
    """Send SIGHUP and return once it has been dealt with."""
    before = len(daemon.logged(event))
    daemon.send_signal(signal.SIGHUP)
    wait_until(lambda: len(daemon.logged(event)) > before, event)


@needs_root
def test_sessions_of_a_user_who_is_no_longer_allowed_are_closed(fleet: Fleet) -> None:
    with open_directory() as directory:
        file = directory / "kvxferd.toml"
        file.write_text(f"[worker]\nmode = 0o666\nallowed_uids = [{NOBODY}]\n")
        flags = ("--config", str(file), "--drain-limit-s", "0.1")
        daemon = Daemon(directory / "node", {}, flags)
        (directory / "node").chmod(0o711)
        try:
            wait_until(lambda: daemon.is_ready, "ready", 60)
            (rank,) = fleet.engine(daemon, spec_of("prefill"))
            body = "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(len(s.recv(4096)) > 0)"
            before = daemon.status()["num_sessions"]
            stranger = subprocess.Popen(
                [*script(body), daemon.worker_socket], stdout=subprocess.PIPE, text=True
            )
            try:
                wait_until(lambda: daemon.status()["num_sessions"] > before, "its session is there")
                file.write_text("[worker]\nmode = 0o666\nallowed_uids = [1]\n")
                done = daemon.verb("reload")
                assert "closed 1 session of users" in done.stdout, done
                assert stranger.communicate(timeout=30)[0] == "True\n"  # it was told why
            finally:
                stranger.kill()
                stranger.wait()
            wait_until(lambda: daemon.status()["num_sessions"] == before, "the others go on")
            publish([rank], 1)
        finally:
            assert daemon.stop() == 0


def test_a_bad_file_changes_nothing_and_what_needs_a_restart_is_named(fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "kvxferd.toml"
    file.write_text("")
    daemon = fleet.daemon("node", "--config", str(file), "--drain-limit-s", "0.1")
    file.write_text('[log]\nlevel = "debug"\n[worker]\nallowed_uids = ["x"]\n')
    done = daemon.verb("reload")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "worker.allowed_uids" in done.stderr
    hang_up(daemon, "reload failed")
    file.write_text('[log]\nlevel = "error"\n[http]\nbind = "127.0.0.1:1"\n[limits]\nmax_ranks = 1\n')
    done = daemon.verb("reload")
    # A flag wins over the file, also when it is read again: the daemon's http.bind is one.
    assert done.stdout == "changed: log.level\nignored until a restart: limits.max_ranks\n"
    wait_until(lambda: daemon.logged("configuration reloaded"), "the reload is a line at any level")
    daemon.send_signal(signal.SIGUSR1)
    wait_until(lambda: daemon.logged("signal ignored"), "so is a signal")
    num_lines = len(daemon.log_text().splitlines())
    fleet.engine(daemon, spec_of("prefill"))
    assert len(daemon.log_text().splitlines()) == num_lines
    file.write_text("")
    hang_up(daemon)


def test_the_service_manager_is_told(fleet: Fleet, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        daemon = fleet.daemon("node", "--drain-limit-s", "30", NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert manager.recv(4096).split(b"\n")[0] == b"READY=1"
        daemon.send_signal(signal.SIGHUP)
        assert manager.recv(4096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        assert manager.recv(4096) == b"READY=1"
        daemon.send_signal(signal.SIGTERM)
        stopping = manager.recv(4096).split(b"\n")
        assert stopping[0] == b"STOPPING=1"
        assert stopping[-1] == b"EXTEND_TIMEOUT_USEC=40000000"
        assert daemon.wait() == 0


def test_sigint_ends_it_as_sigterm_does_and_other_signals_end_nothing(fleet: Fleet) -> None:
    daemon = fleet.daemon("node")
    for number in (signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        for _ in range(3):
            daemon.send_signal(number)
    # Of several that wait the kernel gives the lowest number first: the reload may be logged before the rest.
    wait_until(lambda: daemon.logged("configuration reloaded"), "reloaded")
    wait_until(
        lambda: {line["signal"] for line in daemon.logged("signal ignored")} == {"SIGUSR1", "SIGUSR2"},
        "the others noted",
    )
    assert daemon.is_ready
    fleet.engine(daemon, spec_of("prefill"))
    movers = daemon.movers()
    assert movers
    daemon.send_signal(signal.SIGINT)
    assert daemon.wait() == 0
    assert not list(daemon.directory.glob("*.sock"))
    wait_until(lambda: not any(map(lives, movers)), "its movers gone")


@pytest.mark.parametrize("numbers", [(signal.SIGQUIT,), (signal.SIGTERM, signal.SIGTERM)])
def test_it_stops_at_once_where_it_is_told_to(fleet: Fleet, numbers: tuple[signal.Signals, ...]) -> None:
    daemon = fleet.daemon("node", "--drain-limit-s", "600")
    (source,) = fleet.engine(daemon, spec_of("prefill"))
    publish([source], 1)
    wait_until(lambda: daemon.status()["transfers"], "the publish noticed")
    for number in numbers[:-1]:
        daemon.send_signal(number)
        wait_until(lambda: daemon.status()["draining"], "draining")
    daemon.send_signal(numbers[-1])
    assert daemon.wait() == 0
    assert not [name for name in os.listdir(daemon.directory) if name.endswith(".sock")]


@contextmanager
def movers_of_a_predecessor(directory: Path) -> Iterator[None]:
    """Hold the lock that a former daemon's movers would: a start waits for its end."""
    (directory / "private").mkdir(mode=0o700, parents=True)
    fd = os.open(directory / "private" / "movers.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def is_starting(daemon: Daemon) -> bool:
    """Whether it has its own lock."""
    assert daemon.exit_code is None, daemon.log_text()[-2000:]
    lock = daemon.directory / "private" / "daemon.lock"
    return lock.exists() and lock.read_text().strip() == str(daemon.pid)


def test_a_sighup_before_it_serves_is_remembered(tmp_path: Path) -> None:
    with movers_of_a_predecessor(tmp_path / "node"):
        daemon = Daemon(tmp_path / "node", {})
        wait_until(lambda: is_starting(daemon), "starting", 60)
        daemon.send_signal(signal.SIGHUP)
    try:
        wait_until(lambda: daemon.logged("configuration reloaded"), "reloaded", 60)
        events = [json.loads(line)["event"] for line in daemon.log_text().splitlines()]
        assert events.index("serving") < events.index("configuration reloaded")
    finally:
        assert daemon.stop() == 0


def test_a_sigterm_before_it_serves_ends_it_in_order(tmp_path: Path) -> None:
    with movers_of_a_predecessor(tmp_path / "node"):
        daemon = Daemon(tmp_path / "node", {})
        wait_until(lambda: is_starting(daemon), "starting", 60)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert daemon.logged("stopped")
    assert not [name for name in os.listdir(daemon.directory) if name.endswith(".sock")]
