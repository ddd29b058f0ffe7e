"""Checks the descriptors of a registration: its memory's, its delivery socket, a resident mover's socket."""

from __future__ import annotations

import socket
from typing import NamedTuple

from kvxferd.control.frame_fds import FrameFds
from kvxferd.errors import Code, EngineError
from kvxferd.memory.validate import check_exports
from kvxferd.wire.common import Refusal
from kvxferd.wire.worker import Register, Resume


class RegistrationCheck(NamedTuple):
    """The descriptors of a registration besides its regions', and why it is refused."""

    mover_socket: socket.socket | None  # to a resident mover
    refusal: Refusal | None


def check_registration(message: Register | Resume, fds: FrameFds, is_whole: bool = True) -> RegistrationCheck:
    """Detach a resident mover's socket, and return the refusal if there is one. The regions stay in `fds`.

    If more descriptors are to come, `check_regions` checks the regions once all have arrived.
    """
    mover = None
    try:
        if message.placement == "resident":
            mover = detach_mover_socket(fds)
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
        return RegistrationCheck(None, Refusal(error.code, error.message))
    return RegistrationCheck(mover, check_regions(message, fds.fds) if is_whole else None)


def check_regions(message: Register | Resume, fds: tuple[int, ...]) -> Refusal | None:
    """Return why the regions and their descriptors, which all have arrived, are refused; None if valid."""
    try:
        check_exports(message.regions, fds)
    except EngineError as error:
        return Refusal(error.code, error.message)
    return None


def detach_mover_socket(fds: FrameFds) -> socket.socket:
    """Detach the last descriptor as the socket of a resident mover.

    Raises EngineError if it is no such socket; then nothing is detached.
    """
    if fds:
        try:
            connected = socket.socket(fileno=fds.fds[-1])
        except OSError:
            pass
        else:
            if (connected.family, connected.type) == (socket.AF_UNIX, socket.SOCK_STREAM):
                fds.detach_last()
                return connected
            connected.detach()  # not closed: `fds` still owns it
    raise EngineError(
        "cannot use a resident mover: its socket, a Unix stream, is the last descriptor of its frame",
        Code.REGION_INVALID,
    )
