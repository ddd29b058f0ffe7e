"""Two daemons and an honest pair of engines that goes on while somebody attacks."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kvxferd.control.curve_keys import CurveKeyPair, make_key
from tests.proofs.hostile.nodes import Node
from tests.proofs.hostile.registry import Setup
from tests.proofs.hostile.users import DAEMON, GROUP, ROOT, can_start
from tests.support.cluster.processes import maps

START_S = 90.0
SMALL_S = 0.02


@dataclass
class Traffic:
    """What the honest pair has done since somebody looked last."""

    done: int = 0
    failed: int = 0
    wrong: int = 0
    slowest_ms: float = 0.0
    why: tuple[str, ...] = ()


class Honest:
    """The process of the pair."""

    def __init__(self, sockets: list[str], environ: dict[str, str], log: Path) -> None:
        command = [sys.executable, "-m", "tests.proofs.hostile.honest_pair", *sockets]
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environ
            )
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self._out = self.process.stdout.fileno()
        os.set_blocking(self._out, False)
        self._in = self.process.stdin.fileno()
        self._partial = b""
        self._numbers = itertools.count(1)
        self.answers: dict[int, dict[str, Any]] = {}
        self.is_registered = False
        self.traffic = Traffic()

    def send_request(self, **command: Any) -> int:
        number = next(self._numbers)
        os.write(self._in, json.dumps({"number": number, **command}).encode() + b"\n")
        return number

    def read(self) -> None:
        try:
            chunk = os.read(self._out, 1 << 20)
        except BlockingIOError:
            return
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, said: dict[str, Any]) -> None:
        if "answer" in said:
            self.answers[said["answer"]] = said
            self.traffic.wrong += said.get("wrong", 0)
        elif "registered" in said:
            self.is_registered = True
        else:
            self._count(said)

    def _count(self, said: dict[str, Any]) -> None:
        traffic = self.traffic
        traffic.slowest_ms = max(traffic.slowest_ms, said["ms"])
        traffic.wrong += said.get("wrong", 0)
        if said["end"] == "delivered":
            traffic.done += 1
            return
        traffic.failed += 1
        if len(traffic.why) < 3:
            traffic.why += (f"{said['end']} {said['code']}: {said.get('why', '')}"[:200],)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Stage:
    """Built by `__enter__`, gone after `__exit__`."""

    def __init__(self, setup: Setup, keep: Path | None = None) -> None:
        self.setup = setup
        self._keep = keep
        self.nodes: dict[str, Node] = {}
        self.honest: Honest | None = None
        self.key: CurveKeyPair | None = None  # of a peer that both daemons admit
        self.problems: list[str] = []  # found when it was taken down
        self.birth_mb = 0.0

    def __enter__(self) -> Stage:
        self._temporary = tempfile.TemporaryDirectory(prefix="kvxferd-hostile-")
        self.directory = Path(self._temporary.name)
        self.directory.chmod(0o711)
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _build(self) -> None:
        root = str(Path(__file__).parents[3])
        environ = {k: v for k, v in os.environ.items() if not k.startswith("KVXFERD_")}
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), root])
        environ |= {"PYTHONPATH": path, "HOME": str(self.directory), "PYTHONDONTWRITEBYTECODE": "1"}
        self.daemon_user = DAEMON if can_start(tuple(environ.items())) else ROOT
        self._environ = environ
        keys = {name: self._key(name) for name in ("a", "b", "peer")} if self.setup.keys else {}
        self.key = keys.get("peer")
        public = ",".join(key.public for key in keys.values())
        for name in ("a", "b"):
            flags = ["--worker-mode", "0o660"]
            if keys:
                secret = str(self.directory / f"{name}.key")
                flags += ["--peer-curve-secret-key-file", secret, "--peer-curve-allowed-keys", public]
            directory = self.directory / name
            self.nodes[name] = Node(directory, self.daemon_user, self.setup, environ, flags)
        for name, node in self.nodes.items():
            # The group of a daemon of root's is root's: engines are of another one here.
            if not self._await(lambda node=node: node.is_ready, START_S):
                raise RuntimeError(f"daemon {name} does not start: {node.log.read_text()[-2000:]}")
            os.chown(node.worker_socket, -1, GROUP)
        self.start_honest()
        self.pump(0.5)
        self.birth_mb = max(node.rss_mb() for node in self.nodes.values())

    def _key(self, name: str) -> CurveKeyPair:
        path = self.directory / f"{name}.key"
        made = make_key(path)
        os.chown(path, self.daemon_user.uid, self.daemon_user.gid)
        return made

    def start_honest(self) -> None:
        sockets = [node.worker_socket for node in self.nodes.values()]
        self.honest = Honest(sockets, self._environ, self.directory / "honest.log")
        if not self.pump_until(lambda: self.honest.is_registered and self.honest.traffic.done >= 4, START_S):
            log = (self.directory / "honest.log").read_text()
            raise RuntimeError(f"the honest pair does not start: {log[-2000:]} {self.honest.traffic}")

    @staticmethod
    def _await(holds: Callable[[], bool], limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > until:
                return False
            time.sleep(SMALL_S)
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.honest is not None:
            self.honest.stop()
        for name, node in self.nodes.items():
            self.problems += [f"{name}: {problem}" for problem in node.stop()]
        if self._keep is not None:
            self._save(self._keep)
        self._temporary.cleanup()

    def _save(self, keep: Path) -> None:
        keep.mkdir(parents=True, exist_ok=True)
        for node in self.nodes.values():
            for path in (node.log, node.directory / "meter.places"):
                if path.exists():
                    with (keep / f"{node.directory.name}-{path.name}").open("ab") as kept:
                        kept.write(path.read_bytes())

    # --- time

    def pump(self, seconds: float) -> None:
        """Let that much time pass."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self.honest is not None:
                self.honest.read()
            time.sleep(min(SMALL_S, left))

    def pump_until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > until:
                return False
            self.pump(SMALL_S)
        return True

    # --- what an attack may have done on its behalf

    def do_honest(self, limit_s: float = 40.0, **command: Any) -> dict[str, Any]:
        assert self.honest is not None
        number = self.honest.send_request(**command)
        if not self.pump_until(lambda: number in self.honest.answers, limit_s):
            return {"outcome": "no answer", "why": f"{command['do']} did not end in {limit_s} s"}
        return self.honest.answers.pop(number)

    def do_restart(self, node: str, kill: bool = True, limit_s: float = 40.0) -> str:
        """As after a crash; with `kill` False as an operator does. Returns what went wrong."""
        found = self.nodes[node]
        if found.process.poll() is not None:
            pass  # it is away already
        elif kill:
            found.kill()
        elif problems := found.stop():
            return "; ".join(problems)
        found.start()
        if not self.pump_until(lambda: found.is_ready, limit_s):
            return f"the daemon did not come back in {limit_s} s: {found.log.read_text()[-300:]}"
        os.chown(found.worker_socket, -1, GROUP)
        return ""

    def do_kill(self, node: str) -> None:
        self.nodes[node].kill()

    def do_start(self, node: str) -> None:
        """Start it, and let the engines' group in as soon as it listens."""
        found = self.nodes[node]
        found.start()
        self.pump_until(lambda: found.is_ready, START_S)  # the socket of the one before is still there
        os.chown(found.worker_socket, -1, GROUP)

    def do_signal(self, node: str, number: int) -> None:
        self.nodes[node].process.send_signal(number)

    def do_mappers(self, inode: int) -> list[int]:
        """The daemons and movers that map that memory. Only root may know."""
        family = [pid for node in self.nodes.values() for pid in (node.pid, *node.family())]
        return [pid for pid in family if maps(pid, inode)]

    def do_num_fds(self, node: str) -> int:
        return self.nodes[node].num_fds()

    def do_status(self, node: str) -> Any:
        return self.nodes[node].status()

    def do_pids(self, node: str) -> list[int]:
        """The daemon's and its family's."""
        return [self.nodes[node].pid, *self.nodes[node].family()]

    def do_pump(self, seconds: float) -> None:
        self.pump(seconds)

    def do_traffic(self) -> dict[str, Any]:
        assert self.honest is not None
        return vars(self.honest.traffic)

    def do_stop_continue(self, node: str, seconds: float) -> None:
        self.nodes[node].process.send_signal(signal.SIGSTOP)
        self.pump(seconds)
        self.nodes[node].process.send_signal(signal.SIGCONT)
