"""Shuts TCP connections that libzmq holds; libzmq has no call for that."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_Address = tuple[str, int]  # address and port


def shut_accepted_connections(port: int) -> int:
    """Shut every TCP connection that was accepted at that port; return how many came from other processes.

    libzmq sees the end of the stream and closes its side. A peer that is still admitted connects again in a
    tenth of a second, and sends its unanswered requests again. This process's own connection to itself is
    shut and not counted.

    Raises OSError if no descriptor is free to look with.
    """
    # Before any is shut: libzmq's thread closes the other end at once.
    own = _map_tcp_sockets(lambda found: _own_address(found, port))
    # A set: one connection may have several descriptors (see `ConnectionGuard`).
    return len(set(_map_tcp_sockets(lambda found: _shut_if_accepted_at(found, port))) - set(own))


def _map_tcp_sockets(visit: Callable[[socket.socket], T | None]) -> list[T]:
    """Return what `visit` returns for this process's TCP connections, without None.

    `visit` gets a duplicate, never the descriptor itself: libzmq's thread may close that at any time.
    """
    all_found: list[T] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    result = visit(found)
                    if result is not None:
                        all_found.append(result)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
    return all_found


def _own_address(found: socket.socket, port: int) -> _Address | None:
    return _normalized(found.getsockname()) if found.getpeername()[1] == port else None


def _shut_if_accepted_at(found: socket.socket, port: int) -> _Address | None:
    remote = _normalized(found.getpeername())  # OSError: a listener
    if found.getsockname()[1] != port:
        return None
    found.shutdown(socket.SHUT_RDWR)
    return remote


def _normalized(address: tuple[str, int, int, int] | _Address) -> _Address:
    """Return the address with an IPv4-mapped IPv6 address as IPv4, which a dual-stack socket reports."""
    found = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found), address[1]
