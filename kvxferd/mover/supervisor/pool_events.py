"""What happens to the pool of movers. The shell makes the events and feeds them to the decisions.

The forkserver's messages are events as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.ids import MoverId
from kvxferd.mover.forkserver_protocol import Forked, ForkFailed, LibraryLoaded, LibraryUnavailable
from kvxferd.wire.mover import FromMover


@dataclass(frozen=True, slots=True)
class Started:
    """The daemon starts: a forkserver is wanted."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The daemon stops: all movers are to end."""


@dataclass(frozen=True, slots=True)
class MoverRequested:
    """A rank needs a mover. `AssignMover` or `RefuseRequest` follows; a request's number is used once."""

    request: int


@dataclass(frozen=True, slots=True)
class BusyChanged:
    """Whether pulls run."""

    is_busy: bool


@dataclass(frozen=True, slots=True)
class ForkserverNotStarted:
    """`StartForkserver` failed, and left nothing behind."""

    reason: str


@dataclass(frozen=True, slots=True)
class ForkserverExited:
    """The forkserver is gone. The kernel kills its movers; each has its own `MoverExited`."""


@dataclass(frozen=True, slots=True)
class ForkNotSent:
    """`RequestFork` failed, and left nothing behind."""

    mover: MoverId
    reason: str


@dataclass(frozen=True, slots=True)
class MoverReported:
    """A mover sent a message."""

    mover: MoverId
    message: FromMover


@dataclass(frozen=True, slots=True)
class MoverStreamClosed:
    """A mover closed its end of the socket, or was cut off: it cannot be reached any more."""

    mover: MoverId


@dataclass(frozen=True, slots=True)
class MoverExited:
    """A mover's process is gone. Its last message was reported before."""

    mover: MoverId


@dataclass(frozen=True, slots=True)
class TimersDue:
    """Time has passed: run the timers that are due."""


PoolEvent = (
    Started
    | StopRequested
    | MoverRequested
    | BusyChanged
    | ForkserverNotStarted
    | ForkserverExited
    | LibraryLoaded
    | LibraryUnavailable
    | Forked
    | ForkFailed
    | ForkNotSent
    | MoverReported
    | MoverStreamClosed
    | MoverExited
    | TimersDue
)
