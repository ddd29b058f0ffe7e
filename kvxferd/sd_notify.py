"""Reports the daemon's state to the service manager: sd_notify(3)."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from contextlib import suppress

SOCKET_VARIABLE = "NOTIFY_SOCKET"


class SdNotifier:
    """Sends to the socket in NOTIFY_SOCKET, set by systemd for `Type=notify`; without it does nothing."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Remove the socket's name from the environment: movers must not notify for the daemon."""
        name = environ.pop(SOCKET_VARIABLE, "")
        # A leading @ stands for the zero byte of an abstract socket's name.
        self._address = "\0" + name[1:] if name.startswith("@") else name

    def send(self, *lines: str) -> None:
        """Send lines such as ``READY=1``. Errors are ignored: the daemon works without a manager."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
            to.setblocking(False)
            to.sendto("\n".join(lines).encode(), self._address)
