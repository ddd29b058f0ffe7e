"""One daemon of a stage: started as its own user, watched from outside."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvxferd.errors import KvxferdError
from kvxferd.tooling.control_client import ControlClient
from tests.proofs.hostile.registry import Setup
from tests.proofs.hostile.users import User
from tests.proofs.hostile.watched_daemon import Meter
from tests.support.cluster.processes import children, lives, num_fds
from tests.support.ports import free_port

REPLY_S = 5.0
FLAGS = {
    "--mover-pool-size": "1",
    "--drain-limit-s": "2",
    "--log-format": "json",
    "--peer-request-timeout-s": "1",
    "--peer-silent-after-s": "6",
}


class Node:
    """`kvxferd serve` under `watched_daemon`."""

    def __init__(
        self, directory: Path, user: User, setup: Setup, environ: dict[str, str], flags: list[str]
    ) -> None:
        self.directory = directory
        directory.mkdir()
        os.chown(directory, user.uid, user.gid)
        self.run_directory = directory / "run"
        self.log = directory / "daemon.log"
        self.http = ("127.0.0.1", free_port())
        self.peer_port = free_port()
        self._user = user
        self._setup = setup
        self._environ = environ | {"HOME": str(directory), "TMPDIR": str(directory)}
        meter = directory / "meter"
        self.meter = Meter.make(meter, user.uid)
        self._command = [sys.executable, "-m", "tests.proofs.hostile.watched_daemon"]
        self._command += [
            str(meter),
            "serve",
            "--node-run-dir",
            str(self.run_directory),
            *flags,
            *setup.flags,
        ]
        self._command += ["--peer-bind", f"tcp://127.0.0.1:{self.peer_port}"]
        self._command += ["--http-bind", f"127.0.0.1:{self.http[1]}"]
        self._command += [word for flag in FLAGS.items() for word in flag if flag[0] not in setup.flags]
        self._parents: set[int] = set()
        self.start()

    # --- life

    def start(self) -> None:
        as_user: dict[str, Any] = {}
        if self._user.uid:
            as_user = {"user": self._user.uid, "group": self._user.gid, "extra_groups": []}
        with self.log.open("ab") as log:
            command = self._command
            if self._setup.mute_resolver:
                as_user, command = {}, self._in_own_mounts()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                preexec_fn=self._limit if self._setup.num_fds else None,  # noqa: PLW1509 - one thread
                **as_user,
            )
        self.control = ControlClient(str(self.run_directory / "control.sock"), timeout_s=REPLY_S)

    def _in_own_mounts(self) -> list[str]:
        """With a resolver configuration of its own that names a server which never answers."""
        mine = self.directory / "resolv.conf"
        mine.write_text("nameserver 127.0.0.211\noptions timeout:30 attempts:3\n")
        script = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
        dropped = [
            "setpriv",
            "--reuid",
            str(self._user.uid),
            "--regid",
            str(self._user.gid),
            "--clear-groups",
        ]
        return ["unshare", "-m", "sh", "-c", script, str(mine), *dropped, *self._command]

    def _limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._setup.num_fds, self._setup.num_fds))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_ready(self) -> bool:
        with suppress(KvxferdError):
            return self.control.request("GET", "/readyz")[0] == 200
        return False

    def family(self) -> list[int]:
        found = children(self.pid)
        self._parents |= set(found)
        return [*found, *(mover for parent in found for mover in children(parent))]

    def kill(self) -> None:
        self.family()
        self.process.kill()
        self.process.wait()

    def stop(self) -> list[str]:
        """End it as an operator would; say what was wrong about that."""
        family = self.family()
        problems = []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                code = self.process.wait(20)
                problems += [f"the daemon ended with {code}"] if code else []
            except subprocess.TimeoutExpired:
                problems.append("SIGTERM did not end the daemon within 20 s")
                self.process.kill()
                self.process.wait()
        else:
            problems.append(f"the daemon had ended with {self.process.returncode}")
        until = time.monotonic() + 10.0
        while any(map(lives, family)) and time.monotonic() < until:
            time.sleep(0.02)
        problems += [f"process {pid} outlived its daemon" for pid in family if lives(pid)]
        left = [Path(f"/dev/shm/kvxferd-movers-{pid}") for pid in self._parents]
        return problems + [f"{path} left" for path in left if path.exists()]

    # --- looks

    @property
    def worker_socket(self) -> str:
        """The path of its worker socket."""
        return str(self.run_directory / "worker" / "worker.sock")

    def status(self) -> dict[str, Any] | None:
        with suppress(KvxferdError):
            return self.control.get("/v1/status")["node"]
        return None

    def health(self) -> str:
        """What is wrong with it, seen from outside."""
        if self.process.poll() is not None:
            return f"the daemon has ended with {self.process.returncode}"
        connection = http.client.HTTPConnection(*self.http, timeout=REPLY_S)
        try:
            for path in ("/healthz", "/v1/status"):
                connection.request("GET", path)
                response = connection.getresponse()
                json.loads(response.read())
                if response.status != 200:
                    return f"GET {path} answers {response.status}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"HTTP does not answer: {error!r}"
        finally:
            connection.close()
        return "" if self.status() is not None else "control.sock does not answer"

    def num_fds(self) -> int:
        return num_fds(self.pid)

    def rss_mb(self, name: str = "VmRSS") -> float:
        with suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith(name + ":"):
                    return int(line.split()[1]) / 1024
        return 0.0

    def peak_mb(self) -> float:
        return self.rss_mb("VmHWM")

    def reset(self) -> None:
        """What is measured from here on is measured anew."""
        with suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        self.meter.reset()


def wait_for(holds: Callable[[], bool], limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
