"""HTTP over a Unix socket."""

from __future__ import annotations

import http.client
import socket
import time

HttpError = http.client.HTTPException


class _DeadlineSocket(socket.socket):
    """Raises TimeoutError at a deadline, however little comes before it at a time."""

    deadline = 0.0  # of time.monotonic()

    def recv_into(self, *args: object, **kwargs: object) -> int:
        """Receive as a socket does; `HTTPResponse` reads by this alone."""
        if self.deadline:
            left_s = self.deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            self.settimeout(left_s)
        return super().recv_into(*args, **kwargs)  # type: ignore[arg-type]


class UnixConnection(http.client.HTTPConnection):
    """A connection to the server at a socket's path. `timeout_s`: of the whole response; None: no limit."""

    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("kvxferd", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = connection = _DeadlineSocket(socket.AF_UNIX)
        if self._timeout_s is not None:
            connection.settimeout(self._timeout_s)
            connection.deadline = time.monotonic() + self._timeout_s
        connection.connect(self._path)
