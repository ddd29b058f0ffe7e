"""Tells the service manager how far the daemon is: sd_notify(3), in a few lines."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from contextlib import suppress

SOCKET_VARIABLE = "NOTIFY_SOCKET"


class SdNotifier:
    """Speaks to whoever started the daemon with `Type=notify`; to nobody where there is no such."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Take the socket's name out of the environment: movers are not to speak for the daemon."""
        name = environ.pop(SOCKET_VARIABLE, "")
        # A leading @ stands for the zero byte of a name that is in no file system.
        self._address = "\0" + name[1:] if name.startswith("@") else name

    def send(self, *lines: str) -> None:
        """Send lines such as ``READY=1``. A manager that does not listen is no error of ours."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
            to.setblocking(False)
            to.sendto("\n".join(lines).encode(), self._address)
