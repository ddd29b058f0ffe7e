"""One daemon of a stage: started as its own user, watched from outside."""

from __future__ import annotations

import http.client
import json
import os
from contextlib import suppress
from pathlib import Path

from kvxferd.tooling.control_client import ControlClient
from tests.proofs.hostile.users import User
from tests.proofs.hostile.watched_daemon import METER_VARIABLE, Meter
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.processes import num_fds, rss_kib
from tests.support.ports import free_port

REPLY_S = 5.0
FLAGS = {
    "--mover-pool-size": "1",
    "--drain-limit-s": "2",
    "--peer-request-timeout-s": "1",
    "--peer-silent-after-s": "6",
}


class Node(Daemon):
    """`kvxferd serve` under `watched_daemon`."""

    def __init__(self, directory: Path, user: User, flags: list[str]) -> None:
        home = directory / "home"
        home.mkdir(parents=True)
        for path in (directory, home):
            os.chown(path, user.uid, user.gid)
        self.http_address = ("127.0.0.1", free_port())
        meter = directory / "meter"
        self.meter = Meter.make(meter, user.uid)
        environ = {name: str(home) for name in ("HOME", "TMPDIR")}
        environ |= {METER_VARIABLE: str(meter), "PYTHONDONTWRITEBYTECODE": "1"}
        flags = [*(word for flag in FLAGS.items() for word in flag), *flags]
        flags += ["--peer-bind", f"tcp://127.0.0.1:{free_port()}"]
        flags += ["--http-bind", f"127.0.0.1:{self.http_address[1]}"]
        prefix = ["setpriv", "--reuid", str(user.uid), "--regid", str(user.gid), "--clear-groups"]
        module = "tests.proofs.hostile.watched_daemon"
        super().__init__(directory, environ, flags, prefix=prefix if user.uid else (), module=module)
        self.control = ControlClient(self.control.socket_path, timeout_s=REPLY_S)

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

    def num_fds(self) -> int:
        return num_fds(self.pid)

    def rss_mb(self, field: str = "VmRSS") -> float:
        return rss_kib(self.pid, field) / 1024

    def reset(self) -> None:
        """What is measured from here on is measured anew."""
        with suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        self.meter.reset()
