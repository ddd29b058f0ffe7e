"""`kvxferd serve` in a process of its own, and the proof that a test left nothing in it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kvxferd.errors import KvxferdError
from kvxferd.tooling.daemon_process import DaemonProcess
from tests.support.nodes.processes import children, descendants, holds, lives, maps
from tests.support.nodes.waiting import comes_true, wait_until
from tests.support.python_process import run_kvxferd
from tests.support.repository import ROOT

FDS_A_PEER = 4  # of a ZMQ socket and its monitor; its TCP connection is not counted
# What stays after first use: a ZMQ context and a thread for the first engine, 8, the file of the first
# sample, and the connection of this question itself; two of them may be open before already, or not yet.
FDS_OF_FIRST_USE = 12
STOP_S = 60.0
LEFT_S = 30.0  # for the processes of a daemon that has ended


class Daemon(DaemonProcess):
    """A daemon in a directory, with the settings of `environ` and of `flags`, and what it tells of a test."""

    def __init__(
        self,
        directory: Path,
        environ: Mapping[str, str],
        flags: Sequence[str] = (),
        *,
        prefix: Sequence[str] = (),
        module: str = "kvxferd.cli",
    ) -> None:
        self.parents: set[int] = set()  # every movers' parent that was seen
        self._family: set[int] = set()  # the processes below it, as it was to end
        self._log_begin = 0  # of this test's part of the log, in bytes
        self._counted: dict[str, float] = {}  # by series, when this test began
        self._began_at = 0.0
        environ = environ | ({} if module == "kvxferd.cli" else {"PYTHONPATH": str(ROOT)})
        super().__init__(directory, flags, environ, prefix=prefix, module=module)

    @property
    def endpoint(self) -> str:
        return self.status()["endpoint"]

    def status(self) -> dict[str, Any]:
        return self.control.get("/v1/status")["node"]

    def status_if_any(self) -> dict[str, Any] | None:
        """Return its status, None where it does not respond."""
        with suppress(KvxferdError):
            return self.status()
        return None

    def metrics(self) -> str:
        """What a scrape of control.sock returns."""
        return self.http("/metrics")

    def http(self, path: str) -> str:
        """A whole response of control.sock, with its head."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(self.control.socket_path)
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def begin_test(self) -> None:
        """Have logs, counters and history begin here."""
        self._log_begin = self.log.stat().st_size
        self._counted = self._series()
        self._began_at = time.time()

    def counted(self, series: str) -> float:
        """By how much a series has grown in this test; with its labels, as a scrape shows them."""
        return self._series()[series] - self._counted.get(series, 0.0)

    def _series(self) -> dict[str, float]:
        lines = self.metrics().partition("\r\n\r\n")[2].splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {series: float(value) for series, _, value in pairs}

    def history(self, at_least: int = 1, **query: str) -> list[dict[str, Any]]:
        """The records of this test that the query finds, once so many are there.

        A worker hears from its mover that a pull is delivered, maybe before the daemon has.
        """

        def found() -> list[dict[str, Any]]:
            records = self.control.get(f"/v1/history?{urlencode(query)}")["records"]
            return [record for record in records if record["ended_at"] >= self._began_at]

        wait_until(lambda: len(found()) >= at_least, lambda: f"{at_least} records of {query} in {found()}")
        return found()

    def log_text(self) -> str:
        """What it has logged in this test."""
        return self.log.read_bytes()[self._log_begin :].decode()

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The lines of an event in this test."""
        return [line for line in map(json.loads, self.log_text().splitlines()) if line["event"] == event]

    def parent(self) -> int | None:
        """Return the pid of its movers' parent; None while there is none."""
        found = children(self.pid)
        self.parents |= set(found)
        return found[0] if found else None

    def movers(self) -> list[int]:
        """The pids of its movers: children of children."""
        return [pid for parent in children(self.pid) for pid in children(parent)]

    def movers_of(self, inode: int) -> list[int]:
        """The pids of those movers that map that memfd, or have a descriptor of it."""
        return [pid for pid in self.movers() if maps(pid, inode) or holds(pid, inode)]

    def kill(self) -> int:
        """Kill it, whatever it is doing; return its exit code."""
        self._look_at_family()
        return super().kill()

    def begin_stop(self) -> None:
        """Have it drain and end."""
        self._look_at_family()
        super().begin_stop()

    def _look_at_family(self) -> None:
        if self.exit_code is None:
            self.parent()
            self._family = {*self.parents, *descendants(self.pid)}

    def end(self, stop_s: float = STOP_S, left_s: float = LEFT_S) -> list[str]:
        """Stop it as an operator does. Return what is wrong about its end, and what has outlived it."""
        before, code = self.exit_code, self.stop(stop_s)
        problems = []
        if before is not None:
            problems.append(f"{self.name}: it had ended with {before}")
        elif code == -signal.SIGKILL:
            problems.append(f"{self.name}: SIGTERM did not end it within {stop_s:g} s")
        elif code:
            problems.append(f"{self.name}: it ended with {code}")
        return problems + self.leftovers(left_s)

    def leftovers(self, limit_s: float = LEFT_S) -> list[str]:
        """Return what has outlived it. Waits a moment for processes to go.

        Sockets and shared memory count after an end in order; a killed daemon leaves them to the next one.
        """
        comes_true(lambda: not any(map(lives, self._family)), limit_s)
        left = [f"process {pid}" for pid in self._family if lives(pid)]
        if self.exit_code == 0:
            left += map(str, [*self.directory.glob("*.sock"), *self.abandoned_shm()])
        return [f"{self.name}: {what} left" for what in left]

    def abandoned_shm(self) -> list[Path]:
        """Return the shared memory directories of movers' parents that are gone and were its own."""
        gone = [Path(f"/dev/shm/kvxferd-movers-{pid}") for pid in self.parents if not lives(pid)]
        return [path for path in gone if path.exists()]

    def verb(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `kvxferd ARGUMENTS` at this daemon."""
        return run_kvxferd(*arguments, "--socket", self.control.socket_path, **environ)

    def wait(self, limit_s: float = STOP_S) -> int:
        """Return its exit code once it has ended."""
        return self._process.wait(limit_s)


@dataclass(frozen=True)
class Footprint:
    """What a daemon that serves nobody has."""

    num_sessions: int
    num_fds: int  # without TCP connections: peers keep theirs
    num_movers: int  # all of them warm
    num_peers: int  # stay when they are not used

    @classmethod
    def of(cls, daemon: Daemon) -> Footprint:
        status = daemon.status()
        num_fds = _num_fds(daemon.pid)
        return cls(status["num_sessions"], num_fds, len(daemon.movers()), len(status["peers"]))


def at_rest(daemon: Daemon, before: Footprint) -> list[str]:
    """Return what a daemon that nobody uses still has, and did not have `before`, at its start.

    Empty: nothing. What grows with each test is found, however little it is, after some of them.
    """
    status, now = daemon.status(), Footprint.of(daemon)
    held = ("engines", "transfers", "pulls", "num_grants_held", "num_quarantined", "quarantined_bytes")
    left = [f"{what}: {status[what]}" for what in held if status[what]]
    if now.num_sessions != before.num_sessions:
        left.append(f"{now.num_sessions} sessions, before {before.num_sessions}")
    if now.num_movers != before.num_movers:
        left.append(f"{now.num_movers} movers, before {before.num_movers}")
    if now.num_fds > before.num_fds + FDS_OF_FIRST_USE + FDS_A_PEER * now.num_peers:
        left.append(f"{now.num_fds} descriptors with {now.num_peers} peers, before {before.num_fds}")
    return left + [f"{path} is left" for path in _shared_memory(daemon)]


def _num_fds(pid: int) -> int:
    connections = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    tcp = {f"socket:[{line.split()[9]}]" for line in connections}
    num = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            num += os.readlink(f"/proc/{pid}/fd/{fd}") not in tcp
    return num


def _shared_memory(daemon: Daemon) -> list[Path]:
    """The files of its movers, which UCX unlinks as soon as it has opened them."""
    directories = [Path(f"/dev/shm/kvxferd-movers-{pid}") for pid in children(daemon.pid)]
    return [path for directory in directories for path in directory.glob("*")]
