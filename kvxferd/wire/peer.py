"""Messages between daemons, over ZMQ: from a DEALER of the requesting side to a ROUTER of the other.

Every request carries the number `request`, and its reply the same number. A request may be sent
again with the same number: a second reply changes nothing. Times are seconds from now, never
times of day.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import (
    AgentName,
    BootId,
    Endpoint,
    EngineId,
    Generation,
    GrantId,
    GroupName,
    Incarnation,
    Rank,
    TransferId,
)
from kvxferd.layout import PackedBlocks
from kvxferd.wire.bounds import ENDPOINT, NAME, NUM_TOKENS, REQUIRED_NAME
from kvxferd.wire.common import Message, RankManifest, TransferRef, Versions
from kvxferd.wire.limits import MAX_GRANTS_PER_RENEWAL, MAX_GROUPS_PER_REQUEST, MAX_RANKS

PEER_VERSIONS = Versions(1, 1)

# Lists have a limit besides that of their message: 16 MiB of the shortest names took 0.5 s to decode.
GrantIds = Annotated[tuple[Annotated[GrantId, NAME], ...], msgspec.Meta(max_length=MAX_GRANTS_PER_RENEWAL)]


class Consumer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reading rank, and the number of its engine's ranks that will acknowledge."""

    engine_id: Annotated[EngineId, NAME]
    generation: Annotated[Generation, NAME]
    rank: Rank
    num_ranks: int


# --- handshake


class PeerHello(Message, frozen=True, forbid_unknown_fields=False):
    """First message on a connection, and again after a silence. Fields of a later version are ignored."""

    request: int
    versions: Versions
    boot: Annotated[BootId, NAME]
    endpoint: Annotated[Endpoint, ENDPOINT]


class PeerWelcome(Message, frozen=True):
    """The negotiated version, and the boot id of the daemon that replies."""

    request: int
    version: int
    boot: Annotated[BootId, NAME]
    versions: Versions  # that this side supports
    software: Annotated[str, NAME] = ""  # kvxferd's version


class ManifestRequest(Message, frozen=True):
    """Request the ranks of one engine. The reply waits at most `wait_s` for an incomplete engine.

    It has a page of whole ranks, in their order. The reader asks again until it has `num_ranks`.
    """

    request: int
    engine_id: Annotated[EngineId, NAME]
    generation: Annotated[Generation, NAME]
    wait_s: float
    pp_aware: bool = True
    num_known: int = 0  # how many ranks came in earlier replies


class ManifestReply(Message, frozen=True):
    """The reply to `ManifestRequest`: one entry per `(pp_rank, tp_rank)`, of `num_ranks` in all."""

    request: int
    boot: Annotated[BootId, NAME]
    ranks: tuple[RankManifest, ...]
    num_ranks: int


# --- grants


class GrantRequest(Message, frozen=True):
    """Request that this consumer rank may read a transfer. `reads` names the agents that its plan reads.

    Another request with the same `grant` returns the same grant. The reply waits at most `wait_s` for an
    unknown transfer of a live generation (the reference may arrive before its publish), and for ranks
    that are not ready.

    With `after_tokens` the reader takes a transfer that is not whole: the reply comes when more than so many
    tokens are ready on every rank, or all are.

    The reply has a page of the ids of the groups that `from_tokens` names, each from the block on that holds
    that token; a state's last id. The reader asks for the same grant again until it has all that it reads.
    """

    request: int
    grant: Annotated[GrantId, NAME]
    ref: TransferRef
    consumer: Consumer
    reads: Annotated[tuple[tuple[Rank, Annotated[AgentName, NAME]], ...], msgspec.Meta(max_length=MAX_RANKS)]
    wait_s: float
    after_tokens: int = -1  # -1: all must be ready
    from_tokens: Annotated[
        dict[Annotated[GroupName, NAME], int], msgspec.Meta(max_length=MAX_GROUPS_PER_REQUEST)
    ] = msgspec.field(default_factory=dict)


class GrantReply(Message, frozen=True):
    """The reply to `GrantRequest`: the blocks stay while the grant is renewed, and the source movers poll."""

    request: int
    grant: Annotated[GrantId, NAME]
    blocks: Annotated[
        dict[Annotated[GroupName, NAME], PackedBlocks], msgspec.Meta(max_length=MAX_GROUPS_PER_REQUEST)
    ]
    num_tokens: int
    lease_s: float  # renew well within it
    fence_agent: AgentName
    fence_address: int
    fence_word: bytes
    fence_metadata: bytes
    has_more: bool = False  # of the ids that were asked for: the next page begins behind this one
    # Of `num_tokens`, to a request with `after_tokens`: the tokens that are ready. -1: all are.
    ready_tokens: int = -1


class RenewGrants(Message, frozen=True):
    """Renew all grants that one user holds at this peer, in one message."""

    request: int
    grants: GrantIds


class GrantsRenewed(Message, frozen=True):
    """The reply to `RenewGrants`: `ended` lists the grants that could not be renewed."""

    request: int
    ended: GrantIds


class ReleaseGrant(Message, frozen=True):
    """End the grant of a pull that failed or was cancelled. It does not count as an acknowledgement."""

    request: int
    grant: Annotated[GrantId, NAME]


class Acknowledge(Message, frozen=True):
    """This consumer rank has the bytes. Repeated until the reply comes; a duplicate counts once."""

    request: int
    grant: Annotated[GrantId, NAME]
    ref: TransferRef
    consumer: Consumer
    bytes: Annotated[int, msgspec.Meta(ge=0)]  # that the rank read


class AbandonTransfer(Message, frozen=True):
    """No rank of the consumer's engine will read the transfer any more."""

    request: int
    ref: TransferRef
    consumer: Consumer


class RequestDone(Message, frozen=True):
    """The reply to a returned grant, an acknowledgement, an abandonment or a member's report.

    `is_new`: of a `JoinRank`, the home did not know the rank, nor what it has reported. `polls`: of a
    `JoinRank`, the rank's mover goes on polling if it was requested to; else it need not.
    """

    request: int
    is_new: bool = False
    polls: bool = False


class StillWaiting(Message, frozen=True):
    """To a `ManifestRequest` or `GrantRequest` that was sent again: it is kept, and its reply comes later.

    `why`: what it waits for.
    """

    request: int
    why: str = ""


class PeerRefused(Message, frozen=True):
    """The request is refused; `code` tells whether another attempt can help."""

    request: int
    code: Code
    message: str
    retry_after_s: float = 0.0


# --- an engine that spans nodes: its members and their home


class JoinRank(Message, frozen=True):
    """Member to home: a rank that has registered with the member. Repeated as a heartbeat."""

    request: int
    boot: Annotated[BootId, NAME]
    manifest: RankManifest
    # The member's own, random. Without CURVE it proves the right to send messages about the rank.
    secret: Annotated[str, REQUIRED_NAME]


class LeaveRank(Message, frozen=True):
    """Member to home: the rank is gone, sleeps, or has no mover. Void once a later `JoinRank` is there."""

    request: int
    boot: Annotated[BootId, NAME]
    engine_id: Annotated[EngineId, NAME]
    generation: Annotated[Generation, NAME]
    rank: Rank
    secret: Annotated[str, REQUIRED_NAME]  # as in `JoinRank`


class RankReady(Message, frozen=True):
    """Member to home: a rank has finished writing a transfer's blocks."""

    request: int
    engine_id: Annotated[EngineId, NAME]
    generation: Annotated[Generation, NAME]
    rank: Rank
    transfer_id: Annotated[TransferId, NAME]
    incarnation: Annotated[Incarnation, REQUIRED_NAME]  # of the mapping that was written
    secret: Annotated[str, REQUIRED_NAME]  # as in `JoinRank`
    ready_tokens: Annotated[int, NUM_TOKENS] = -1  # tokens [0, ready_tokens) are written; -1: all


class RankPollingRequest(Message, frozen=True):
    """Home to member: the rank's mover must poll, until the reply to a later `JoinRank` says otherwise.

    The reply is `RequestDone`, once it polls.
    """

    request: int
    agent: Annotated[AgentName, NAME]


class TransferReleased(Message, frozen=True):
    """Home to member: send `Released` to the engine's ranks on this node. The reply is `RequestDone`."""

    request: int
    engine_id: Annotated[EngineId, NAME]
    generation: Annotated[Generation, NAME]
    transfer_id: Annotated[TransferId, NAME]
    why: Code


# All but those with manifests, which `outlines` decodes in steps.
PlainRequest = (
    PeerHello
    | ManifestRequest
    | GrantRequest
    | RenewGrants
    | ReleaseGrant
    | Acknowledge
    | AbandonTransfer
    | LeaveRank
    | RankReady
    | RankPollingRequest
    | TransferReleased
)
PlainReply = PeerWelcome | GrantReply | GrantsRenewed | RequestDone | StillWaiting | PeerRefused
RequestMessage = PlainRequest | JoinRank
ReplyMessage = PlainReply | ManifestReply
PeerMessage = RequestMessage | ReplyMessage


def refusal_of(request: int, error: KvxferdError) -> PeerRefused:
    """Return the refusal that carries the error."""
    return PeerRefused(
        request=request, code=error.code, message=error.message, retry_after_s=error.retry_after_s
    )
