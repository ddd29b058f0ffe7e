"""Ends connections that libzmq holds: it has no call for that."""

from __future__ import annotations

import errno
import os
import socket


def shut_connections_to(port: int) -> int:
    """Shut every TCP connection that was accepted at that port; return how many.

    libzmq sees the end of the stream and closes its side. A peer that is still admitted connects again in a
    tenth of a second, and what it asked meanwhile it asks again. A duplicate is looked at, never the
    descriptor itself: libzmq's thread may close that at any moment.

    Raises OSError where no descriptor is left to look with.
    """
    num_shut = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                num_shut += _shut_if_accepted_at(int(name), port)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
    return num_shut


def _shut_if_accepted_at(fd: int, port: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as found:
        is_meant = _is_accepted_at(found, port)
        if is_meant:
            found.shutdown(socket.SHUT_RDWR)
        return is_meant


def _is_accepted_at(found: socket.socket, port: int) -> bool:
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        return False
    found.getpeername()  # OSError: a listener
    return bool(found.getsockname()[1] == port)
