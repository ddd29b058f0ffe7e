"""Real daemons and rank processes for one test, and the proof that they leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvxferd.errors import KvxferdError
from kvxferd.layout import EngineSpec
from kvxferd.tooling.control_client import ControlClient
from tests.support.nodes.rank_process import RankProcess, ranks_of

START_S = 60.0
POLL_S = 0.02
FACTS = {"num_kv_heads": 8, "head_dim": 16, "block_tokens": 16, "num_blocks": 64, "layout": "HND"}


def wait_until(holds: Any, what: str, limit_s: float = 10.0) -> None:
    """Return once `holds()` is true; fail with `what` if it never is."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(POLL_S)


class DaemonUnderTest:
    """`kvxferd serve` in a process of its own."""

    def __init__(self, directory: Path, environ: Mapping[str, str], flags: tuple[str, ...] = ()) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "daemon.log"
        self._command = [sys.executable, "-m", "kvxferd.cli", "serve", "--node-run-dir", str(directory)]
        self._command += [
            "--http-bind",
            "",
            "--peer-bind",
            "tcp://127.0.0.1:0",
            "--log-format",
            "json",
            *flags,
        ]
        self._environ = {k: v for k, v in os.environ.items() if not k.startswith("KVXFERD_")} | dict(environ)
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environ)
        self.control = ControlClient(str(self.directory / "control.sock"))

    @property
    def worker_socket(self) -> str:
        return str(self.directory / "worker.sock")

    @property
    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"the daemon ended: {self.log.read_text()[-2000:]}"
        with suppress(KvxferdError):
            return self.control.request("GET", "/readyz")[0] == 200
        return False

    def status(self) -> dict[str, Any]:
        return self.control.get("/v1/status")["node"]

    def metrics(self) -> str:
        """What a scrape of control.sock returns."""
        return self.http("/metrics")

    def http(self, path: str) -> str:
        """A whole response of control.sock, with its head."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(self.control.socket_path)
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: kvxferd\r\n\r\n".encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    @property
    def endpoint(self) -> str:
        return self.status()["endpoint"]

    def movers(self) -> list[int]:
        """The pids of its movers: children of children."""
        return [pid for parent in _children(self.process.pid) for pid in _children(parent)]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                return self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(10)


class Fleet:
    """Starts things; `stop` ends them all and checks that they are gone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._daemons: list[DaemonUnderTest] = []
        self._ranks: list[RankProcess] = []

    def daemon(self, name: str, *flags: str, **environ: str) -> DaemonUnderTest:
        daemon = DaemonUnderTest(self._directory / name, environ, flags)
        self._daemons.append(daemon)
        wait_until(lambda: daemon.is_ready, f"daemon {name} ready", START_S)
        return daemon

    def rank(self) -> RankProcess:
        rank = RankProcess()
        self._ranks.append(rank)
        return rank

    def engine(
        self, daemon: DaemonUnderTest, spec: EngineSpec, how: str = "register", **facts: Any
    ) -> list[RankProcess]:
        """All ranks of an engine, registered at one daemon; `how`: `register` or `register_resident`."""
        ranks = []
        for own in ranks_of(spec):
            rank = self.rank()
            rank.start(how, daemon.worker_socket, own, **(FACTS | facts))
            ranks.append(rank)
        for rank in ranks:
            rank.finish()
        return ranks

    def stop(self) -> None:
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                rank.signal(signal.SIGCONT)
            rank.stop()
        descendants = [pid for d in self._daemons for pid in _descendants(d.process.pid)]
        codes = [d.stop() for d in self._daemons]
        wait_until(lambda: not any(map(_lives, descendants)), f"processes {descendants} gone")
        for daemon, code in zip(self._daemons, codes, strict=True):
            left = sorted(path.name for path in daemon.directory.glob("*.sock"))
            if code == 0:
                assert not left, f"sockets left behind: {left}"


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()
        ]
    return []


def _descendants(pid: int) -> list[int]:
    return [p for child in _children(pid) for p in (child, *_descendants(child))]


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def mappers_of(inode: int) -> list[int]:
    """The processes that map or hold a memfd, by its inode."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            if f" {inode} " in (entry / "maps").read_text():
                found.append(int(entry.name))
                continue
            for fd in (entry / "fd").iterdir():
                status = os.stat(fd)
                if status.st_ino == inode and "memfd:" in os.readlink(fd):
                    found.append(int(entry.name))
                    break
    return found
