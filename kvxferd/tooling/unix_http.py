"""HTTP over a Unix socket."""

from __future__ import annotations

import http.client
import socket

HttpError = http.client.HTTPException


class UnixConnection(http.client.HTTPConnection):
    """A connection to the server at a socket's path; without a timeout for None."""

    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("kvxferd", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
