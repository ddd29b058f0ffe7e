"""Messages between the daemon and a mover, over a socketpair. They travel in the order sent.

`LoadPlan`, `LoadRemote` and `DropRemote` are not answered: what went wrong with them is the
outcome of the pull that needs them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxferd.errors import Code
from kvxferd.ids import AgentName, Digest, GroupName, PullId, Rank, SessionId, Ticket
from kvxferd.layout import PackedBlocks
from kvxferd.wire.bounds import METADATA, NAME, REASON, REGIONS
from kvxferd.wire.common import BlockIds, FdBatch, Message, Placement, RegionAddress
from kvxferd.wire.worker import RegionExport

# --- daemon to mover


class Bind(Message, frozen=True, tag="bind"):
    """Map and register a rank's regions. Carries the regions' descriptors, then the worker's pidfd.

    The mover exits when the worker dies. With `notices`, the socket of the worker's `Hello` comes
    before the pidfd. Answered by `Bound` or `BindRefused`.
    """

    regions: tuple[RegionExport, ...]
    notices: bool = False


class MapFence(Message, frozen=True, tag="map-fence"):
    """Map and register a session's fence page. Carries its descriptor.

    Answered by `FenceMapped` or `FenceRefused`.
    """

    session: SessionId
    size_bytes: int


class UnmapFence(Message, frozen=True, tag="unmap-fence"):
    """The session is gone."""

    session: SessionId


class SetPolling(Message, frozen=True, tag="attend"):
    """Poll while `on`: somebody reads from this mover. Answered by `Attending` once it polls."""

    on: bool
    token: int = 0


class LoadPlan(Message, frozen=True, tag="load-plan"):
    """A plan that pulls will name by digest."""

    digest: Digest
    encoded: bytes  # kvxferd.plan.encode_plan


class LoadRemote(Message, frozen=True, tag="load-remote"):
    """Load a remote agent's metadata (again: more regions of the same agent).

    `word` is an address in host memory that this makes readable: 16 bytes of it may be read, so
    that the agents are connected before a pull comes.
    """

    agent: AgentName
    metadata: bytes
    word: int = 0


class DropRemote(Message, frozen=True, tag="drop-remote"):
    """The remote agent is gone; everything prepared for it goes too."""

    agent: AgentName


class SourceRank(msgspec.Struct, frozen=True, array_like=True):
    """One remote rank that a pull reads."""

    rank: Rank
    agent: AgentName
    regions: tuple[RegionAddress, ...]


class FenceLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the transfer's fence word lies, and what it holds while the blocks are held."""

    agent: AgentName
    address: int
    word: bytes


class StartPull(Message, frozen=True, tag="start-pull"):
    """Expand the plan over these blocks, read, then read the fence word. Answered by `PullDone`.

    Parts of long lists came before: `local`'s under `stream`, `remote`'s under `stream + 1`.
    """

    pull: PullId
    plan: Digest
    sources: tuple[SourceRank, ...]
    local: dict[GroupName, PackedBlocks]
    remote: dict[GroupName, PackedBlocks]
    num_tokens: int
    fence: FenceLocation
    stream: int = 0
    ticket: Ticket | None = None  # by which the worker knows the pull; None: it is not told by the mover


class AbortPull(Message, frozen=True, tag="abort-pull"):
    """Post nothing more for the pull; `PullDone` follows when all that was posted is terminal."""

    pull: PullId


class DisconnectJudged(Message, frozen=True, tag="disconnect-judged"):
    """Answers `DisconnectSeen`: whether nothing lands any more of what was read over that connection."""

    number: int
    over: bool


# --- mover to daemon


class MoverUp(Message, frozen=True, tag="up"):
    """The mover's agent is made. First message."""

    agent: Annotated[AgentName, NAME]
    library: Annotated[str, NAME]  # "nixl 1.5.1", "rixl ...", "memory"
    pid: int


class Bound(Message, frozen=True, tag="bound"):
    """The rank's regions are mapped and registered."""

    regions: Annotated[tuple[RegionAddress, ...], REGIONS]
    metadata: Annotated[bytes, METADATA]
    placement: Placement = Placement()


class BindRefused(Message, frozen=True, tag="bind-refused"):
    """The regions cannot be mapped or registered; nothing of them is mapped."""

    code: Code
    message: Annotated[str, REASON]


class ProbeResult(Message, frozen=True, tag="proved"):
    """What a read of the bound regions showed. Follows a `Bound` that did not wait for it."""

    placement: Placement


class FenceMapped(Message, frozen=True, tag="fence-mapped"):
    """The session's fence page is readable through this mover's agent."""

    session: SessionId
    address: int
    metadata: Annotated[bytes, METADATA]


class FenceRefused(Message, frozen=True, tag="fence-refused"):
    """The session's fence page cannot be mapped or registered; nothing of it is mapped."""

    session: SessionId
    code: Code
    message: Annotated[str, REASON]


class Polling(Message, frozen=True, tag="attending"):
    """The mover polls."""

    token: int


class PullOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What a mover knows of a pull that has ended for it."""

    delivered: bool
    started: bool = True  # False: no handle was ever posted; the mover's word
    finished: bool = True  # every handle ever posted is terminal; False: in doubt, `PullQuiet` follows
    quiet_follows: bool = True  # False: it never will, only the mover's death ends the doubt
    code: Code | None = None
    message: Annotated[str, REASON] = ""
    agent: Annotated[AgentName, NAME] | None = None  # the remote agent that failed
    bytes: int = 0
    runs: int = 0
    queue_s: float = 0.0
    expand_s: float = 0.0
    post_s: float = 0.0  # time inside the transport's post call
    wire_s: float = 0.0  # first post to the last data read terminal
    fence_s: float = 0.0
    told: bool = False  # the worker has been told Delivered by the mover itself


class PullDone(Message, frozen=True, tag="pull-done"):
    """A pull ended. Exactly one for each `StartPull`."""

    pull: PullId
    outcome: PullOutcome


class PullQuiesced(Message, frozen=True, tag="pull-quiet"):
    """A pull that ended in doubt: every handle posted for it is terminal now."""

    pull: PullId


class DisconnectSeen(Message, frozen=True, tag="disconnect-seen"):
    """A connection was lost under a read. Whether that read is over depends on the transports."""

    number: int


class MoverLeaving(Message, frozen=True, tag="leaving"):
    """A resident mover ends by itself and takes nothing more. When the stream ends, its agent is gone."""

    code: Code
    message: Annotated[str, REASON]


ToMover = (
    FdBatch
    | Bind
    | MapFence
    | UnmapFence
    | SetPolling
    | LoadPlan
    | LoadRemote
    | DropRemote
    | StartPull
    | AbortPull
    | DisconnectJudged
    | BlockIds
)
FromMover = (
    MoverUp
    | Bound
    | BindRefused
    | ProbeResult
    | FenceMapped
    | FenceRefused
    | Polling
    | PullDone
    | PullQuiesced
    | DisconnectSeen
    | MoverLeaving
)
