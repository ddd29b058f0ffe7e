"""A node: one real daemon behind a link that can fail."""

from __future__ import annotations

from pathlib import Path

from kvxferd.tooling.control_client import ControlClient
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.processes import children, state_of
from tests.support.nodes.tcp_proxy import Proxy
from tests.support.ports import free_port

MAX_HOLD_S = 10  # for which a progressive pull waits for a transfer that may never come
# Short, so that what ends by itself ends within an audit.
FLAGS = {
    "--transfer-lease-s": "5",
    "--transfer-max-hold-s": str(MAX_HOLD_S),
    "--peer-silent-after-s": "4",
    "--peer-request-timeout-s": "0.5",
    "--peer-handshake-wait-s": "4",
    "--drain-limit-s": "3",
    "--mover-pool-size": "1",
}
POOL_SIZE = 1
STOP_S = 20.0
LEFT_S = 5.0
RESPONSE_S = 2.0


class Node(Daemon):
    """`kvxferd serve`, killed and started again at will. Other daemons reach it through `link`."""

    def __init__(self, directory: Path, environ: dict[str, str]) -> None:
        port = free_port()
        self.link = Proxy(("127.0.0.1", port))
        self.num_stopped = 0  # stops of this node's processes under way
        flags = ["--peer-bind", f"tcp://127.0.0.1:{port}", "--peer-advertise", self.link.endpoint]
        flags += [word for flag in FLAGS.items() for word in flag]
        super().__init__(directory, environ, flags)
        self.control = ControlClient(self.control.socket_path, timeout_s=RESPONSE_S)

    @property
    def endpoint(self) -> str:
        """Where others reach it; of a daemon that has ended too."""
        return self.link.endpoint

    def zombies(self) -> list[int]:
        family = [*children(self.pid), *self.movers()]
        return [pid for pid in family if state_of(pid) == "Z"]

    def end(self, stop_s: float = STOP_S, left_s: float = LEFT_S) -> list[str]:
        """End its link, and it as `Daemon.end` does."""
        self.link.stop()
        return super().end(stop_s, left_s)
