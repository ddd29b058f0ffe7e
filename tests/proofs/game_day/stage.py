"""Two daemons with an engine each, requests that go on, and what their outputs show."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

from kvxferd.errors import KvxferdError
from kvxferd.tooling.child_process import ChildError
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import spec_of
from tests.support.pull_traffic import PullTraffic

PAUSE_S = 0.05
DEADLINE_S = 3.0
SURVIVED = (ChildError, TimeoutError, OSError, AssertionError)  # by the traffic: a fault is struck
WATCH_EVERY_S = 0.25
LOG_LINES = 200

# What a verdict may have: failed pulls, a limit that is near, kinds of warnings.
SIGNS = ("Pulls fail", "max_transfers_per_engine", "same-node-tcp", "peer-turned-away")

# Of each node, by a name: the verb and its options. The status page shows what `top` does.
VERBS = {
    "status": ("status",),
    "history --failed": ("history", "--failed", "--limit", "5"),
    "doctor": ("doctor", "--check", "answering"),
    "top --once": ("top", "--once"),
}


class Stage:
    """A prefill and a decode node. `seen` has when each of `SIGNS` was first in its verdict, by node."""

    def __init__(
        self,
        directory: Path,
        prefill_flags: tuple[str, ...] = (),
        decode_flags: tuple[str, ...] = (),
        **environ: str,
    ) -> None:
        self.fleet = Fleet(directory)
        self.prefill = self.fleet.daemon("prefill", *prefill_flags, **environ)
        self.decode = self.fleet.daemon("decode", *decode_flags, **environ)
        self.nodes = {"prefill": self.prefill, "decode": self.decode}
        self.endpoints = {name: node.endpoint for name, node in self.nodes.items()}
        self.seen: dict[tuple[str, str], float] = {}
        self._over = threading.Event()
        (self.source,) = self.fleet.engine(self.prefill, spec_of("prefill"))
        (self.sink,) = self.fleet.engine(self.decode, spec_of("decode"))
        self.began = time.time()
        self.traffic = PullTraffic(self.source, self.sink, PAUSE_S, SURVIVED, deadline_s=DEADLINE_S)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def close(self) -> None:
        self._over.set()
        self.traffic.close()
        self._watcher.join(10)
        self.fleet.stop()

    def outputs(self, name: str) -> dict[str, str]:
        """Return what each output of a node shows now, by the output's name."""
        node, found = self.nodes[name], dict[str, str]()
        for output, verb in VERBS.items():
            done = node.verb(*verb, COLUMNS="160", NO_COLOR="1")
            found[output] = done.stdout + done.stderr
        found["log"] = "\n".join(node.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        return found

    def verdict(self, name: str) -> str:
        """Return a node's verdict; "" of one that does not answer."""
        node = self.nodes[name]
        with suppress(KvxferdError, OSError):
            if node.exit_code is None:
                return str(node.control.get("/v1/status")["verdict"]["text"])
        return ""

    def _watch(self) -> None:
        while not self._over.wait(WATCH_EVERY_S):
            for name in self.nodes:
                verdict = self.verdict(name)
                for sign in SIGNS:
                    if sign in verdict:
                        self.seen.setdefault((name, sign), time.time())
