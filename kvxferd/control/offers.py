"""What a registration brings besides its message: the memory's descriptors, a resident mover's socket."""

from __future__ import annotations

import socket
from typing import NamedTuple

from kvxferd.errors import Code, EngineError
from kvxferd.link import close_all
from kvxferd.memory.inspect import check_exports
from kvxferd.wire.common import Refusal
from kvxferd.wire.worker import Register, Resume


class Offer(NamedTuple):
    """A registration's descriptors, sorted."""

    regions: tuple[int, ...]
    mover: socket.socket | None  # to a resident mover
    problem: Refusal | None


def take_offer(message: Register | Resume, fds: tuple[int, ...], is_whole: bool = True) -> Offer:
    """Sort what came with a registration, and say what is wrong with it. All of it is the caller's.

    Where it is not whole, `check_offer` says of the regions what is wrong when the rest has come.
    """
    mover = None
    try:
        if message.placement == "resident":
            fds, mover = fds[:-1], mover_socket(fds[-1:])
        elif message.placement != "child":
            raise EngineError(
                f"cannot place a mover as {message.placement[:80]!r}; child and resident are known",
                Code.REGION_INVALID,
            )
        elif any(export.kind == "resident" for export in message.regions):
            raise EngineError(
                "cannot reach memory of the worker's own from a child process: its mover must be resident; "
                "register through kvxferd.resident",
                Code.REGION_INVALID,
            )
    except EngineError as error:
        return Offer(fds, mover, Refusal(error.code, error.message))
    return Offer(fds, mover, check_offer(message, fds) if is_whole else None)


def check_offer(message: Register | Resume, fds: tuple[int, ...]) -> Refusal | None:
    """Say what is wrong with the regions and their descriptors, which are all there."""
    try:
        check_exports(message.regions, fds)
    except EngineError as error:
        return Refusal(error.code, error.message)
    return None


def mover_socket(fds: tuple[int, ...]) -> socket.socket:
    """Return the one descriptor as the socket of a resident mover. Raises EngineError, and closes it then."""
    if len(fds) == 1:
        try:
            connected = socket.socket(fileno=fds[0])
        except OSError:
            close_all(fds)
        else:
            if (connected.family, connected.type) == (socket.AF_UNIX, socket.SOCK_STREAM):
                return connected
            connected.close()
    else:
        close_all(fds)
    raise EngineError(
        "cannot use a resident mover: its socket, a Unix stream, is the last descriptor of its frame",
        Code.REGION_INVALID,
    )
