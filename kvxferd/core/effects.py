"""What a node wants done. The shells do it, in order, and decide nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.core.snapshot import Record
from kvxferd.ids import Endpoint, MoverId, SessionId
from kvxferd.wire.common import Message

NO_USER = -1  # no user: this node on its own behalf


@dataclass(frozen=True, slots=True)
class SendToWorker:
    """Send a frame to a session. `with_fence`: attach its fence page. `pidfd_of`: attach that mover's pidfd.

    Where a pidfd cannot be attached the frame is not sent, and `PidfdNotSent` follows. Where a page
    cannot, the session is closed.
    """

    session: SessionId
    message: Message
    pidfd_of: MoverId | None = None
    with_fence_page: bool = False


@dataclass(frozen=True, slots=True)
class CloseWorkerConnection:
    """Send what is queued, then close the session's socket. `WorkerClosed` follows."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class CommitRegionFds:
    """The descriptors of the session's last `Register` or `Resume` are its rank's memory now."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class CreateFencePage:
    """Make the session's fence page, where it has none; one that cannot be made ends the session."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class OverwriteFenceWord:
    """Overwrite a fence word. Done at once, before any later effect."""

    session: SessionId
    slot: int


@dataclass(frozen=True, slots=True)
class RequestMover:
    """Find a mover for the session's rank: `MoverTaken` or `MoverUnavailable` follows.

    `resident`: it is at the other end of the socket that came last.
    """

    session: SessionId
    resident: bool = False


@dataclass(frozen=True, slots=True)
class KillMover:
    """Kill the mover's process, or tell a resident mover to end. `MoverDied` follows."""

    mover: MoverId


@dataclass(frozen=True, slots=True)
class SendToMover:
    """Send a message to a mover."""

    mover: MoverId
    message: Message


@dataclass(frozen=True, slots=True)
class BindMover:
    """Send a `Bind` with the descriptors of the session's regions and the worker's pidfd."""

    mover: MoverId
    session: SessionId
    message: Message


@dataclass(frozen=True, slots=True)
class ShareFencePage:
    """Send a `MapFence` with the descriptor of the session's fence page."""

    mover: MoverId
    session: SessionId


@dataclass(frozen=True, slots=True)
class SendToPeer:
    """Send on the connection to a peer, opening it where there is none."""

    endpoint: Endpoint
    message: Message
    uid: int = NO_USER  # for whom a host name is looked up first


@dataclass(frozen=True, slots=True)
class ReplyToPeer:
    """Send back to whoever opened a connection to this node."""

    route: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class ClosePeerConnection:
    """Close the connection to a peer."""

    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class SaveOwnerships:
    """Whose engine ids are has changed: keep `Node.ownerships.listed`, soon."""


@dataclass(frozen=True, slots=True)
class EmitRecord:
    """Something ended that operators count and follow."""

    record: Record


Effect = (
    SendToWorker
    | CloseWorkerConnection
    | CommitRegionFds
    | CreateFencePage
    | OverwriteFenceWord
    | RequestMover
    | KillMover
    | SendToMover
    | BindMover
    | ShareFencePage
    | SendToPeer
    | ReplyToPeer
    | ClosePeerConnection
    | SaveOwnerships
    | EmitRecord
)
