"""Messages of the worker socket, between an engine's process and the daemon on its node."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import EngineId, Generation, Incarnation, RegionId, Ticket, TransferId
from kvxferd.layout import BlocksByGroup, EngineSpec, RankLayout
from kvxferd.wire.bounds import NAME, NUM_TOKENS, PIECES, REGIONS, TRACEPARENT
from kvxferd.wire.common import BlockIds, FdBatch, Message, RankIncarnations, TransferRef, Versions
from kvxferd.wire.limits import MAX_GROUPS_PER_REQUEST, MAX_RANKS

WORKER_VERSIONS = Versions(1, 1)

# A frame of 1 MiB has room for longer lists than these limits allow: 209,000 incarnations took 230 ms to
# decode, and 95,000 groups 68 ms.
LimitedBlocks = Annotated[BlocksByGroup, msgspec.Meta(max_length=MAX_GROUPS_PER_REQUEST)]
LimitedIncarnations = Annotated[RankIncarnations, msgspec.Meta(max_length=MAX_RANKS)]


class RegionExport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One region of a rank: inside descriptors that came along, or (`resident`) in the worker alone.

    `memfd`: in one descriptor. `vmm`: over physical allocations of a GPU, a descriptor each, from
    `fd_index` on; regions may share some. `resident`: at an address of the worker's process.
    """

    region: RegionId
    size_bytes: int
    fd_index: int = 0  # position among the registration's descriptors
    fd_offset: int = 0  # where the region starts in that descriptor
    kind: Annotated[str, NAME] = "memfd"
    device: Annotated[str, NAME] = ""  # vmm, resident: UUID of the GPU; "": host memory
    # vmm: the size of each allocation under the region, in order of address
    pieces: Annotated[tuple[int, ...], PIECES] = ()
    address: int = 0  # resident


# --- client to daemon


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """The first frame. Fields of a later version are ignored: the version is negotiated first."""

    versions: Versions
    client: str  # name and version, for logs


class Register(Message, frozen=True):
    """This connection is a rank, with memory. Carries the regions' descriptors, and last a socket.

    The rank's mover writes each `TicketDelivered` into the socket itself, a packet each, and the daemon does
    not send it. Only while the socket is full does the daemon send it.
    """

    request: int
    engine: EngineSpec
    layout: RankLayout
    regions: Annotated[tuple[RegionExport, ...], REGIONS]
    incarnation: Incarnation
    placement: Annotated[str, NAME] = "child"  # or "resident": the mover is a thread of this worker
    num_descriptors: int = 0  # of the regions in all, where more follow; 0: all are in this frame


class Attach(Message, frozen=True):
    """This connection publishes for an engine and has no memory of its own (a scheduler)."""

    request: int
    engine_id: EngineId
    generation: Generation


class Publish(Message, frozen=True):
    """A request's blocks may be read. The fence word is in the page before this is sent."""

    transfer_id: TransferId
    nonce: Annotated[str, NAME]
    blocks: LimitedBlocks
    num_tokens: int
    fence_slot: int
    # Of the ranks that were reported to the session when `publish` was called, not when this is sent.
    incarnations: LimitedIncarnations
    num_readers: int = 1  # consumer engines that must acknowledge
    lease_s: float = 0.0  # 0: the daemon's default
    stream: int = 0
    # Of the request's trace, as in `TransferRef`. One that is not valid is ignored.
    traceparent: Annotated[str, TRACEPARENT] = ""
    # Tokens [0, ready_tokens) are written, and `Ready` adds the rest. -1: all.
    ready_tokens: int = -1


class Ready(Message, frozen=True):
    """This rank has written the transfer's blocks, or so many tokens of them.

    The session that published may add blocks: `ids` follow those that were sent before. It may send them
    without a report: a scheduler always does.
    """

    transfer_id: Annotated[TransferId, NAME]
    # Of the mapping that was written; "": there is no report.
    incarnation: Annotated[Incarnation, NAME] = Incarnation("")
    ready_tokens: Annotated[int, NUM_TOKENS] = -1  # it has written tokens [0, ready_tokens); -1: all
    blocks: LimitedBlocks = msgspec.field(default_factory=dict)
    stream: int = 0


class Unpublish(Message, frozen=True):
    """The publisher withdraws a transfer. It may use the blocks again at `Released`."""

    transfer_id: TransferId


class Prepare(Message, frozen=True):
    """A pull of this reference will follow: do the handshake, plan and connect now, and hold its transfer."""

    ref: TransferRef
    progressive: bool = False  # as the pull will be


class PullRequest(Message, frozen=True):
    """Read a transfer into this rank's blocks."""

    ticket: Ticket
    ref: TransferRef
    blocks: LimitedBlocks
    num_tokens: int
    deadline_s: float  # from now; never a time of day. Of a progressive pull, from when all is ready
    stream: int = 0
    # Read what is ready, then what becomes ready, also of a transfer that comes later.
    progressive: bool = False


class Cancel(Message, frozen=True):
    """Stop a pull. Its terminal event still comes."""

    ticket: Ticket


class DeliveredByMover(Message, frozen=True):
    """The latest pulls that a mover has reported as delivered. Sent before `Suspend` and before the end.

    The mover's own report may still be on its way to the daemon, or be lost by the mover's end. By this
    message the source still receives the acknowledgement.
    """

    tickets: tuple[Ticket, ...]


class PullsResumed(Message, frozen=True):
    """The reply to `PullsInterrupted`: the pulls to read again, and those that the mover delivered."""

    number: int  # of the interruption
    tickets: tuple[Ticket, ...]
    arrived: tuple[Ticket, ...] = ()


class Abandon(Message, frozen=True):
    """This rank's engine will not read the transfer any more, on any rank."""

    ref: TransferRef


class Suspend(Message, frozen=True):
    """Unmap this rank's memory, which the engine frees only after `Suspended`."""


class Resume(Message, frozen=True):
    """The rank's memory is back, in a new mapping. Carries the regions' descriptors."""

    request: int
    regions: Annotated[tuple[RegionExport, ...], REGIONS]
    incarnation: Incarnation
    placement: Annotated[str, NAME] = "child"


class NewMover(Message, frozen=True):
    """Another resident mover, after `MoverRequest`. Carries one descriptor: its socket."""


class MoverAcknowledged(Message, frozen=True):
    """The client watches the pidfd of `MoverOffered`. The mover may have the memory."""

    number: int


# --- daemon to client


class Welcome(Message, frozen=True):
    """The negotiated version, and the boot id of the daemon."""

    version: int
    boot_id: str
    lease_s: float  # of a publish that names none
    max_hold_s: float  # for which a progressive pull waits until its transfer is ready


class Registered(Message, frozen=True):
    """The rank is readable. It is also the reply to `Attach` and to `Resume`.

    The reply to `Register` and to `Attach` carries one descriptor: the session's fence page.
    """

    request: int
    endpoint: str  # of the engine's home, for references


class FdsRequest(Message, frozen=True):
    """Send the rest of the descriptors: the `Register` that announced them is accepted so far."""

    request: int


class EngineRanks(Message, frozen=True):
    """The new ranks, or new incarnations of ranks, of the session's engine.

    Sent before `registered`, and whenever a rank registers or is mapped again. A rank that leaves is not
    reported: transfers of its memory stay bound to that memory.
    """

    ranks: RankIncarnations


class MoverChanged(Message, frozen=True):
    """The rank's mover was replaced."""


class MoverOffered(Message, frozen=True):
    """A mover for the rank. Carries its pidfd, which is readable once it is dead.

    The daemon sends the mover neither memory nor pulls before `MoverAcknowledged` of this number.
    """

    number: int  # of the session's offers, from 1 on


class MoverRequest(Message, frozen=True):
    """The rank's resident mover has ended or is ending: start another and send `NewMover`."""


class Refused(Message, frozen=True):
    """A `Register`, `Attach` or `Resume` is refused; the connection stays open."""

    request: int
    code: Code
    message: str
    retry_after_s: float = 0.0  # with the code `busy`


class TicketDelivered(Message, frozen=True):
    """The pull's blocks hold exactly the published bytes."""

    ticket: Ticket
    bytes: int
    runs: int
    wire_s: float


class TicketFailed(Message, frozen=True):
    """The pull ended without its bytes. Blocks that are not safe stay quarantined until `TicketQuiesced`."""

    ticket: Ticket
    code: Code
    message: str
    safe_to_reuse: bool
    retry_after_s: float = 0.0  # with the codes `busy` and `source-stalled`


class TicketQuiesced(Message, frozen=True):
    """Nothing writes the failed pull's blocks any more."""

    ticket: Ticket


class PullsInterrupted(Message, frozen=True):
    """The mover of these pulls is dead. It may have sent Delivered to the worker alone.

    None is read again before `PullsResumed` names it: the engine may use delivered blocks already.
    """

    number: int  # of this interruption: the next mover may die before this one is answered
    tickets: tuple[Ticket, ...]


class Released(Message, frozen=True):
    """The transfer is over: the engine may use its blocks on this rank again.

    Sent once to the publisher and each rank. A rank on another node than the publisher may get it once more
    from a daemon that was started there since.

    Attributes:
        transfer_id: as given to `publish`, by this session or by another one of the engine.
        why: `completed`, `lease-expired`, `unpublished`, `abandoned`, `rank-lost`, or another code.
    """

    transfer_id: TransferId
    why: Code


class PublishRefused(Message, frozen=True):
    """The publish is refused: the transfer was never readable, and the engine may use the blocks again.

    Attributes:
        transfer_id: as given to `publish`.
        code: why, for machines.
        message: why, for people.
        retry_after_s: with the code `busy`, the seconds after which publishing again may help; else 0.
    """

    transfer_id: TransferId
    code: Code
    message: str
    retry_after_s: float = 0.0


class Suspended(Message, frozen=True):
    """No process but the worker maps the rank's memory: it may be freed now."""


class Farewell(Message, frozen=True):
    """The daemon's last frame: it closes this connection, and why."""

    code: Code
    message: str


ClientMessage = (
    Hello
    | FdBatch
    | Register
    | Attach
    | BlockIds
    | Publish
    | Ready
    | Unpublish
    | Prepare
    | PullRequest
    | Cancel
    | DeliveredByMover
    | PullsResumed
    | Abandon
    | Suspend
    | Resume
    | NewMover
    | MoverAcknowledged
)
DaemonMessage = (
    Welcome
    | Registered
    | FdsRequest
    | EngineRanks
    | MoverChanged
    | MoverOffered
    | MoverRequest
    | Refused
    | TicketDelivered
    | TicketFailed
    | TicketQuiesced
    | PullsInterrupted
    | Released
    | PublishRefused
    | Suspended
    | Farewell
)


def refusal_of_request(
    message: Register | Attach | Resume | Publish | PullRequest, error: KvxferdError
) -> Refused | PublishRefused | TicketFailed:
    """Return the reply that refuses a request for the error. Nothing has been read or kept of it."""
    code, text, retry_after_s = error.code, error.message, error.retry_after_s
    match message:
        case Publish():
            return PublishRefused(message.transfer_id, code, text, retry_after_s)
        case PullRequest():
            return TicketFailed(message.ticket, code, text, safe_to_reuse=True, retry_after_s=retry_after_s)
        case _:
            return Refused(message.request, code, text, retry_after_s)
