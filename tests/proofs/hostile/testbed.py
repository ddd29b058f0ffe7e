"""Two daemons and an honest pair of engines that goes on while somebody attacks."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from kvxferd.control.curve_keys import CurveKeyPair, make_key
from kvxferd.tooling.child_process import ChildProcess
from tests.proofs.hostile.honest_pair import Pair, Traffic
from tests.proofs.hostile.nodes import Node
from tests.proofs.hostile.users import DAEMON, GROUP, ROOT, can_start
from tests.support.nodes.processes import descendants

START_S = 90.0
STOP_S = 20.0
STEP_S = 0.02
HONEST_S = 60.0  # past any limit of what the pair does


class Stage:
    """Built by `__enter__`, gone after `__exit__`."""

    def __init__(self, *, has_keys: bool, keep: Path | None = None) -> None:
        self.has_keys = has_keys
        self._keep = keep
        self.nodes: dict[str, Node] = {}
        self.honest: ChildProcess[Pair] | None = None
        self.traffic = Traffic()  # of the honest pair
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
        self.daemon_user = DAEMON if can_start() else ROOT
        keys = {name: self._key(name) for name in ("a", "b", "peer")} if self.has_keys else {}
        self.key = keys.get("peer")
        public = ",".join(key.public for key in keys.values())
        for name in ("a", "b"):
            flags = ["--worker-mode", "0o660"]
            if keys:
                secret = str(self.directory / f"{name}.key")
                flags += ["--peer-curve-secret-key-file", secret, "--peer-curve-allowed-keys", public]
            directory = self.directory / name
            self.nodes[name] = Node(directory, self.daemon_user, flags)
        for node in self.nodes.values():
            # The group of a daemon of root's is root's: engines are of another one here.
            node.wait_ready(START_S)
            os.chown(node.worker_socket, -1, GROUP)
        sockets = [node.worker_socket for node in self.nodes.values()]
        self.honest = ChildProcess(partial(Pair, sockets), self.directory / "honest.log")
        if not self.pump_until(lambda: self.traffic.done >= 4, START_S):
            raise RuntimeError(f"the honest pair does not start: {self.honest.log_tail()} {self.traffic}")
        self.pump(0.5)
        self.birth_mb = max(node.rss_mb() for node in self.nodes.values())

    def _key(self, name: str) -> CurveKeyPair:
        path = self.directory / f"{name}.key"
        made = make_key(path)
        os.chown(path, self.daemon_user.uid, self.daemon_user.gid)
        return made

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.honest is not None:
            self.honest.stop()
        for node in self.nodes.values():
            self.problems += node.end(STOP_S)
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
            if self.honest is None:
                time.sleep(min(STEP_S, left))
            else:
                self.traffic = self.honest.call(Pair.go_on, min(STEP_S, left))

    def pump_until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > until:
                return False
            self.pump(STEP_S)
        return True

    def begin_traffic(self) -> None:
        """What the honest pair does counts from here on."""
        assert self.honest is not None
        self.honest.call(Pair.begin)
        self.traffic = Traffic()

    # --- what an attack may have done on its behalf

    def do_honest(self, do: str, **arguments: Any) -> Any:
        assert self.honest is not None
        return self.honest.start(getattr(Pair, do), **arguments).result(HONEST_S)

    def do_kill(self, node: str) -> None:
        self.nodes[node].kill()

    def do_status(self, node: str) -> Any:
        return self.nodes[node].status_if_any()

    def do_pids(self, node: str) -> list[int]:
        """The daemon's and its family's."""
        pid = self.nodes[node].pid
        return [pid, *descendants(pid)]

    def do_traffic(self) -> dict[str, Any]:
        return vars(self.traffic)
