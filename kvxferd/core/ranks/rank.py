"""One rank of an engine: of a worker of this node, whose states are a table, or of another node's daemon."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import ClassVar, NamedTuple

import msgspec

from kvxferd.core.peers.remote_engine import manifest_bytes
from kvxferd.ids import AgentName, BootId, GroupName, Incarnation, MoverId, SessionId, TransferId
from kvxferd.layout import EngineSpec, PackedBlocks, RankLayout, block_bytes
from kvxferd.plan import BlockRules, TransferTopology, block_rules
from kvxferd.ucx_log import TransportsUsed
from kvxferd.wire.codec import encode
from kvxferd.wire.common import Binding, MeasuredPlacement, RankManifest, RegionAddress
from kvxferd.wire.peer import Consumer
from kvxferd.wire.worker import RegionExport


class RankState(StrEnum):
    """Where a local rank is between its registration and its end."""

    AWAITING_FDS = "awaiting-fds"  # the rest of its descriptors was requested from the worker
    MAPPING = "mapping"  # waits for a mover
    OFFERED = "offered"  # waits until its worker watches the mover
    BINDING = "binding"  # waits for the mover to map and register its memory
    JOINING = "joining"  # waits for the reply of the engine's home
    READY = "ready"
    REBINDING = "rebinding"  # its mover has left, and another is requested in a moment
    AWAITING_WORKER = "awaiting-worker"  # which starts another resident mover
    SUSPENDING = "suspending"  # its movers are being ended
    SUSPENDED = "suspended"  # no process but the worker maps its memory
    GONE = "gone"


class RankTrigger(Enum):
    """What happens to a local rank."""

    NEED_FDS = auto()
    FDS_ARRIVED = auto()
    OFFER = auto()  # a child mover was assigned
    BIND = auto()  # the worker watches the mover, or the mover is resident
    JOIN = auto()  # bound, and the engine's home is elsewhere
    READY = auto()  # bound, and known at its home
    MOVER_LEFT = auto()
    REQUEST_MOVER = auto()
    REQUEST_RESIDENT = auto()  # from the worker
    SUSPEND = auto()
    MOVERS_DEAD = auto()  # all that could reach its memory
    RESUME = auto()
    CLOSE = auto()


# In these it has a mover. In those it has none, and its worker has not taken the memory back.
WITH_MOVER = (RankState.OFFERED, RankState.BINDING, RankState.JOINING, RankState.READY)
WITHOUT_MOVER = (
    RankState.AWAITING_FDS, RankState.MAPPING, RankState.REBINDING, RankState.AWAITING_WORKER
)  # fmt: skip
ASLEEP = (RankState.SUSPENDING, RankState.SUSPENDED)

# A pair that is not in the table is a bug. Callers look at the state first where a pair may be missing.
TRANSITIONS: dict[tuple[RankState, RankTrigger], RankState] = {
    (RankState.MAPPING, RankTrigger.NEED_FDS): RankState.AWAITING_FDS,
    (RankState.AWAITING_FDS, RankTrigger.FDS_ARRIVED): RankState.MAPPING,
    (RankState.MAPPING, RankTrigger.OFFER): RankState.OFFERED,
    (RankState.MAPPING, RankTrigger.BIND): RankState.BINDING,  # a resident mover: nobody need watch it
    (RankState.OFFERED, RankTrigger.BIND): RankState.BINDING,
    (RankState.BINDING, RankTrigger.JOIN): RankState.JOINING,
    (RankState.BINDING, RankTrigger.READY): RankState.READY,
    (RankState.JOINING, RankTrigger.READY): RankState.READY,
    **{(state, RankTrigger.MOVER_LEFT): RankState.REBINDING for state in WITH_MOVER},
    (RankState.REBINDING, RankTrigger.REQUEST_MOVER): RankState.MAPPING,
    (RankState.REBINDING, RankTrigger.REQUEST_RESIDENT): RankState.AWAITING_WORKER,
    (RankState.AWAITING_WORKER, RankTrigger.REQUEST_MOVER): RankState.MAPPING,
    # Its memory is the worker's again only once no mover can reach it, and is resumed after that.
    **{(state, RankTrigger.SUSPEND): RankState.SUSPENDING for state in WITH_MOVER + WITHOUT_MOVER},
    (RankState.SUSPENDING, RankTrigger.MOVERS_DEAD): RankState.SUSPENDED,
    (RankState.SUSPENDED, RankTrigger.RESUME): RankState.MAPPING,
    **{(state, RankTrigger.CLOSE): RankState.GONE for state in WITH_MOVER + WITHOUT_MOVER + ASLEEP},
}


class Reported(NamedTuple):
    """What a rank has last reported to its home of a transfer."""

    incarnation: Incarnation
    ready_tokens: int
    request: int  # the last RankReady with it; 0: none was sent


@dataclass(slots=True)
class LocalRank:
    """A rank whose worker is connected here."""

    session: SessionId
    spec: EngineSpec
    layout: RankLayout
    exports: tuple[RegionExport, ...]
    incarnation: Incarnation
    request: int | None  # the Register or Resume that waits for its reply
    uid: int = 0  # the worker's user
    pid: int = 0  # and process
    resident: bool = False  # its movers are threads of the worker
    state: RankState = RankState.MAPPING
    was_registered: bool = False  # Registered was sent for any mapping
    mover: MoverId | None = None  # of a state in WITH_MOVER
    num_unacknowledged: int = 0  # offers in a row that the worker has not acknowledged
    agent: AgentName | None = None
    library: str = ""
    # Of a rank whose home is elsewhere:
    joined: AgentName | None = None  # the agent that its home may know
    join_request: int = 0  # the number of the open JoinRank; 0: there is none
    join_deadline: float = 0.0  # until when a home that may change its mind is asked again
    asked_to_poll: bool = False  # by its home, since the last JoinRank was sent
    polling_request: int = 0  # of its home, which gets a reply once the mover polls; 0: there is none
    # What it has reported as written and not heard to be released, the latest: a home that restarts lost it.
    reported: OrderedDict[TransferId, Reported] = field(default_factory=OrderedDict)
    encoded: msgspec.Raw | None = None  # its manifest, as readers and its home get it; None: it was not bound
    placement: MeasuredPlacement = field(default_factory=MeasuredPlacement)
    transports_used: tuple[TransportsUsed, ...] = ()  # how its mover has connected so far
    topology: TransferTopology = field(init=False)  # the remote engines that it reads
    block_bytes: dict[GroupName, int] = field(init=False)
    rules: BlockRules = field(init=False)

    def __post_init__(self) -> None:
        self.topology = TransferTopology(self.spec, self.layout)
        self.block_bytes = block_bytes(self.layout)
        self.rules = block_rules(self.layout)

    def move(self, trigger: RankTrigger) -> None:
        """Go to the next state. A KeyError is a bug of the caller."""
        self.state = TRANSITIONS[self.state, trigger]
        if self.state not in WITH_MOVER:
            self.mover, self.agent, self.polling_request = None, None, 0

    def consumer(self) -> Consumer:
        """Return it as a source counts a rank that reads."""
        spec = self.spec
        return Consumer(spec.engine_id, spec.generation, spec.rank, spec.pp_size * spec.tp_size)

    def bytes_of(self, blocks: Mapping[GroupName, PackedBlocks]) -> int:
        """Return the bytes of those blocks on this rank."""
        return sum([len(packed) * self.block_bytes.get(group, 0) for group, packed in blocks.items()])

    @property
    def is_readable(self) -> bool:
        """Whether peers may read it."""
        return self.state is RankState.READY

    @property
    def is_asleep(self) -> bool:
        """Whether its worker has taken its memory back: the memory's content is gone."""
        return self.state in ASLEEP

    def set_bound(self, regions: tuple[RegionAddress, ...], metadata: bytes) -> None:
        """Record where its mover has its memory."""
        assert self.agent is not None
        binding = Binding(self.agent, metadata, regions, self.incarnation)
        self.encoded = msgspec.Raw(encode(RankManifest(self.spec, self.layout, binding)))

    def encoded_manifest(self) -> msgspec.Raw:
        """Return what a reader needs. Only for a rank that has been bound."""
        assert self.encoded is not None
        return self.encoded


@dataclass(slots=True)
class MemberRank:
    """A rank whose worker is connected to another node's daemon, which joined it here."""

    joined: RankManifest
    route: bytes
    boot: BootId
    key: str  # the CURVE key of its daemon; "": without CURVE
    owner: str  # its daemon, as `Owners` has it
    request: int = 0  # the number of the last `JoinRank` of it
    last_seen_at: float = 0.0  # when it last joined: its heartbeat
    added_by: int = 0  # the number of the `JoinRank` before which the rank was not known; 0: it was
    encoded: msgspec.Raw | None = None  # the manifest, once a reader has asked for it
    spec: EngineSpec = field(init=False)  # as the rank sent it
    layout: RankLayout = field(init=False)
    rules: BlockRules = field(init=False)
    agent: AgentName = field(init=False)  # of the rank's mover
    incarnation: Incarnation = field(init=False)  # of its present mapping
    num_bytes: int = field(init=False)  # that its manifest takes, about
    is_readable: ClassVar[bool] = True  # a member joins only ranks that are bound
    is_asleep: ClassVar[bool] = False  # it leaves the home before its rank sleeps

    def __post_init__(self) -> None:
        self.spec, self.layout = self.joined.spec, self.joined.layout
        self.agent, self.incarnation = self.joined.binding.agent, self.joined.binding.incarnation
        self.rules = block_rules(self.layout)
        # With its metadata in what readers get, too.
        self.num_bytes = manifest_bytes([self.joined]) + len(self.joined.binding.metadata)

    def encoded_manifest(self) -> msgspec.Raw:
        """Return what a reader needs. It is encoded once: a peer may ask for it again and again."""
        if self.encoded is None:
            self.encoded = msgspec.Raw(encode(self.joined))
        return self.encoded


RankRecord = LocalRank | MemberRank


class RankChange(Enum):
    """What becomes of a rank, reported the moment it happens: `Node` has the table of what follows."""

    REGISTERED = auto()  # a local rank was claimed; its memory is about to be mapped
    MAPPED = auto()  # its memory has another mapping: it was resumed, or is a member's that has joined
    READY = auto()  # a mover has bound its memory, maybe another one, and its home knows it
    ASLEEP = auto()  # nothing may read or write its memory any more
    GONE = auto()


OnRankChange = Callable[[RankChange, RankRecord], None]
