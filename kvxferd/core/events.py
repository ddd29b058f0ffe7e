"""What happens to a node. The shells make the events and feed them to `Node.feed`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.errors import KvxferdError
from kvxferd.ids import (
    Digest,
    Endpoint,
    EngineId,
    EngineKey,
    Generation,
    MoverId,
    PullId,
    SessionId,
    TransferId,
)
from kvxferd.layout import RankLayout
from kvxferd.plan import PlanJob, PlannedReads
from kvxferd.wire.common import Refusal
from kvxferd.wire.mover import FromMover
from kvxferd.wire.peer import PeerMessage
from kvxferd.wire.worker import ClientMessage

SavedOwner = Annotated[str, Meta(pattern=r"^(uid:\d{1,10}$|key:|secret:)")]
# Engine, generation, pipeline and tensor rank, and owner, as the shell writes them to disk.
SavedRank = tuple[EngineId, Generation, int, int, SavedOwner]


class WorkerConnected(msgspec.Struct, frozen=True):
    """A process that is admitted connected to the worker socket."""

    session: SessionId
    pid: int
    uid: int


class WorkerMessage(msgspec.Struct, frozen=True):
    """A session sent a frame.

    `problem` is the shell's refusal of the frame's descriptors. `fence_word` is the content of a `Publish`'s
    slot in the session's fence page when the frame was read.
    """

    session: SessionId
    message: ClientMessage
    problem: Refusal | None = None
    fence_word: bytes = b""
    awaits_fds: bool = False  # a `Register` that announced more descriptors than arrived


class FdsArrived(msgspec.Struct, frozen=True):
    """The descriptors that the session's `Register` announced arrived. `problem`: why they cannot be used."""

    session: SessionId
    problem: Refusal | None = None


class WorkerDisconnected(msgspec.Struct, frozen=True):
    """The session's socket closed, which ends its registration."""

    session: SessionId


class ForkserverReady(msgspec.Struct, frozen=True):
    """The forkserver has imported the transfer library, and forks movers from now on."""

    library: str


class LibraryUnavailable(msgspec.Struct, frozen=True):
    """No transfer library works, so there will be no movers."""

    reason: str


class ForkserverExited(msgspec.Struct, frozen=True):
    """The forkserver is gone, or was not started. The kernel kills its movers; each has its `MoverDied`."""

    reason: str


class MoverNotStarted(msgspec.Struct, frozen=True):
    """A mover was not forked, or not accepted."""

    mover: MoverId
    refusal: Refusal


class MoverMessage(msgspec.Struct, frozen=True):
    """A mover sent a message."""

    mover: MoverId
    message: FromMover


class MoverDied(msgspec.Struct, frozen=True):
    """A mover's process, or a resident mover's agent, is gone: no read that it posted can write any more."""

    mover: MoverId


class PidfdNotSent(msgspec.Struct, frozen=True):
    """A frame that was to carry this mover's pidfd was not sent: the daemon has no descriptor left."""

    session: SessionId
    mover: MoverId


class PeerReply(msgspec.Struct, frozen=True):
    """A message arrived on the connection that this node opened to a peer.

    Most are replies. `RankPollingRequest` and `TransferReleased` are requests of a home to its member.
    """

    endpoint: Endpoint
    message: PeerMessage


class PeerRequest(msgspec.Struct, frozen=True):
    """A message arrived on a connection that a peer opened to this node. Replies go to `route`.

    `key` is the public CURVE key that the peer proved to hold, in hex; empty without CURVE.
    """

    route: bytes
    message: PeerMessage
    key: str = ""


class CheckedLayout(msgspec.Struct, frozen=True):
    """A layout that `validate_layout` found valid in an engine of `num_layers` layers."""

    digest: Digest
    layout: RankLayout
    num_layers: int


class LayoutsChecked(msgspec.Struct, frozen=True):
    """A thread has checked the layouts of the peer's message that comes next."""

    layouts: tuple[CheckedLayout, ...]


class PlanMade(msgspec.Struct, frozen=True):
    """What became of a `MakePlan`: the plan, why there is none, or why it could not be made now."""

    job: PlanJob
    made: PlannedReads | KvxferdError


class PeerUnreachable(msgspec.Struct, frozen=True):
    """No connection to the peer can be made. `reason` is part of a message for people."""

    endpoint: Endpoint
    reason: str


class PeerConnected(msgspec.Struct, frozen=True):
    """A connection to the peer has been made."""

    endpoint: Endpoint


class PeerDisconnected(msgspec.Struct, frozen=True):
    """The connection to the peer ended, or could not be made; it is tried again. `reason` is for people."""

    endpoint: Endpoint
    reason: str


class OwnershipsLoaded(msgspec.Struct, frozen=True):
    """The owners of ranks that an earlier daemon saved. Fed before the first session."""

    ranks: tuple[SavedRank, ...]


class DisownRequested(msgspec.Struct, frozen=True):
    """The operator requests that an engine id has no owner."""

    engine_id: EngineId


class DrainRequested(msgspec.Struct, frozen=True):
    """The operator requests a drain: the node refuses new work and finishes what runs."""


class AllowlistChanged(msgspec.Struct, frozen=True):
    """The operator changed the allow-lists of peers."""

    allowlist: PeerAllowlist


class PeerDropRequested(msgspec.Struct, frozen=True):
    """The operator requests that a peer is forgotten."""

    endpoint: Endpoint


class TransferCancelRequested(msgspec.Struct, frozen=True):
    """The operator requests the release of a transfer that was published here."""

    engine: EngineKey
    transfer_id: TransferId


class PullCancelRequested(msgspec.Struct, frozen=True):
    """The operator requests the end of a local rank's pull."""

    pull: PullId


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: run the timers that are due."""


OperatorRequest = (
    DisownRequested | DrainRequested | AllowlistChanged | PeerDropRequested | TransferCancelRequested
    | PullCancelRequested
)  # fmt: skip

Event = (
    WorkerConnected | WorkerMessage | FdsArrived | WorkerDisconnected | ForkserverReady
    | LibraryUnavailable | ForkserverExited | MoverNotStarted | MoverMessage | MoverDied | PidfdNotSent
    | PeerReply | PeerRequest | LayoutsChecked | PlanMade | PeerUnreachable | PeerConnected
    | PeerDisconnected | OwnershipsLoaded | OperatorRequest | Tick
)  # fmt: skip
