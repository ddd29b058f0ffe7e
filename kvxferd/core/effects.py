"""The effects of a node's decisions. The shells carry them out in order, and decide nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.ids import AgentName, Endpoint, MoverId, SessionId
from kvxferd.plan import PlanJob
from kvxferd.records import Record, ServedRecord
from kvxferd.wire.common import Message

NO_USER = -1  # no user: the node acts for itself


@dataclass(frozen=True, slots=True)
class SendToWorker:
    """Send a frame to a session, with its fence page or with the pidfd of a mover.

    Where the pidfd cannot be attached the frame is not sent, and `PidfdNotSent` follows. Where the page
    cannot be attached the session is closed.
    """

    session: SessionId
    message: Message
    pidfd_of: MoverId | None = None
    with_fence_page: bool = False


@dataclass(frozen=True, slots=True)
class CloseWorkerConnection:
    """Send what is queued, then close the session's socket. `WorkerDisconnected` follows."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class CommitRegionFds:
    """Make the descriptors of the session's last `Register` or `Resume` its rank's memory."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class CreateFencePage:
    """Create the session's fence page if it has none. A failure ends the session."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class OverwriteFenceWord:
    """Overwrite a fence word, before any later effect."""

    session: SessionId
    slot: int


@dataclass(frozen=True, slots=True)
class StartForkserver:
    """Start another forkserver. `ForkserverReady`, `LibraryUnavailable` or `ForkserverExited` follows."""


@dataclass(frozen=True, slots=True)
class ForkMover:
    """Request a mover of the forkserver. Its `MoverUp`, `MoverNotStarted` or `MoverDied` follows."""

    mover: MoverId
    agent: AgentName


@dataclass(frozen=True, slots=True)
class AcceptResidentMover:
    """Take the resident mover at the other end of the socket that the session's worker sent last.

    Its `MoverUp`, `MoverNotStarted` or `MoverDied` follows.
    """

    mover: MoverId
    session: SessionId


@dataclass(frozen=True, slots=True)
class KillMover:
    """Kill the mover's process, or request a resident mover to end. `MoverDied` follows."""

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
    """Send on this node's connection to a peer. Open the connection if there is none."""

    endpoint: Endpoint
    message: Message
    uid: int = NO_USER  # for whom a host name is looked up first


@dataclass(frozen=True, slots=True)
class ReplyToPeer:
    """Send on a connection that a peer opened to this node.

    Most are replies. `RankPollingRequest` and `TransferReleased` are requests of a home to its member.
    """

    route: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class ClosePeerConnection:
    """Close the connection to a peer."""

    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class SaveOwnerships:
    """The owners of ranks have changed: write `Node.owners.saved_ranks()` to disk soon."""


@dataclass(frozen=True, slots=True)
class EmitRecord:
    """Stamp, log, count and keep a record of something that ended, `ended_ago_s` before this effect."""

    record: Record
    ended_ago_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CountServed:
    """Count what a reading rank has acknowledged."""

    served: ServedRecord


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Make a plan beside the loop, fairly between users, and feed `PlanMade`: it takes up to two seconds."""

    job: PlanJob
    uid: int


Effect = (
    SendToWorker
    | CloseWorkerConnection
    | CommitRegionFds
    | CreateFencePage
    | OverwriteFenceWord
    | StartForkserver
    | ForkMover
    | AcceptResidentMover
    | KillMover
    | SendToMover
    | BindMover
    | ShareFencePage
    | SendToPeer
    | ReplyToPeer
    | ClosePeerConnection
    | SaveOwnerships
    | EmitRecord
    | CountServed
    | MakePlan
)
