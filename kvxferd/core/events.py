"""What happens to a node. The shells make these; the core never asks for anything."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.core.layout_cache import CheckedLayout
from kvxferd.core.rank_holders import SavedRank
from kvxferd.core.ucx_log import TransportsUsed
from kvxferd.ids import AgentName, Endpoint, EngineId, EngineKey, MoverId, PullId, SessionId, TransferId
from kvxferd.wire.common import Refusal
from kvxferd.wire.mover import FromMover
from kvxferd.wire.peer import PeerMessage
from kvxferd.wire.worker import ClientMessage


@dataclass(frozen=True, slots=True)
class WorkerConnected:
    """Somebody connected to the worker socket and may be there."""

    session: SessionId
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """A frame of a session.

    `problem` is what the shell found wrong with the frame's descriptors. `fence_word` is what
    the session's fence page held in a `Publish`'s slot when the frame was read.
    """

    session: SessionId
    message: ClientMessage
    problem: Refusal | None = None
    fence_word: bytes = b""
    awaits_fds: bool = False  # a `Register` that announced more than came


@dataclass(frozen=True, slots=True)
class FdsArrived:
    """Those that the session's `Register` announced are there. `problem`: what is wrong with them."""

    session: SessionId
    problem: Refusal | None = None


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """The session's socket is closed: its registration is over."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class MoverAssigned:
    """A mover for the session's rank, its agent made."""

    session: SessionId
    mover: MoverId
    agent: AgentName
    library: str
    resident: bool = False


@dataclass(frozen=True, slots=True)
class MoverUnavailable:
    """No mover can be had for the session's rank."""

    session: SessionId
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class MoverMessage:
    """A message of a mover."""

    mover: MoverId
    message: FromMover


@dataclass(frozen=True, slots=True)
class TransportsSeen:
    """A mover has connected in a new way: to itself, on its node or over the network."""

    mover: MoverId
    lanes: TransportsUsed


@dataclass(frozen=True, slots=True)
class MoverDied:
    """The mover's process is gone, or a resident one's agent: nothing that it posted can write any more."""

    mover: MoverId


@dataclass(frozen=True, slots=True)
class PidfdNotSent:
    """The frame to the session that was to carry this mover's pidfd was not sent: no descriptor is left."""

    session: SessionId
    mover: MoverId


@dataclass(frozen=True, slots=True)
class PeerReply:
    """A message on the connection that this node opened to a peer."""

    endpoint: Endpoint
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """A message on a connection that somebody opened to this node. `route` leads back to them.

    `key` is the public CURVE key that they proved to hold, in hex; empty without CURVE.
    """

    route: bytes
    message: PeerMessage
    key: str = ""


@dataclass(frozen=True, slots=True)
class LayoutsChecked:
    """Layouts in a peer's message that comes next have been checked, off the loop."""

    layouts: tuple[CheckedLayout, ...]


@dataclass(frozen=True, slots=True)
class PeerUnreachable:
    """No connection to the peer can be made; the reason is for people."""

    endpoint: Endpoint
    reason: str


@dataclass(frozen=True, slots=True)
class OwnershipsLoaded:
    """Whose engine ids and ranks were, by an earlier daemon's list. Before the first session."""

    listed: tuple[tuple[EngineId, int], ...]
    ranks: tuple[SavedRank, ...] = ()


@dataclass(frozen=True, slots=True)
class DisownRequested:
    """An operator wants an engine id to be nobody's."""

    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Refuse what is new, finish what runs."""


@dataclass(frozen=True, slots=True)
class AllowlistChanged:
    """The operator has changed the allow-lists of peers."""

    allowlist: PeerAllowlist


@dataclass(frozen=True, slots=True)
class PeerDropRequested:
    """The operator wants a peer forgotten."""

    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class TransferCancelRequested:
    """The operator wants a transfer that was published here released."""

    engine: EngineKey
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class PullCancelRequested:
    """The operator wants a pull of a local rank ended."""

    pull: PullId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    WorkerConnected
    | WorkerMessage
    | FdsArrived
    | WorkerDisconnected
    | MoverAssigned
    | MoverUnavailable
    | MoverMessage
    | TransportsSeen
    | MoverDied
    | PidfdNotSent
    | PeerReply
    | PeerRequest
    | LayoutsChecked
    | PeerUnreachable
    | OwnershipsLoaded
    | DisownRequested
    | DrainRequested
    | AllowlistChanged
    | PeerDropRequested
    | TransferCancelRequested
    | PullCancelRequested
    | Tick
)
