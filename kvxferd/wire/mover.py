"""Messages between the daemon and a mover, over a socketpair, in the order sent.

`LoadPlan`, `LoadRemote` and `DropRemote` have no reply: their errors are the outcome of the pull that
needs them. When either end closes, a child mover exits.

A resident mover has the other end from its worker, and cannot be killed. The daemon shuts down its sending
half; the mover reads the end, destroys its agent, and only then closes its own end. That means what the
death of a child means: nothing that it posted writes any more.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from kvxferd.errors import Code
from kvxferd.ids import AgentName, Digest, PullId, Rank, SessionId, Ticket
from kvxferd.layout import BlocksByGroup
from kvxferd.wire.bounds import METADATA, NAME, REASON, REGIONS
from kvxferd.wire.common import BlockIds, FdBatch, MeasuredPlacement, Message, RegionAddress
from kvxferd.wire.worker import RegionExport


class ReadWay(StrEnum):
    """How a mover reads what a plan asks for: the setting `mover.read`.

    Direct: one descriptor a run. Covering: longer stretches into a chunk, and a scatter from there. Auto: for
    each pull and remote rank the way that is predicted to take less.
    """

    AUTO = "auto"
    DIRECT = "direct"
    COVERING = "covering"


class DevicePlacement(StrEnum):
    """How a mover reaches GPU memory that the transfer library can read: the setting `mover.placement`."""

    AUTO = "auto"  # directly, where that is not over TCP
    DIRECT = "direct"
    STAGED = "staged"  # by copies


# --- daemon to mover


class Bind(Message, frozen=True):
    """Map and register a rank's regions. Carries the regions' descriptors, then the worker's pidfd.

    The mover exits when the worker dies. Before the pidfd comes the socket of the worker's `Register`. The
    reply is `Bound` or `BindRefused`.
    """

    regions: tuple[RegionExport, ...]
    read_way: ReadWay = ReadWay.DIRECT  # how the rank's pulls read
    device_placement: DevicePlacement = DevicePlacement.AUTO


class MapFence(Message, frozen=True):
    """Map and register a session's fence page. Carries its descriptor.

    The reply is `FenceMapped` or `FenceRefused`.
    """

    session: SessionId
    size_bytes: int


class UnmapFence(Message, frozen=True):
    """Unmap the fence page of a session that has ended."""

    session: SessionId


class SetPolling(Message, frozen=True):
    """Poll while `on`: a reader reads from this mover. The reply is `Polling`, once the mover polls."""

    on: bool
    token: int = 0


class LoadPlan(Message, frozen=True):
    """Keep a plan that later pulls name by its digest."""

    digest: Digest
    encoded: bytes  # kvxferd.plan.encode_plan


class DropPlan(Message, frozen=True):
    """Forget a plan. Pulls that were started by it before are read by it."""

    digest: Digest


class LoadRemote(Message, frozen=True):
    """Load a remote agent's metadata. Sent again when the same agent has more regions.

    `word` is an address in host memory that this makes readable: 16 bytes of it may be read, so
    that the agents are connected before a pull comes.
    """

    agent: AgentName
    metadata: bytes
    word: int = 0


class DropRemote(Message, frozen=True):
    """Drop a remote agent that is gone, with everything prepared for it."""

    agent: AgentName


class SourceRank(msgspec.Struct, frozen=True, array_like=True):
    """One remote rank that a pull reads from."""

    rank: Rank
    agent: AgentName
    regions: tuple[RegionAddress, ...]


class FenceLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the transfer's fence word lies, and its value until the blocks are released."""

    agent: AgentName
    address: int
    word: bytes


class PiecesRead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What earlier pieces of a progressive pull read: the mover's `Delivered` counts it in."""

    bytes: int
    runs: int
    wire_s: float


class StartPull(Message, frozen=True):
    """Expand the plan over these blocks, read, then read the fence word. The reply is `PullDone`.

    Parts of long lists came before: `local`'s under `stream`, `remote`'s under `stream + 1`.
    """

    pull: PullId
    plan: Digest
    sources: tuple[SourceRank, ...]
    local: BlocksByGroup
    remote: BlocksByGroup
    num_tokens: int
    fence: FenceLocation
    stream: int = 0
    ticket: Ticket | None = None  # the worker's number of the pull; None: the mover sends it no Delivered
    before: PiecesRead | None = None  # of the last piece of a progressive pull


class AbortPull(Message, frozen=True):
    """Post nothing more for the pull; `PullDone` follows when all that was posted is terminal."""

    pull: PullId


class ReportPull(Message, frozen=True):
    """Report what the pull waits for: its deadline is near. The reply is `PullProgress`, unless it has ended.

    Sent to child movers alone.
    """

    pull: PullId


class ChunkMemoryGranted(Message, frozen=True):
    """The mover may hold so many chunks for covering reads, in all. Where it holds more, it gives them back.

    The reply to a `ChunkMemoryRequest` that wants more than the one before, and sent whenever it changes. The
    mover acknowledges it by a request that names no more as held. Only then does another follow.
    """

    num_chunks: int


# --- mover to daemon


class MoverUp(Message, frozen=True):
    """The mover has created its agent. The mover's first message."""

    agent: Annotated[AgentName, NAME]
    library: Annotated[str, NAME]  # "nixl 1.5.1", "rixl ...", "memory"
    pid: int


class Bound(Message, frozen=True):
    """The rank's regions are mapped and registered."""

    regions: Annotated[tuple[RegionAddress, ...], REGIONS]
    metadata: Annotated[bytes, METADATA]
    placement: MeasuredPlacement = MeasuredPlacement()


class BindRefused(Message, frozen=True):
    """The regions cannot be mapped or registered; nothing of them is mapped."""

    code: Code
    message: Annotated[str, REASON]


class ProbeResult(Message, frozen=True):
    """The result of the probe's read of the bound regions, after a `Bound` that did not wait for it."""

    placement: MeasuredPlacement


class FenceMapped(Message, frozen=True):
    """The session's fence page is readable through this mover's agent."""

    session: SessionId
    address: int
    metadata: Annotated[bytes, METADATA]


class FenceRefused(Message, frozen=True):
    """The session's fence page cannot be mapped or registered; nothing of it is mapped."""

    session: SessionId
    code: Code
    message: Annotated[str, REASON]


class Polling(Message, frozen=True):
    """The mover polls."""

    token: int


class PullOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """How a pull ended, and its times, as the mover measured them."""

    delivered: bool
    started: bool = True  # False: no handle was ever posted
    finished: bool = True  # every handle ever posted is terminal; False: in doubt, `PullQuiesced` follows
    quiesced_follows: bool = True  # False: it never will, only the mover's death ends the doubt
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
    sent_to_worker: bool = False  # the mover has sent Delivered to the worker itself
    # Of a mover that may read in other ways than directly. A resident one does not, and sends neither.
    covered_bytes: int = 0  # of `bytes`: by covering reads
    predicted_s: float = 0.0  # how long the reads were to take, 0 where there is no prediction


class PullDone(Message, frozen=True):
    """A pull ended. Exactly one for each `StartPull`."""

    pull: PullId
    outcome: PullOutcome


# A pull waits for all of an engine's ranks at most; the first few are named.
MAX_AWAITED = 8
MAX_TRANSPORTS = 64  # of one connection: UCX has 16 lanes at most


class PullProgress(Message, frozen=True):
    """What a pull waits for: reads from these agents, or where there are none, this mover itself."""

    pull: PullId
    phase: Annotated[str, NAME]  # among `core.snapshot.PHASES`
    agents: Annotated[tuple[Annotated[AgentName, NAME], ...], msgspec.Meta(max_length=MAX_AWAITED)] = ()


class PullQuiesced(Message, frozen=True):
    """A pull that ended in doubt: every handle posted for it is terminal now."""

    pull: PullId


class TransportsSeen(Message, frozen=True):
    """A child mover connected by transports that it had not used, as UCX's log names them. It is bound."""

    reach: Literal["itself", "node", "network"]
    transports: Annotated[tuple[Annotated[str, NAME], ...], msgspec.Meta(max_length=MAX_TRANSPORTS)]
    is_fully_parsed: bool


class ChunkMemoryRequest(Message, frozen=True):
    """How many chunks of `CHUNK_BYTES` for covering reads a child mover wants and holds; sent on a change.

    These are totals, so that a message that comes twice changes nothing. From a resident mover it is void.
    """

    num_wanted: int
    num_held: int = 0  # at most: what was granted, or what it still has over that
    num_lost: int = 0  # of what it has: something may write there until the mover dies


class MoverWorn(Message, frozen=True):
    """Something may write each of the mover's buffers until the mover dies: it can stage no read any more."""


class MoverLeaving(Message, frozen=True):
    """A resident mover ends and accepts nothing more. When the stream ends, its agent is gone."""

    code: Code
    message: Annotated[str, REASON]


ToMover = (
    FdBatch
    | Bind
    | MapFence
    | UnmapFence
    | SetPolling
    | LoadPlan
    | DropPlan
    | LoadRemote
    | DropRemote
    | StartPull
    | AbortPull
    | ReportPull
    | ChunkMemoryGranted
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
    | PullProgress
    | PullQuiesced
    | TransportsSeen
    | ChunkMemoryRequest
    | MoverWorn
    | MoverLeaving
)
