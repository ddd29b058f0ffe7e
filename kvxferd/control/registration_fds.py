"""What a registration brings besides its message: the memory's descriptors, a resident mover's socket."""

from __future__ import annotations

import socket
from typing import NamedTuple

from kvxferd.control.frame_fds import FrameFds
from kvxferd.errors import Code, EngineError
from kvxferd.memory.validate import check_exports
from kvxferd.wire.common import Refusal
from kvxferd.wire.worker import Register, Resume


class RegistrationCheck(NamedTuple):
    """What a registration brought besides its regions."""

    mover_socket: socket.socket | None  # to a resident mover
    refusal: Refusal | None


def check_registration(message: Register | Resume, fds: FrameFds, is_whole: bool = True) -> RegistrationCheck:
    """Take a resident mover's socket out of what came, and say what is wrong. The regions stay in `fds`.

    Where they are not whole, `check_offer` says what is wrong with them when the rest has come.
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
    """Say what is wrong with the regions and their descriptors, which are all there."""
    try:
        check_exports(message.regions, fds)
    except EngineError as error:
        return Refusal(error.code, error.message)
    return None


def detach_mover_socket(fds: FrameFds) -> socket.socket:
    """Take the last descriptor as the socket of a resident mover.

    Raises EngineError where it is none; then nothing is taken.
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
            connected.detach()  # not closed: it is in `fds` yet
    raise EngineError(
        "cannot use a resident mover: its socket, a Unix stream, is the last descriptor of its frame",
        Code.REGION_INVALID,
    )
