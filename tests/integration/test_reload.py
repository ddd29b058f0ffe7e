"""SIGHUP and `kvxferd reload`: allow-lists and the log's level, with real daemons. And the other signals."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvxferd.control.curve_keys import make_key
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until
from tests.support.other_user import NOBODY, needs_root, open_directory, script


def reload(daemon: Daemon) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvxferd.cli", "reload", "--socket", daemon.control.socket_path]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def logged(daemon: Daemon, event: str) -> list[dict]:
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def hang_up(daemon: Daemon, event: str = "configuration reloaded") -> None:
    """Send SIGHUP and return once it has been dealt with."""
    before = len(logged(daemon, event))
    daemon.signal(signal.SIGHUP)
    wait_until(lambda: len(logged(daemon, event)) > before, event)


def test_a_peer_whose_key_is_taken_back_is_cut_off_and_let_in_again(fleet: Fleet, tmp_path: Path) -> None:
    own, other, third = (make_key(tmp_path / f"{name}.key").public for name in "pdx")
    file = tmp_path / "prefill.toml"

    def allow(key: str) -> None:
        path = tmp_path / "p.key"
        text = f'[peer]\ncurve_secret_key_file = "{path}"\ncurve_allowed_keys = ["{key}"]\n'
        file.write_text(text)

    allow(other)
    prefill = fleet.daemon("prefill", "--config", str(file))
    flags = ("--peer-curve-secret-key-file", str(tmp_path / "d.key"), "--peer-curve-allowed-keys", own)
    decode = fleet.daemon("decode", *flags)
    (source,) = fleet.engine(prefill, spec_of("prefill"))
    (sink,) = fleet.engine(decode, spec_of("decode"))
    pull_and_check([sink], publish([source], 1), 1)
    source.await_event("Released")

    allow(third)
    hang_up(prefill)
    assert logged(prefill, "configuration reloaded")[-1]["closed_connections"] == 1
    name, fields = sink.end_of(sink.pull(publish([source], 2), list(range(32)), 500, 2.0))
    assert (name, fields["code"] in ("peer-unreachable", "deadline")) == ("Failed", True), fields
    wait_until(lambda: logged(prefill, "peer turned away"), "its connections are refused")

    allow(other)
    done = reload(prefill)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "changed: peer.curve_allowed_keys"), done
    pull_and_check([sink], publish([source], 3), 3)


def test_a_key_in_the_watched_file_is_admitted_and_removed_without_a_reload(
    fleet: Fleet, tmp_path: Path
) -> None:
    own, other = (make_key(tmp_path / f"{name}.key").public for name in "pd")
    listed = tmp_path / "allowed-keys"
    listed.write_text("# no other node yet\n")
    key_file = ("--peer-curve-secret-key-file", str(tmp_path / "p.key"))
    prefill = fleet.daemon("prefill", *key_file, "--peer-curve-allowed-keys-file", str(listed))
    flags = ("--peer-curve-secret-key-file", str(tmp_path / "d.key"), "--peer-curve-allowed-keys", own)
    decode = fleet.daemon("decode", *flags)
    (source,) = fleet.engine(prefill, spec_of("prefill"))
    (sink,) = fleet.engine(decode, spec_of("decode"))

    listed.write_text(f"{other}  # decode\n")
    wait_until(lambda: logged(prefill, "allowed keys read"), "its key is admitted")
    assert logged(prefill, "allowed keys read")[-1]["added"] == [other]
    pull_and_check([sink], publish([source], 2), 2)

    listed.write_text("")
    wait_until(lambda: logged(prefill, "allowed keys not read"), "an empty file is not taken")
    wait_until(lambda: "it is empty" in str(prefill.control.get("/v1/status")["warnings"]), "it is a warning")
    pull_and_check([sink], publish([source], 3), 3)

    listed.write_text("# decode is gone\n")
    wait_until(lambda: len(logged(prefill, "allowed keys read")) > 1, "its key is removed")
    removed = logged(prefill, "allowed keys read")[-1]
    assert (removed["removed"], removed["closed_connections"]) == ([other], 1)
    name, fields = sink.end_of(sink.pull(publish([source], 4), list(range(32)), 500, 2.0))
    assert (name, fields["code"] in ("peer-unreachable", "deadline")) == ("Failed", True), fields
    wait_until(lambda: logged(prefill, "peer turned away"), "its connections are refused")


def test_a_daemon_that_is_admitted_no_more_is_not_asked_either(fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "decode.toml"
    file.write_text('[peer]\nallowed_addresses = ["127.0.0.0/8"]\n')
    prefill, decode = fleet.daemon("prefill"), fleet.daemon("decode", "--config", str(file))
    (source,) = fleet.engine(prefill, spec_of("prefill"))
    (sink,) = fleet.engine(decode, spec_of("decode"))
    pull_and_check([sink], publish([source], 1), 1)
    file.write_text('[peer]\nallowed_addresses = ["127.0.0.2/32"]\n')
    done = reload(decode)
    assert done.returncode == 0
    # Its own address is let in always, and here it is the other's too: the peer stays.
    assert "dropped" not in done.stdout
    assert decode.status()["peers"]


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
                done = reload(daemon)
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
    done = reload(daemon)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "worker.allowed_uids" in done.stderr
    hang_up(daemon, "reload failed")
    file.write_text('[log]\nlevel = "error"\n[http]\nbind = "127.0.0.1:1"\n[limits]\nmax_ranks = 1\n')
    done = reload(daemon)
    # A flag wins over the file, also when it is read again: the daemon's http.bind is one.
    assert done.stdout == "changed: log.level\nignored until a restart: limits.max_ranks\n"
    wait_until(lambda: logged(daemon, "configuration reloaded"), "the reload is a line at any level")
    daemon.signal(signal.SIGUSR1)
    wait_until(lambda: logged(daemon, "signal ignored"), "so is a signal")
    num_lines = len(daemon.log.read_text().splitlines())
    fleet.engine(daemon, spec_of("prefill"))
    assert len(daemon.log.read_text().splitlines()) == num_lines
    file.write_text("")
    hang_up(daemon)


def test_the_service_manager_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        daemon = Daemon(tmp_path / "node", {"NOTIFY_SOCKET": str(tmp_path / "notify")})
        try:
            assert manager.recv(4096).startswith(b"READY=1")
            daemon.signal(signal.SIGHUP)
            assert manager.recv(4096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
            assert manager.recv(4096) == b"READY=1"
        finally:
            assert daemon.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE])
def test_other_signals_end_nothing(fleet: Fleet, number: signal.Signals) -> None:
    daemon = fleet.daemon("node")
    for _ in range(3):
        daemon.signal(number)
    if number is not signal.SIGPIPE:
        event = "configuration reloaded" if number is signal.SIGHUP else "signal ignored"
        wait_until(lambda: logged(daemon, event), event)
    assert daemon.is_ready


@pytest.mark.parametrize("numbers", [(signal.SIGQUIT,), (signal.SIGTERM, signal.SIGTERM)])
def test_it_stops_at_once_where_it_is_told_to(fleet: Fleet, numbers: tuple[signal.Signals, ...]) -> None:
    daemon = fleet.daemon("node", "--drain-limit-s", "600")
    (source,) = fleet.engine(daemon, spec_of("prefill"))
    publish([source], 1)
    wait_until(lambda: daemon.status()["transfers"], "the publish noticed")
    for number in numbers[:-1]:
        daemon.signal(number)
        wait_until(lambda: daemon.status()["draining"], "draining")
    daemon.signal(numbers[-1])
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
    assert daemon.exit_code is None, daemon.log.read_text()[-2000:]
    lock = daemon.directory / "private" / "daemon.lock"
    return lock.exists() and lock.read_text().strip() == str(daemon.pid)


def test_a_sighup_before_it_serves_is_remembered(tmp_path: Path) -> None:
    with movers_of_a_predecessor(tmp_path / "node"):
        daemon = Daemon(tmp_path / "node", {})
        wait_until(lambda: is_starting(daemon), "starting", 60)
        daemon.signal(signal.SIGHUP)
    try:
        wait_until(lambda: logged(daemon, "configuration reloaded"), "reloaded", 60)
        events = [json.loads(line)["event"] for line in daemon.log.read_text().splitlines()]
        assert events.index("serving") < events.index("configuration reloaded")
    finally:
        assert daemon.stop() == 0


def test_a_sigterm_before_it_serves_ends_it_in_order(tmp_path: Path) -> None:
    with movers_of_a_predecessor(tmp_path / "node"):
        daemon = Daemon(tmp_path / "node", {})
        wait_until(lambda: is_starting(daemon), "starting", 60)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert logged(daemon, "stopped")
    assert not [name for name in os.listdir(daemon.directory) if name.endswith(".sock")]
