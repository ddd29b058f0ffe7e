"""The effects of a node's decisions. The shells carry them out in order, and decide nothing."""

from __future__ import annotations

import msgspec

from kvxferd.ids import AgentName, Endpoint, MoverId, SessionId
from kvxferd.plan import PlanJob
from kvxferd.records import Record, ServedRecord
from kvxferd.wire.common import Message
from kvxferd.wire.worker import Farewell

NO_USER = -1  # no user: the node acts for itself


class SendToWorker(msgspec.Struct, frozen=True):
    """Send a frame to a session, with its fence page or with the pidfd of a mover.

    Where the pidfd cannot be attached the frame is not sent, and `PidfdNotSent` follows. Where the page,
    which is made at its first use, cannot be attached the session is closed.
    """

    session: SessionId
    message: Message
    pidfd_of: MoverId | None = None
    with_fence_page: bool = False


class CloseWorkerConnection(msgspec.Struct, frozen=True):
    """Send what is queued and the farewell, then close the session's socket. `WorkerDisconnected` follows."""

    session: SessionId
    farewell: Farewell


class CommitRegionFds(msgspec.Struct, frozen=True):
    """Make the descriptors of the session's last `Register` or `Resume` its rank's memory."""

    session: SessionId


class OverwriteFenceWord(msgspec.Struct, frozen=True):
    """Overwrite a fence word, before any later effect."""

    session: SessionId
    slot: int


class StartForkserver(msgspec.Struct, frozen=True):
    """Start another forkserver. `ForkserverReady`, `LibraryUnavailable` or `ForkserverExited` follows."""


class ForkMover(msgspec.Struct, frozen=True):
    """Request a mover of the forkserver. Its `MoverUp`, `MoverNotStarted` or `MoverDied` follows."""

    mover: MoverId
    agent: AgentName


class AcceptResidentMover(msgspec.Struct, frozen=True):
    """Take the resident mover at the other end of the socket that the session's worker sent last.

    Its `MoverUp`, `MoverNotStarted` or `MoverDied` follows.
    """

    mover: MoverId
    session: SessionId


class KillMover(msgspec.Struct, frozen=True):
    """Kill the mover's process, or request a resident mover to end. `MoverDied` follows."""

    mover: MoverId


class SendToMover(msgspec.Struct, frozen=True):
    """Send a message to a mover."""

    mover: MoverId
    message: Message


class BindMover(msgspec.Struct, frozen=True):
    """Send a `Bind` with the descriptors of the session's regions and the worker's pidfd."""

    mover: MoverId
    session: SessionId
    message: Message


class ShareFencePage(msgspec.Struct, frozen=True):
    """Send a `MapFence` with the descriptor of the session's fence page."""

    mover: MoverId
    session: SessionId


class SendToPeer(msgspec.Struct, frozen=True):
    """Send on this node's connection to a peer. Open the connection if there is none."""

    endpoint: Endpoint
    message: Message
    uid: int = NO_USER  # for whom a host name is looked up first


class ReplyToPeer(msgspec.Struct, frozen=True):
    """Send on a connection that a peer opened to this node.

    Most are replies. `RankPollingRequest` and `TransferReleased` are requests of a home to its member.
    """

    route: bytes
    message: Message


class ClosePeerConnection(msgspec.Struct, frozen=True):
    """Close the connection to a peer."""

    endpoint: Endpoint


class SaveOwnerships(msgspec.Struct, frozen=True):
    """The owners of ranks have changed: write `Node.owners.saved_ranks()` to disk soon."""


class EmitRecord(msgspec.Struct, frozen=True):
    """Stamp, log, count and keep a record of something that ended, `ended_ago_s` before this effect."""

    record: Record
    ended_ago_s: float = 0.0


class CountServed(msgspec.Struct, frozen=True):
    """Count what a reading rank has acknowledged."""

    served: ServedRecord


class MakePlan(msgspec.Struct, frozen=True):
    """Make a plan beside the loop, fairly between users, and feed `PlanMade`: it takes up to two seconds."""

    job: PlanJob
    uid: int


Effect = (
    SendToWorker | CloseWorkerConnection | CommitRegionFds | OverwriteFenceWord
    | StartForkserver | ForkMover | AcceptResidentMover | KillMover | SendToMover | BindMover
    | ShareFencePage | SendToPeer | ReplyToPeer | ClosePeerConnection | SaveOwnerships | EmitRecord
    | CountServed | MakePlan
)  # fmt: skip
