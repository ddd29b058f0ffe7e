"""Two daemons and honest engines that read from each other while somebody attacks."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvxferd.control.curve_keys import CurveKeyPair, make_key
from kvxferd.tooling.child_process import ChildError
from kvxferd.tooling.control_client import ControlClient
from tests.proofs.hostile.honest_ranks import become_honest
from tests.proofs.hostile.users import DAEMON, GROUP, ROOT, User
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import FACTS
from tests.support.nodes.processes import num_fds, rss_kib
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import spec_of
from tests.support.nodes.waiting import wait_until
from tests.support.ports import free_port
from tests.support.pull_traffic import PullTraffic
from tests.support.repository import ROOT as REPOSITORY

START_S, STOP_S, REPLY_S = 90.0, 20.0, 5.0
WATCHED = "tests.proofs.hostile.watched_daemon"
FLAGS = (
    *("--mover-pool-size", "1", "--drain-limit-s", "2"),
    *("--peer-request-timeout-s", "1", "--peer-silent-after-s", "6", "--worker-mode", "0o660"),
)


@cache
def _can_start() -> bool:
    """Whether the daemon's user can start this program where it lies; else the daemons are root's."""
    user: dict[str, Any] = {"user": DAEMON.uid, "group": DAEMON.gid, "extra_groups": []}
    command = [sys.executable, "-c", f"import {WATCHED}, kvxferd.mover.process.forkserver"]
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with suppress(PermissionError):
        return not subprocess.run(
            command, env=environ, stderr=subprocess.DEVNULL, check=False, **user
        ).returncode
    return False


class Node(Daemon):
    """`kvxferd serve` as its own user, under `watched_daemon`, and looked at from outside."""

    def __init__(self, directory: Path, user: User, flags: list[str], public_key: str) -> None:
        home = directory / "home"
        home.mkdir(parents=True)
        for path in (directory, home):
            os.chown(path, user.uid, user.gid)
        # The processor time of the loop's longest turn in ms, which the daemon writes here.
        self.longest_turn_ms = np.memmap(directory / "meter", np.float64, "w+", shape=(1,))
        os.chown(directory / "meter", user.uid, -1)
        self.http_address = ("127.0.0.1", free_port())
        address = f"tcp://127.0.0.1:{free_port()}"
        self._endpoint = f"{address}#{public_key}" if public_key else address
        environ = {"HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
        flags = [*FLAGS, *flags, "--peer-bind", address, "--http-bind", f"127.0.0.1:{self.http_address[1]}"]
        prefix = ["setpriv", "--reuid", str(user.uid), "--regid", str(user.gid), "--clear-groups"]
        super().__init__(directory, environ, flags, prefix=prefix if user.uid else (), module=WATCHED)
        self.control = ControlClient(self.control.socket_path, timeout_s=REPLY_S)

    @property
    def endpoint(self) -> str:
        """As an attacker knows it, who may not ask."""
        return self._endpoint

    def health(self) -> str:
        """What is wrong with it, seen from outside."""
        if self.exit_code is not None:
            return f"the daemon has ended with {self.exit_code}"
        connection = http.client.HTTPConnection(*self.http_address, timeout=REPLY_S)
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
        return "" if self.status_if_any() is not None else "control.sock does not answer"

    @property
    def num_fds(self) -> int:
        return num_fds(self.pid)

    @property
    def num_sessions(self) -> int:
        status = self.status_if_any()
        return int(status["num_sessions"]) if status else 1 << 30

    def rss_mb(self, field: str = "VmRSS") -> float:
        return rss_kib(self.pid, field) / 1024

    def measure_anew(self) -> None:
        """Have the most memory and the longest turn begin here."""
        with suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        self.longest_turn_ms[0] = 0.0


class Traffic(NamedTuple):
    """Of the honest engines."""

    done: int = 0
    wrong: int = 0  # items that were delivered
    slowest_s: float = 0.0
    failures: Sequence[str] = ()


class Stage:
    """Both daemons, honest engines that read from each other, and idle processes of ranks for attacks."""

    def __init__(self, *, has_keys: bool, keep: Path | None = None) -> None:
        self.has_keys = has_keys
        self._keep = keep
        self.nodes: dict[str, Node] = {}
        self.spares: list[RankProcess] = []
        self._ranks: list[RankProcess] = []
        self._traffic: list[PullTraffic] = []
        self.key: CurveKeyPair | None = None  # of a peer that both daemons admit
        self._directory = Path(tempfile.mkdtemp(prefix="kvxferd-hostile-"))
        self._directory.chmod(0o711)
        try:
            self._start_daemons()
            self._start_engines()
        except BaseException:
            self.close()
            raise
        self.birth_mb = self.rss_mb()

    def _start_daemons(self) -> None:
        user = DAEMON if _can_start() else ROOT
        names = ("a", "b", "peer") if self.has_keys else ()
        keys = {name: make_key(self._directory / f"{name}.key") for name in names}
        self.key = keys.get("peer")
        for name in ("a", "b"):
            flags = []
            if keys:
                secret = self._directory / f"{name}.key"
                os.chown(secret, user.uid, user.gid)
                allowed = ",".join(key.public for key in keys.values())
                flags = ["--peer-curve-secret-key-file", str(secret), "--peer-curve-allowed-keys", allowed]
            public = keys[name].public if keys else ""
            self.nodes[name] = Node(self._directory / name, user, flags, public)
        for node in self.nodes.values():
            # The group of a daemon of root's is root's: engines are of another one here.
            node.wait_ready(START_S)
            os.chown(node.worker_socket, -1, GROUP)

    def _start_engines(self) -> None:
        self._ranks += [RankProcess(self._directory / f"rank-{number}.log") for number in range(6)]
        for rank in self._ranks:
            rank.run(become_honest)
        *pairs, first, second = self._ranks
        self.spares += [first, second]
        for number, (here, there) in enumerate((("a", "b"), ("b", "a"))):
            source, sink = pairs[2 * number : 2 * number + 2]
            self.register(source, here, f"honest-{number}")
            self.register(sink, there, f"reader-{number}")
            traffic = PullTraffic(source, sink, survives=(ChildError, AssertionError))
            self._traffic.append(traffic)
        wait_until(lambda: self.traffic().done >= 8, "the honest engines read from each other", START_S)

    def register(
        self, rank: RankProcess, node: str, name: str, limit_s: float = START_S, **facts: Any
    ) -> RankProcess:
        """Have it be an engine of one rank, or a rank of the engine that `facts` describe."""
        socket = self.nodes[node].worker_socket
        rank.start_registering(socket, spec_of(name, **facts), **FACTS).result(limit_s)
        return rank

    def rss_mb(self) -> float:
        return max(node.rss_mb() for node in self.nodes.values())

    def count_anew(self) -> None:
        for one in self._traffic:
            one.count_anew()

    def traffic(self) -> Traffic:
        """What the honest engines have done since `count_anew`."""
        failures = [failure for one in self._traffic for failure in one.failures]
        return Traffic(
            sum(one.num_delivered for one in self._traffic),
            sum(one.num_wrong for one in self._traffic),
            max(one.slowest_s for one in self._traffic),
            [str(failure)[:200] for failure in failures],
        )

    def close(self) -> list[str]:
        """End everything; return what was wrong about that."""
        for one in self._traffic:
            one.close()
        for rank in self._ranks:
            rank.stop()
        problems = [problem for node in self.nodes.values() for problem in node.end(STOP_S)]
        if self._keep is not None:
            self._keep.mkdir(parents=True, exist_ok=True)
            for node in self.nodes.values():
                shutil.copy(node.log, self._keep / f"{node.name}.log")
        shutil.rmtree(self._directory)
        return problems
