"""`kvxferd serve` in a directory of its own: a tool's daemon."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.control_client import SOCKET_NAME, ControlClient
from kvxferd.tooling.owned_process import OwnedProcess

READY_TIMEOUT_S = 60.0  # a cold start on a busy machine
_READY_POLL_S = 0.02


class DaemonProcess(OwnedProcess):
    """A daemon; SIGTERM ends it with this process. Construction starts it, and `wait_ready` waits for it.

    Of this environment's settings only those of movers reach it. `environ` and `flags` add to them, a flag in
    place of one here. `prefix`: what its command is run with. `module`: what serves in place of the
    command line.
    """

    def __init__(
        self,
        directory: Path,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        *,
        peer_host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        module: str = "kvxferd.cli",
    ) -> None:
        super().__init__(directory.name, directory / "daemon.log")
        self.directory = directory
        self.worker_socket = str(directory / "worker" / "worker.sock")
        self.control = ControlClient(str(directory / SOCKET_NAME))
        self._environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("KVXFERD_") or name.startswith("KVXFERD_MOVER_")
        } | dict(environ or {})
        self._command = [*prefix, sys.executable, "-P", "-m", module, "serve"]
        self._command += ["--parent-pid", str(os.getpid()), "--node-run-dir", str(directory)]
        self._command += ["--http-bind", "", "--peer-bind", f"tcp://{peer_host}:0"]
        # It drains within STOP_TIMEOUT_S.
        self._command += ["--drain-limit-s", "5", "--log-format", "json", *flags]
        directory.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        """Start it; again, after it has ended."""
        self._launch(self._command, self._environ)

    @property
    def is_ready(self) -> bool:
        """Whether it takes registrations now."""
        return self._why_not_ready() == ""

    def wait_ready(self, limit_s: float = READY_TIMEOUT_S) -> None:
        """Wait until it takes registrations. Raises KvxferdError if it ends, or is not ready in time."""
        deadline = time.monotonic() + limit_s
        reason: str | None = None  # that it gives; None: it has not responded yet
        while time.monotonic() < deadline:
            code = self.exit_code
            if code is not None:
                raise KvxferdError(f"cannot start the {self.name} daemon: it ended with {code}")
            why = self._why_not_ready()
            if why == "":
                return
            reason = reason if why is None else why
            time.sleep(_READY_POLL_S)
        raise KvxferdError(
            f"cannot start the {self.name} daemon: it is not ready: {reason or 'it does not respond'}",
            Code.DEADLINE,
        )

    def begin_stop(self) -> None:
        """Have it drain and end."""
        self.send_signal(signal.SIGTERM)

    def _why_not_ready(self) -> str | None:
        """Return "" if it is ready, its reasons if it is not, None if it does not respond."""
        with suppress(KvxferdError):
            status, reply = self.control.request("GET", "/readyz")
            return "" if status == 200 else "; ".join(reply.get("reasons", [])) or f"it responds {status}"
        return None
