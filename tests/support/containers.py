"""A daemon in a container of the image that is tested."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvxferd.errors import KvxferdError
from kvxferd.tooling.control_client import ControlClient
from tests.support.nodes.waiting import wait_until

ENGINE = "podman"
READY_S = 60.0
# What the daemon takes to drain, and then to end its movers.
STOP_S = 30
COMMAND_S = 240.0
# UCX takes 4.2 MiB of /dev/shm for each mover, and crashes the mover that finds no room there.
SHM_SIZE = "512m"


def podman(*words: str) -> str:
    """Run it and return what it prints."""
    done = subprocess.run(
        [ENGINE, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{ENGINE} {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def inspect(image: str) -> dict[str, Any]:
    """Return the image's configuration."""
    (found,) = json.loads(podman("image", "inspect", image))
    return dict(found["Config"])


def output(image: str, *words: str) -> str:
    """Run a program of the image in a container of its own and return what it prints."""
    return podman("run", "--rm", "--network=none", "--entrypoint", words[0], image, *words[1:])


class DaemonContainer:
    """`serve` on the host's network, its run directory in `folder`, where this process reaches its sockets.

    With `on_host` in the host's PID and IPC namespaces, else in its own. UCX reads by CMA only within one.
    """

    def __init__(
        self, image: str, folder: Path, uid: int, http_port: int = 0, *, on_host: bool = False
    ) -> None:
        self.name = f"kvxferd-test-{uuid.uuid4().hex[:12]}"
        self.folder = folder
        self.worker_socket = str(folder / "worker" / "worker.sock")
        self.control = ControlClient(str(folder / "control.sock"))
        (folder / "worker").mkdir(parents=True)
        for path in (folder, folder / "worker"):
            os.chown(path, uid, uid)
        flags = ["--pid=host", "--ipc=host"] if on_host else [f"--shm-size={SHM_SIZE}"]
        http = f"127.0.0.1:{http_port}" if http_port else ""
        flags += ["--env", f"KVXFERD_HTTP_BIND={http}", "--env", "KVXFERD_PEER_BIND=tcp://127.0.0.1:0"]
        flags += ["--name", self.name, "--network=host", "--stop-timeout", str(STOP_S)]
        podman("run", "--detach", *flags, "--volume", f"{folder}:/run/kvxferd", image)

    def wait_ready(self) -> None:
        """Wait until it takes registrations."""
        wait_until(self._is_ready, lambda: f"{self.name} is ready: {self.log()}", READY_S)

    def _is_ready(self) -> bool:
        with suppress(KvxferdError):
            return self.control.request("GET", "/readyz")[0] == 200
        return False

    def run(self, *words: str) -> str:
        """Run kvxferd beside the daemon and return what it prints."""
        return podman("exec", self.name, "kvxferd", *words)

    def log(self) -> str:
        """Return what it wrote to standard output and error."""
        done = subprocess.run([ENGINE, "logs", self.name], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def stop(self) -> int:
        """Have it drain, and return its exit code."""
        podman("stop", self.name)
        return int(podman("wait", self.name))

    def remove(self) -> None:
        """Kill it if it runs, and leave nothing of it but its directory."""
        podman("rm", "--force", "--volumes", "--time", "0", self.name)
