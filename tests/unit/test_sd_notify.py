"""What the service manager hears, and from whom."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvxferd.sd_notify import SdNotifier


@pytest.mark.parametrize("abstract", [False, True])
def test_it_speaks_to_the_socket_and_takes_it_out_of_the_environment(tmp_path: Path, abstract: bool) -> None:
    name = f"@kvxferd-test-{tmp_path.name}-{id(tmp_path)}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(5)
        environ = {"NOTIFY_SOCKET": name, "HOME": "/"}
        notifier = SdNotifier(environ)
        assert environ == {"HOME": "/"}
        notifier.send("READY=1", "STATUS=serving")
        assert manager.recv(4096) == b"READY=1\nSTATUS=serving"


def test_nobody_listens_and_nothing_happens(tmp_path: Path) -> None:
    SdNotifier({}).send("READY=1")
    SdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).send("READY=1")
