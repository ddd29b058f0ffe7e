"""A daemon that answers without end costs a verb a limited amount of memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvxferd.errors import KvxferdError
from kvxferd.tooling import control_client
from kvxferd.tooling.control_client import ControlClient


def answer_without_end(listener: socket.socket) -> None:
    """Take one connection, and send until the other side is gone."""
    connection, _ = listener.accept()
    with connection, suppress(OSError):
        connection.settimeout(20)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        while True:
            connection.sendall(bytes(1 << 16))


@pytest.mark.parametrize("read", [ControlClient.read, ControlClient.get])
def test_an_answer_without_end_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[ControlClient, str], object]
) -> None:
    monkeypatch.setattr(control_client, "MAX_BODY_BYTES", 1 << 20)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path := str(tmp_path / "control.sock"))
        listener.listen()
        listener.settimeout(20)
        answering = threading.Thread(target=answer_without_end, args=(listener,))
        answering.start()
        with pytest.raises(KvxferdError, match="more than 1 MiB"):
            read(ControlClient(path), "/v1/status")
        answering.join(20)
        assert not answering.is_alive()
