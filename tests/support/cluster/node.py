"""A node: one real daemon behind a link that can fail."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvxferd.errors import KvxferdError
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.daemon_process import DaemonProcess
from tests.support.cluster.processes import children, lives, num_fds, state_of
from tests.support.cluster.tcp_proxy import Proxy

# Short, so that what ends by itself ends within an audit.
FLAGS = {
    "--transfer-lease-s": "5",
    "--transfer-max-hold-s": "60",
    "--peer-silent-after-s": "4",
    "--peer-request-timeout-s": "0.5",
    "--peer-handshake-wait-s": "4",
    "--drain-limit-s": "3",
    "--mover-pool-size": "1",
}
POOL_SIZE = 1
STOP_S = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


class Node:
    """`kvxferd serve`, killed and started again at will.

    Other daemons reach it through `link`, or directly at `address` where one is given. `prefix` is
    what its command is run with: a network namespace, say. `module` is what serves: one of the tests', to
    show that a mend is needed.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        environ: dict[str, str],
        address: str = "",
        prefix: tuple[str, ...] = (),
        module: str = "kvxferd.cli",
    ) -> None:
        self.name = name
        self.link: Proxy | None = None
        bound = address
        if not bound:
            port = free_port()
            bound = f"tcp://127.0.0.1:{port}"
            self.link = Proxy(("127.0.0.1", port))
        self.endpoint = self.link.endpoint if self.link is not None else bound
        self.parents: set[int] = set()  # every movers' parent that was seen
        self.stopped_s = 0.0  # how long the daemon has been stopped in all
        self.num_stopped = 0  # stops of this node's processes under way
        flags = ["--peer-bind", bound, "--peer-advertise", self.endpoint]
        flags += [word for flag in FLAGS.items() for word in flag]
        environ = environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
        self.daemon = DaemonProcess(directory, flags, environ, prefix=prefix, module=module)
        self.worker_socket = self.daemon.worker_socket
        self.log = self.daemon.log
        self._control = ControlClient(self.daemon.control.socket_path, timeout_s=2.0)

    @property
    def pid(self) -> int:
        return self.daemon.pid

    def start(self) -> None:
        """Start it again, after it has ended."""
        self.daemon.start()

    def status(self) -> dict[str, Any] | None:
        """What it says of itself, None where it does not answer."""
        with suppress(KvxferdError):
            return self._control.get("/v1/status")["node"]
        return None

    @property
    def is_ready(self) -> bool:
        with suppress(KvxferdError):
            return self._control.request("GET", "/readyz")[0] == 200
        return False

    def parent(self) -> int | None:
        """The movers' parent."""
        found = children(self.pid)
        self.parents |= set(found)
        return found[0] if found else None

    def movers(self) -> list[int]:
        return [pid for parent in children(self.pid) for pid in children(parent)]

    def zombies(self) -> list[int]:
        family = [*children(self.pid), *self.movers()]
        return [pid for pid in family if state_of(pid) == "Z"]

    def num_fds(self) -> int:
        return num_fds(self.pid)

    def kill(self) -> None:
        """At once, whatever it is doing. Its process is reaped."""
        self.parent()
        self.daemon.kill()

    def stop(self) -> list[str]:
        """End it as an operator would; return what is wrong about how it ended."""
        self.parent()
        movers = self.movers()
        if self.link is not None:
            self.link.stop()
        code = self.daemon.stop(STOP_S)
        how = "SIGTERM did not end the daemon in time" if code == -signal.SIGKILL else f"it ended with {code}"
        problems = [f"{self.name}: {how}"] if code else []
        sockets = [path.name for path in self.daemon.directory.glob("*.sock")]
        problems += [f"{self.name}: left behind {name}" for name in sockets]
        return problems + self.leftovers(movers)

    def leftovers(self, movers: list[int]) -> list[str]:
        """Processes and shared memory that outlive the daemon. Waits a moment for them to go."""
        until = time.monotonic() + 5.0
        while time.monotonic() < until and any(map(lives, [*movers, *self.parents])):
            time.sleep(0.02)
        problems = [f"{self.name}: process {p} left" for p in {*movers, *self.parents} if lives(p)]
        return problems + [f"{self.name}: {path} left" for path in self.shm() if path.exists()]

    def shm(self) -> list[Path]:
        """Shared memory directories of parents that are gone and were this node's."""
        gone = [pid for pid in self.parents if not lives(pid)]
        return [d for pid in gone if (d := Path(f"/dev/shm/kvxferd-movers-{pid}")).exists()]
