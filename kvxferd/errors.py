"""Every error that kvxferd raises or sends, by the party at fault.

```text
KvxferdError          .code is sent on the wire, str() is a sentence with what to do
  ConfigError         the operator's file, environment or flags
  PeerError           the other daemon broke protocol or cannot be reached: that peer only
  EngineError         a local engine's request is invalid: refuse it, keep its session
    LayoutError       a layout that contradicts itself or its regions
    PlanError         two layouts that cannot be read from one another
      NotPPAwareError   pipeline stages for a consumer that knows one only (also a ValueError)
  ProtocolError       undecodable, oversized or out of place: the sender loses that connection
  MoverError          a mover or its transport failed: one rank, not the node
  DeviceError         a GPU, its driver or the bindings to it: one rank, not the node
  BusyError           a limit was reached: try again after `retry_after_s`
```

The daemon repeats no request that a source refused as busy: the engine may have a better source, or compute
the prompt.
"""

from collections import Counter
from enum import StrEnum

# How often a limit has refused something in this process, by its name. It only shows, and decides nothing.
BUSY_REFUSALS: Counter[str] = Counter()
OTHER_LIMIT = "other"


def count_busy_refusal(limit: str = OTHER_LIMIT) -> None:
    """Count a refusal as `busy` for which no BusyError is raised."""
    BUSY_REFUSALS[limit] += 1


class Code(StrEnum):
    """Why something failed or ended, on the wire and in metrics; a machine may branch on it."""

    # the operator
    CONFIG_INVALID = "config-invalid"
    ALREADY_RUNNING = "already-running"
    BAD_REQUEST = "bad-request"
    NOT_FOUND = "not-found"
    # protocol
    BAD_FRAME = "bad-frame"
    FRAME_TOO_LARGE = "frame-too-large"
    BAD_VERSION = "bad-version"
    OUT_OF_PLACE = "out-of-place"
    NOT_ALLOWED = "not-allowed"
    # registration
    LAYOUT_INVALID = "layout-invalid"
    REGION_INVALID = "region-invalid"
    REGION_UNSEALED = "region-unsealed"
    REGION_TOO_SMALL = "region-too-small"
    REGION_NOT_EXPORTABLE = "region-not-exportable"
    DEVICE_UNAVAILABLE = "device-unavailable"
    DEVICE_ERROR = "device-error"
    RANK_TAKEN = "rank-taken"
    RANK_INVALID = "rank-invalid"
    SHAPE_MISMATCH = "shape-mismatch"
    LAYERS_MISSING = "layers-missing"
    UNEQUAL_STAGES = "unequal-stages"
    NIXL_UNAVAILABLE = "nixl-unavailable"
    MOVER_LOST = "mover-lost"
    HOME_UNREACHABLE = "home-unreachable"
    NOT_HOME = "not-home"
    SUSPENDED = "suspended"
    ENDPOINT_INVALID = "endpoint-invalid"
    # engines and transfers
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
    # planning
    LAYOUT_INCOMPATIBLE = "layout-incompatible"
    COVERAGE_GAP = "coverage-gap"
    # how a transfer or a pull ended
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
    SOURCE_STALLED = "source-stalled"
    DRAINING = "draining"
    BUSY = "busy"
    INTERNAL = "internal"


class KvxferdError(Exception):
    """Base of all errors: a code for machines, a sentence for people.

    Attributes:
        code: the reason, for machines.
        message: "cannot X: why; do Y", for people.
        retry_after_s: seconds after which another attempt may succeed; 0: another attempt does not help.
    """

    default_code = Code.INTERNAL

    def __init__(self, message: str, code: Code | None = None, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.code = self.default_code if code is None else code
        self.retry_after_s = retry_after_s


class ConfigError(KvxferdError):
    """The operator's file, environment or flags are invalid; nothing was started."""

    default_code = Code.CONFIG_INVALID


class PeerError(KvxferdError):
    """The other daemon broke protocol, refused, or cannot be reached."""

    default_code = Code.PEER_UNREACHABLE


class EngineError(KvxferdError):
    """A local engine requested something that cannot be done; its session goes on."""

    default_code = Code.BLOCKS_INVALID


class LayoutError(EngineError):
    """A layout contradicts itself or reaches outside its regions."""

    default_code = Code.LAYOUT_INVALID


class PlanError(EngineError):
    """Two layouts cannot be read from one another; the message names the first reason."""

    default_code = Code.LAYOUT_INCOMPATIBLE


class NotPPAwareError(PlanError, ValueError):
    """A consumer that is not PP-aware would get ranks of later pipeline stages.

    Also a ValueError: connectors that come from in-engine code expect one.
    """

    default_code = Code.NOT_PP_AWARE


class ProtocolError(KvxferdError):
    """Bytes that no correct sender sends: its connection is closed, and no other is affected."""

    default_code = Code.BAD_FRAME


class MoverError(KvxferdError):
    """A mover, or the transport library inside it, failed."""

    default_code = Code.TRANSPORT


class DeviceError(KvxferdError):
    """A GPU's driver refused a call, or this node has no such driver or device."""

    default_code = Code.DEVICE_ERROR


class BusyError(KvxferdError):
    """A limit was reached; another attempt after `retry_after_s` seconds may succeed.

    `limit` is its name in the metrics: one of a small closed set. Each error counts as one refusal.
    """

    default_code = Code.BUSY

    def __init__(self, message: str, retry_after_s: float, limit: str = OTHER_LIMIT) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        count_busy_refusal(limit)
