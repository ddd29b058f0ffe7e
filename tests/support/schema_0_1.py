"""The messages of the worker and the peer protocol as version 0.1 had them: its version 1, frozen.

Copied from the code of that release and never changed again. Every struct forbids unknown fields, so a
message decodes here only if a 0.1 daemon or client would have taken it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec


class Rank(NamedTuple):
    pp_rank: int
    tp_rank: int


class Code(StrEnum):
    CONFIG_INVALID = "config-invalid"
    ALREADY_RUNNING = "already-running"
    BAD_REQUEST = "bad-request"
    NOT_FOUND = "not-found"
    BAD_FRAME = "bad-frame"
    FRAME_TOO_LARGE = "frame-too-large"
    BAD_VERSION = "bad-version"
    OUT_OF_PLACE = "out-of-place"
    NOT_ALLOWED = "not-allowed"
    LAYOUT_INVALID = "layout-invalid"
    REGION_INVALID = "region-invalid"
    REGION_UNSEALED = "region-unsealed"
    REGION_TOO_SMALL = "region-too-small"
    REGION_NOT_EXPORTABLE = "region-not-exportable"
    DEVICE_UNAVAILABLE = "device-unavailable"
    DEVICE_ERROR = "device-error"
    RANK_TAKEN = "rank-taken"
    RANK_INVALID = "rank-invalid"
    INCARNATION_CHANGED = "incarnation-changed"
    SHAPE_MISMATCH = "shape-mismatch"
    LAYERS_MISSING = "layers-missing"
    UNEQUAL_STAGES = "unequal-stages"
    NIXL_UNAVAILABLE = "nixl-unavailable"
    MOVER_LOST = "mover-lost"
    HOME_UNREACHABLE = "home-unreachable"
    NOT_HOME = "not-home"
    SUSPENDED = "suspended"
    ENDPOINT_INVALID = "endpoint-invalid"
    ENGINE_UNKNOWN = "engine-unknown"
    ENGINE_INCOMPLETE = "engine-incomplete"
    NOT_PP_AWARE = "not-pp-aware"
    GENERATION_STALE = "generation-stale"
    BINDING_STALE = "binding-stale"
    TRANSFER_UNKNOWN = "transfer-unknown"
    TRANSFER_EXISTS = "transfer-exists"
    TRANSFER_NOT_READY = "transfer-not-ready"
    NONCE_WRONG = "nonce-wrong"
    BLOCKS_INVALID = "blocks-invalid"
    TOKENS_NOT_PUBLISHED = "tokens-not-published"
    LAYOUT_INCOMPATIBLE = "layout-incompatible"
    COVERAGE_GAP = "coverage-gap"
    RELEASED = "released"
    LEASE_EXPIRED = "lease-expired"
    COMPLETED = "completed"
    ABANDONED = "abandoned"
    CANCELLED = "cancelled"
    UNPUBLISHED = "unpublished"
    PUBLISHER_GONE = "publisher-gone"
    RANK_LOST = "rank-lost"
    DEADLINE = "deadline"
    TRANSPORT = "transport"
    PEER_UNREACHABLE = "peer-unreachable"
    DAEMON_LOST = "daemon-lost"
    DRAINING = "draining"
    BUSY = "busy"
    INTERNAL = "internal"


class UnitRange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    start: int
    stop: int


class TokenShard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    count: int = 1
    index: int = 0
    interleave: int = 1


class GroupKind(StrEnum):
    ATTENTION = "attention"
    STATE = "state"


class CacheTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    layer: int
    component: str
    group: str
    region: str
    offset: int
    block_stride: int
    token_stride: int
    unit_stride: int
    units: tuple[UnitRange, ...]
    chunk_bytes: int
    num_chunks: int = 1
    chunk_stride: int = 0
    granule_tokens: int = 1
    itemsize: int = 2
    dtype: str = "bfloat16"
    encoding: str = ""


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    name: str
    num_blocks: int
    block_tokens: int = 0
    kind: GroupKind = GroupKind.ATTENTION
    sliding_window: int | None = None
    token_shard: TokenShard = TokenShard()
    physical_blocks_per_logical: int = 1


class RegionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    region: str
    size_bytes: int


class RankLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    start_layer: int
    end_layer: int
    groups: tuple[Group, ...]
    tensors: tuple[CacheTensor, ...]
    regions: tuple[RegionSpec, ...]


class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    engine_id: str
    generation: str
    num_layers: int
    pp_size: int = 1
    tp_size: int = 1
    pp_rank: int = 0
    tp_rank: int = 0
    num_kv_heads: int = 0
    fingerprint: str = ""
    home: str = ""
    pp_aware: bool = True
    publish_implies_ready: bool = False


class PackedBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    ids: bytes
    first_token: int = 0
    state_at: int = -1


class Message(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="t", kw_only=True
): ...


class Versions(msgspec.Struct, frozen=True, array_like=True):
    oldest: int
    newest: int


class TransferRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    endpoint: str
    engine_id: str
    generation: str
    transfer_id: str
    nonce: str
    ready_tokens: int = -1


class RegionAddress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    region: str
    address: int
    size_bytes: int
    device: int = 0
    mem_type: str = "DRAM"
    pieces: tuple[tuple[int, int], ...] = ()
    staged: bool = False


class Binding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    agent: str
    metadata: bytes
    regions: tuple[RegionAddress, ...]
    incarnation: str


class RankManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    spec: EngineSpec
    layout: RankLayout
    binding: Binding


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    kind: str = "direct"
    why: str = ""
    lanes: str = ""
    gigabytes_per_s: float = 0.0


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: Code
    message: str
    retry_after_s: float = 0.0


class Descriptors(Message, frozen=True, tag="descriptors"):
    first: int


class BlockIds(Message, frozen=True, tag="block-ids"):
    stream: int
    group: str
    offset: int
    ids: bytes


class RegionExport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    region: str
    size_bytes: int
    fd_index: int = 0
    fd_offset: int = 0
    kind: str = "memfd"
    device: str = ""
    pieces: tuple[int, ...] = ()
    address: int = 0


class Hello(Message, frozen=True, tag="hello"):
    versions: Versions
    client: str
    notices: bool = False


class Register(Message, frozen=True, tag="register"):
    request: int
    engine: EngineSpec
    layout: RankLayout
    regions: tuple[RegionExport, ...]
    incarnation: str
    placement: str = "child"


class Attach(Message, frozen=True, tag="attach"):
    request: int
    engine_id: str
    generation: str


class Publish(Message, frozen=True, tag="publish"):
    transfer_id: str
    nonce: str
    blocks: dict[str, PackedBlocks]
    num_tokens: int
    fence_slot: int
    num_readers: int = 1
    lease_s: float = 0.0
    stream: int = 0


class Ready(Message, frozen=True, tag="ready"):
    transfer_id: str


class Unpublish(Message, frozen=True, tag="unpublish"):
    transfer_id: str


class Prepare(Message, frozen=True, tag="prepare"):
    ref: TransferRef


class Pull(Message, frozen=True, tag="pull"):
    ticket: int
    ref: TransferRef
    blocks: dict[str, PackedBlocks]
    num_tokens: int
    deadline_s: float
    stream: int = 0


class Cancel(Message, frozen=True, tag="cancel"):
    ticket: int


class Noticed(Message, frozen=True, tag="noticed"):
    tickets: tuple[int, ...]


class Abandon(Message, frozen=True, tag="abandon"):
    ref: TransferRef


class Suspend(Message, frozen=True, tag="suspend"): ...


class Resume(Message, frozen=True, tag="resume"):
    request: int
    regions: tuple[RegionExport, ...]
    incarnation: str
    placement: str = "child"


class NewMover(Message, frozen=True, tag="new-mover"): ...


class Welcome(Message, frozen=True, tag="welcome"):
    version: int
    boot_id: str
    lease_s: float


class Registered(Message, frozen=True, tag="registered"):
    request: int
    endpoint: str


class MoverChanged(Message, frozen=True, tag="mover-changed"): ...


class MoverWanted(Message, frozen=True, tag="mover-wanted"): ...


class Refused(Message, frozen=True, tag="refused"):
    request: int
    code: Code
    message: str
    retry_after_s: float = 0.0


class Delivered(Message, frozen=True, tag="delivered"):
    ticket: int
    bytes: int
    runs: int
    wire_s: float


class Failed(Message, frozen=True, tag="failed"):
    ticket: int
    code: Code
    message: str
    safe_to_reuse: bool
    retry_after_s: float = 0.0


class Quiesced(Message, frozen=True, tag="quiesced"):
    ticket: int


class Released(Message, frozen=True, tag="released"):
    transfer_id: str
    why: Code


class PublishRefused(Message, frozen=True, tag="publish-refused"):
    transfer_id: str
    code: Code
    message: str
    retry_after_s: float = 0.0


class Suspended(Message, frozen=True, tag="suspended"): ...


class Farewell(Message, frozen=True, tag="farewell"):
    code: Code
    message: str


ClientMessage = (
    Hello
    | Descriptors
    | Register
    | Attach
    | BlockIds
    | Publish
    | Ready
    | Unpublish
    | Prepare
    | Pull
    | Cancel
    | Noticed
    | Abandon
    | Suspend
    | Resume
    | NewMover
)
DaemonMessage = (
    Welcome
    | Registered
    | MoverChanged
    | MoverWanted
    | Refused
    | Delivered
    | Failed
    | Quiesced
    | Released
    | PublishRefused
    | Suspended
    | Farewell
)


class Consumer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engine_id: str
    generation: str
    rank: Rank
    num_ranks: int


class Greet(Message, frozen=True, tag="greet"):
    request: int
    versions: Versions
    boot: str
    endpoint: str


class Greeting(Message, frozen=True, tag="greeting"):
    request: int
    version: int
    boot: str


class FetchEngine(Message, frozen=True, tag="fetch-engine"):
    request: int
    engine_id: str
    generation: str
    wait_s: float
    pp_aware: bool = True


class EngineManifest(Message, frozen=True, tag="engine-manifest"):
    request: int
    boot: str
    ranks: tuple[RankManifest, ...]


class AskGrant(Message, frozen=True, tag="ask-grant"):
    request: int
    grant: str
    ref: TransferRef
    consumer: Consumer
    reads: tuple[tuple[Rank, str], ...]
    wait_s: float


class Granted(Message, frozen=True, tag="granted"):
    request: int
    grant: str
    blocks: dict[str, PackedBlocks]
    num_tokens: int
    lease_s: float
    fence_agent: str
    fence_address: int
    fence_word: bytes
    fence_metadata: bytes
    stream: int = 0


class RenewGrants(Message, frozen=True, tag="renew-grants"):
    request: int
    grants: tuple[str, ...]


class GrantsRenewed(Message, frozen=True, tag="grants-renewed"):
    request: int
    ended: tuple[str, ...]


class ReturnGrant(Message, frozen=True, tag="return-grant"):
    request: int
    grant: str


class Acknowledge(Message, frozen=True, tag="acknowledge"):
    request: int
    grant: str
    ref: TransferRef
    consumer: Consumer


class AbandonTransfer(Message, frozen=True, tag="abandon-transfer"):
    request: int
    ref: TransferRef
    consumer: Consumer


class Done(Message, frozen=True, tag="done"):
    request: int


class PeerRefused(Message, frozen=True, tag="peer-refused"):
    request: int
    code: Code
    message: str
    retry_after_s: float = 0.0


class JoinRank(Message, frozen=True, tag="join-rank"):
    request: int
    boot: str
    manifest: RankManifest


class LeaveRank(Message, frozen=True, tag="leave-rank"):
    request: int
    boot: str
    engine_id: str
    generation: str
    rank: Rank
    agent: str


class RankReady(Message, frozen=True, tag="rank-ready"):
    request: int
    engine_id: str
    generation: str
    rank: Rank
    transfer_id: str


class AttendRank(Message, frozen=True, tag="attend-rank"):
    request: int
    agent: str
    on: bool


class TransferReleased(Message, frozen=True, tag="transfer-released"):
    request: int
    engine_id: str
    generation: str
    transfer_id: str
    why: Code


Question = (
    Greet
    | FetchEngine
    | AskGrant
    | RenewGrants
    | ReturnGrant
    | Acknowledge
    | AbandonTransfer
    | JoinRank
    | LeaveRank
    | RankReady
    | AttendRank
    | TransferReleased
)
Answer = Greeting | EngineManifest | Granted | GrantsRenewed | Done | PeerRefused
PeerMessage = (
    Greet
    | FetchEngine
    | AskGrant
    | RenewGrants
    | ReturnGrant
    | Acknowledge
    | AbandonTransfer
    | JoinRank
    | LeaveRank
    | RankReady
    | AttendRank
    | TransferReleased
    | Greeting
    | EngineManifest
    | Granted
    | GrantsRenewed
    | Done
    | PeerRefused
    | BlockIds
)

CLIENT: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
DAEMON: msgspec.msgpack.Decoder[DaemonMessage] = msgspec.msgpack.Decoder(DaemonMessage)
PEER: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
REFERENCE: msgspec.json.Decoder[TransferRef] = msgspec.json.Decoder(TransferRef)
