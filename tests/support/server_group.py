"""A process group that serves HTTP: started, watched, killed, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from tests.support.nodes.processes import lives
from tests.support.nodes.waiting import wait_until
from tests.support.ports import free_port

STOP_S = 30.0
HOST = "127.0.0.1"


class ServerGroup:
    """One server, and every process that it starts."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start_group(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        cores: AbstractContextManager[object] | None = None,
    ) -> None:
        """Start it with the environment of this process and `environ`; its log is appended to."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVXFERD_")}
        self.started_at = time.monotonic()
        with self.log.open("ab") as log, cores or nullcontext():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=inherited | dict(environ),
                cwd=self.log.parent,
                start_new_session=True,
            )

    def new_port(self) -> int:
        """Choose the port that it is to serve on."""
        self.port = free_port()
        return self.port

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether its first process has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def lives(self) -> bool:
        """Whether the server's first process runs and says that its engine is well."""
        assert self._process is not None
        return self._process.poll() is None and self.answers

    @property
    def answers(self) -> bool:
        """Whether /health says 200. Raises AssertionError with its log where the server has ended."""
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} ended: {self.tail()}"
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
            return bool(response.status == 200)
        return False

    def tail(self) -> str:
        """The end of its log without the access log, lines cut."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        lines = [line for line in lines if not line.startswith("INFO:     127.")]
        return "\n".join(line[:400] for line in lines[-40:])

    def said(self, text: str) -> bool:
        """Whether its log holds `text`."""
        return text in self.log.read_text(errors="replace")

    def group(self) -> list[int]:
        """Every live process of its group."""
        pids = map(int, filter(str.isdigit, os.listdir("/proc")))
        return [pid for pid in pids if _group_of(pid) == self.pid and lives(pid)]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry `labels`; 0 where there are none."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            text = response.read().decode()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found if all(w in line for w in wanted))

    def kill(self, how: int = signal.SIGKILL) -> None:
        """End every process of the server at once, and wait until they are gone."""
        for pid in self.group():
            with suppress(ProcessLookupError):
                os.kill(pid, how)
        self._wait_for_the_end()

    def stop(self) -> None:
        """Ask it to end, and make it so where it does not."""
        assert self._process is not None
        for pid in self.group():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
            wait_until(lambda: not self.group(), f"{self.name}'s processes gone", 5.0)
        except (subprocess.TimeoutExpired, AssertionError):
            self.kill()
        self._wait_for_the_end()

    def _wait_for_the_end(self) -> None:
        assert self._process is not None
        self._process.wait(STOP_S)
        wait_until(lambda: not self.group(), lambda: f"{self.name}'s processes gone: {self.group()}", STOP_S)


def _group_of(pid: int) -> int:
    with suppress(OSError):
        return os.getpgid(pid)
    return -1
