"""A daemon that answers without end costs a verb a limited amount of memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvxferd.errors import KvxferdError
from kvxferd.tooling import control_client
from kvxferd.tooling.control_client import ControlClient

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@contextmanager
def answering(path: Path, reply: Callable[[socket.socket, threading.Event], None]) -> Iterator[None]:
    """Answer one connection by `answer`, which ends when the event is set or the other side is gone."""
    stop = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(20)

        def run() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.settimeout(20)
                reply(connection, stop)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(20)
            assert not thread.is_alive()


def _flood(connection: socket.socket, stop: threading.Event) -> None:
    connection.sendall(HEAD + b"\r\n")
    while not stop.is_set():
        connection.sendall(bytes(1 << 16))


@pytest.mark.parametrize("read", [ControlClient.read, ControlClient.get])
def test_an_answer_without_end_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[ControlClient, str], object]
) -> None:
    monkeypatch.setattr(control_client, "MAX_BODY_BYTES", 1 << 20)
    path = tmp_path / "control.sock"
    with answering(path, _flood), pytest.raises(KvxferdError, match="more than 1 MiB"):
        read(ControlClient(str(path)), "/v1/status")
