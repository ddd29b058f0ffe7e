"""A node's state and history as plain structs: for HTTP, the command line, metrics and logs."""

from __future__ import annotations

from typing import get_args

import msgspec

from kvxferd.errors import Code
from kvxferd.ids import AgentName, BootId, Endpoint, EngineId, Generation, GrantId, PullId, Rank, TransferId

# Where a pull's time goes, in the order in which it passes. None contains another, and they add up to it.
PHASES = ("handshake", "grant", "connect", "queue", "plan", "post", "wire", "fence", "other")
PULL_OUTCOMES = ("delivered", "failed", "cancelled")
# Where a pull is that has not ended: its engine is requested, its reads are planned, its grant is requested;
# the grant is held, or has lapsed, and nothing is read; the mover has it, or was sent its cancel; it failed,
# and its blocks may still be written.
PULL_STATES = ("handshake", "plan", "grant", "held", "lapsed", "posted", "stopping", "in-doubt")
# Why a transfer is released.
RELEASE_REASONS = (
    *(Code.COMPLETED, Code.ABANDONED, Code.LEASE_EXPIRED, Code.CANCELLED, Code.UNPUBLISHED),
    *(Code.PUBLISHER_GONE, Code.RANK_LOST, Code.SUSPENDED),
)
# How a pull's bytes are read: each run by itself, or in longer stretches that the reader copies from.
WAYS = ("direct", "covering")


class _Stamped(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """A record with its time. The core has no time of day: the daemon stamps what the core emits."""

    ended_at: float = 0.0  # Unix seconds; 0: not stamped


class _Timed(_Stamped, frozen=True, kw_only=True):
    """A record of something that took time."""

    # `ended_at` minus the monotonic duration: a step of the wall clock does not put it after the end.
    started_at: float = 0.0


class PullRecord(_Timed, frozen=True, kw_only=True, tag="pull"):
    """One pull that ended: a log line, a row of history, a sample of every histogram."""

    pull: PullId
    transfer_id: TransferId
    source: EngineId
    sink: EngineId
    rank: Rank
    outcome: str  # "delivered", "failed", "cancelled"
    code: Code | None
    message: str
    bytes: int
    runs: int
    total_s: float  # pull received to terminal event sent
    phases_s: dict[str, float]  # keys among PHASES; adds up to `total_s`; a phase never entered is absent
    acknowledge_s: float | None = None  # from the delivery to the source's reply, after `total_s`
    retried: bool = False  # the transport failed once, and it was read again
    ways: dict[str, int] = {}  # how many of the bytes were read directly, and by covering reads
    predicted_s: float = 0.0  # how long the reads were to take; 0: not predicted
    peer: Endpoint = Endpoint("")  # of the source's daemon, as the reference names it
    failed_phase: str = ""  # among PHASES: where it was when it failed or was cancelled; "": delivered
    silent: str = ""  # who did not reply before the deadline: an endpoint, a rank, a local mover; "": nobody
    traceparent: str = ""  # of the request's trace, where it is sampled and this node exports spans
    span_id: str = ""  # of the pull's own span, 16 hex digits
    progressive: bool = False  # it might be read in pieces, while its source wrote it
    hidden_bytes: int = 0  # of `bytes`: read before this node knew that all was ready
    handover_s: float | None = None  # from then to its delivery; None: not progressive, or not delivered

    @property
    def has_failed(self) -> bool:
        """Whether it was neither delivered nor cancelled."""
        return self.outcome == "failed"


class HandshakeRecord(_Timed, frozen=True, kw_only=True, tag="handshake"):
    """One attempt to learn a remote engine, ended."""

    peer: Endpoint  # the daemon that was asked
    engine_id: EngineId
    outcome: str  # "ok" or the refusal's code
    message: str
    num_ranks: int
    elapsed_s: float


class ReaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that read a published transfer, as its ranks acknowledged."""

    engine_id: EngineId
    peers: tuple[Endpoint, ...]  # of its ranks' daemons, as their greetings name them; the first few
    num_ranks: int  # that have acknowledged
    bytes: int  # that these ranks report; 0 from daemons that do not report it


class ReleaseRecord(_Timed, frozen=True, kw_only=True, tag="release"):
    """One published transfer that was released."""

    transfer_id: TransferId
    engine_id: EngineId
    why: Code
    held_s: float
    readers: tuple[ReaderRecord, ...] = ()  # engines that acknowledged; the first few
    bytes: int = 0  # that all readers report
    traceparent: str = ""  # as in `PullRecord`
    span_id: str = ""  # of the publish's own span; that of `traceparent` itself: the publish is the root

    @property
    def peer(self) -> Endpoint:
        """The daemon of the first reader that acknowledged; "" where none did."""
        return next((peer for reader in self.readers for peer in reader.peers), Endpoint(""))


class PlacementRecord(_Stamped, frozen=True, kw_only=True, tag="placement"):
    """How a mover reaches a rank's memory, as it bound or tested it."""

    engine_id: EngineId
    rank: Rank
    placement: str  # "direct", "resident", "staged"
    proved: bool  # a read was checked and timed
    why: str  # not direct, or not proved
    lanes: str  # "cma", "tcp", ...; "": not known
    gigabytes_per_s: float


class TransportsRecord(_Stamped, frozen=True, kw_only=True, tag="lanes"):
    """A rank's mover connected to another process over transports that it had not used."""

    engine_id: EngineId
    rank: Rank
    reach: str  # "node" or "network"
    lanes: str
    slow: bool  # TCP on one node, where there is something faster


Record = PullRecord | HandshakeRecord | ReleaseRecord | PlacementRecord | TransportsRecord


def kind_of(record: Record | type[Record]) -> str:
    """Return "pull", "handshake", "release", "placement" or "lanes": the field `kind` of its JSON."""
    return str(record.__struct_config__.tag)


RECORD_KINDS = tuple(map(kind_of, get_args(Record)))


class ServedRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A reading rank acknowledged a transfer of this node. Only counted: its release is a row of history."""

    source: EngineId
    sink: EngineId
    peer: Endpoint  # the reader's daemon, as it names itself; "": not known
    bytes: int  # as the reader reports


class LimitSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A limit of this node, and how much of it is used."""

    name: str  # of its setting in `limits`, or of a limit that is no setting
    limit: int
    used: int  # of a limit for each engine, rank or peer: by the one that uses most


class PlacementSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """How the mover reaches a local rank's memory."""

    kind: str  # "direct", "resident", "staged"
    proved: bool
    why: str
    lanes: str
    gigabytes_per_s: float  # of one read in the mover's own process; 0: not measured


class TransportsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One set of transports over which a rank's mover has connected."""

    reach: str  # "itself", "node", "network"
    transports: tuple[str, ...]  # as UCX names them
    lanes: str  # those that carry data
    slow: bool


class RankSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A local rank, or a member's rank that is known here."""

    rank: Rank
    state: str  # of a local rank, as `RankState` has it; "remote"
    agent: AgentName | None
    library: str
    bytes: int
    placement: PlacementSnapshot | None = None  # of a local rank that is bound
    lanes: tuple[TransportsSnapshot, ...] = ()
    worker_pid: int = 0  # of a local rank; as this daemon's PID namespace names it, 0 where it cannot
    worker_uid: int = 0
    layers: tuple[int, int]


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A local engine."""

    engine_id: EngineId
    generation: Generation
    pp_size: int
    tp_size: int
    num_layers: int
    complete: bool  # this is its home, and all its ranks can be read
    lacking: tuple[Rank, ...]  # at its home
    home: Endpoint
    ranks: tuple[RankSnapshot, ...]


class RemoteEngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An engine learnt from a peer."""

    engine_id: EngineId
    generation: Generation
    num_ranks: int


class PeerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Another daemon."""

    endpoint: Endpoint
    boot: BootId | None
    state: str  # "connecting", "up", "silent"
    engines: tuple[RemoteEngineSnapshot, ...]
    num_grants: int
    round_trip_s: float | None = None  # of the last hello, renewal or acknowledgement; None: not known
    last_reply_s: float | None = None  # how long ago its last message arrived


class HolderSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that has grants on a transfer: it reads it, or has announced to."""

    engine_id: EngineId
    peer: Endpoint  # of its daemon, as its greeting names it; "": not known
    num_grants: int  # one of each of its ranks there
    held_s: float  # since the first of them


class TransferSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer published here."""

    transfer_id: TransferId
    engine_id: EngineId
    generation: Generation
    state: str  # "writing", "readable", "granted"
    num_tokens: int
    num_grants: int
    holders: tuple[HolderSnapshot, ...] = ()  # of these grants, the longest first; the first few
    num_acks: int
    lease_left_s: float
    age_s: float
    ready_tokens: int  # of `num_tokens`: that every rank has written


class PullSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A pull of a local rank that has not ended."""

    pull: PullId
    transfer_id: TransferId
    source: EngineId
    sink: EngineId
    rank: Rank
    phase: str
    grant: GrantId | None
    age_s: float
    deadline_left_s: float
    progressive: bool = False  # it may be read in pieces, while its source writes it
    num_tokens: int = 0  # up to which it reads
    tokens_read: int = 0  # of these, by pieces that are there; an ordinary pull has one, the whole
    bytes_read: int = 0  # by these pieces
    waits: str = ""  # for whom, and why, as its message would say at its deadline; "": it is young, or posted


class OwnershipSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of an engine id, and how many of its ranks are kept for absent holders."""

    engine_id: EngineId
    uid: int | None  # None: no local user owns it
    expires_in_s: float | None  # None: ranks of the engine are here, or no local user owns it
    num_kept_ranks: int = 0


class NodeSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole state of a node."""

    boot: BootId
    endpoint: Endpoint
    draining: bool
    num_sessions: int
    num_quarantined: int  # pulls in doubt
    quarantined_bytes: int  # of local memory, those blocks
    engines: tuple[EngineSnapshot, ...]
    peers: tuple[PeerSnapshot, ...]
    transfers: tuple[TransferSnapshot, ...]  # the oldest, see `core.views.node_view`; the counts are of all
    pulls: tuple[PullSnapshot, ...]
    transfer_states: dict[str, int] = {}
    published_bytes: int = 0  # of local ranks, in blocks that are published and not released
    oldest_published_s: float = 0.0  # how long ago the oldest of them was published
    limits: tuple[LimitSnapshot, ...] = ()
    num_grants_given: int = 0
    num_grants_held: int = 0  # by local pulls, at peers and at this node itself
    pull_phases: dict[str, int] = {}
    num_retired_movers: int = 0  # that get no new pulls, and have not exited
    ownerships: tuple[OwnershipSnapshot, ...] = ()  # the recorded ones, at most 4,096
