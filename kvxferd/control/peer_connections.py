"""Ends connections that libzmq holds: it has no call for that."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def shut_connections_to(port: int) -> int:
    """Shut every TCP connection that was accepted at that port; return how many.

    libzmq sees the end of the stream and closes its side. A peer that is still admitted connects again in a
    tenth of a second, and what it asked meanwhile it asks again. A duplicate is looked at, never the
    descriptor itself: libzmq's thread may close that at any moment.
    """
    num_shut = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if _is_accepted_at(found, port):
                    found.shutdown(socket.SHUT_RDWR)
                    num_shut += 1
    return num_shut


def _is_accepted_at(found: socket.socket, port: int) -> bool:
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        return False
    found.getpeername()  # OSError: a listener
    return bool(found.getsockname()[1] == port)
