"""The effects of the pool's decisions. The shell carries them out in order, and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.errors import MoverError
from kvxferd.ids import AgentName, MoverId
from kvxferd.wire.mover import FromMover


@dataclass(frozen=True, slots=True)
class StartForkserver:
    """Start a forkserver. Its first message or `ForkserverNotStarted` follows."""


@dataclass(frozen=True, slots=True)
class ShutDownForkserver:
    """Make the forkserver end its movers and itself. `ForkserverExited` follows."""


@dataclass(frozen=True, slots=True)
class KillForkserver:
    """Kill the forkserver's process, also where it is stopped. `ForkserverExited` follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class RequestFork:
    """Request a mover of the forkserver. `Forked`, `ForkFailed` or `ForkNotSent` follows."""

    mover: MoverId
    agent: AgentName


@dataclass(frozen=True, slots=True)
class AssignMover:
    """Give the mover to whoever made the request."""

    request: int
    mover: MoverId


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """Refuse the request."""

    request: int
    error: MoverError


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Kill the mover's process, also where it is stopped. `MoverExited` follows. `reason`: "" if wanted."""

    mover: MoverId
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DiscardMover:
    """Close the daemon's end of a mover that has no process. No event follows."""

    mover: MoverId


@dataclass(frozen=True, slots=True)
class ReportMessage:
    """Report a message of an assigned mover to the core."""

    mover: MoverId
    message: FromMover


@dataclass(frozen=True, slots=True)
class ReportExit:
    """Report to the core that an assigned mover is gone."""

    mover: MoverId


@dataclass(frozen=True, slots=True)
class ReportForkserverDeath:
    """The forkserver died, and nobody asked for that."""


@dataclass(frozen=True, slots=True)
class ReportEarlyDeath:
    """A mover died that no rank had. `was_starting`: its agent was not made yet."""

    mover: MoverId
    was_starting: bool


@dataclass(frozen=True, slots=True)
class ReportStopped:
    """Neither a mover nor the forkserver is left."""


PoolEffect = (
    StartForkserver
    | ShutDownForkserver
    | KillForkserver
    | RequestFork
    | AssignMover
    | RefuseRequest
    | KillProcess
    | DiscardMover
    | ReportMessage
    | ReportExit
    | ReportForkserverDeath
    | ReportEarlyDeath
    | ReportStopped
)
