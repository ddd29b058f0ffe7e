"""The states of a session, and which refusals end it."""

from __future__ import annotations

from enum import Enum, auto

from kvxferd.errors import Code


class SessionState(Enum):
    """From no connection to a registered one."""

    DISCONNECTED = auto()  # no connection
    HANDSHAKING = auto()  # Hello is sent
    CONNECTED = auto()  # welcomed, and not registered
    REGISTERING = auto()  # Register, Attach or Resume is sent
    READY = auto()  # the daemon takes requests
    CLOSED = auto()  # the session has ended


# A rank or publisher that was registered before tries again: the session that has its engine id or its rank
# now, or a rank of another shape or with other layers beside it, may leave, or an operator returns the id.
# To end the session instead would let one second of squatting end a live engine.
RETRIED_ON_REREGISTER = frozenset(
    {Code.NOT_ALLOWED, Code.RANK_TAKEN, Code.SHAPE_MISMATCH, Code.UNEQUAL_STAGES, Code.LAYERS_MISSING}
)

# Refusals that do not change by another attempt. After any other the client keeps trying.
PERMANENT_REFUSALS = frozenset(
    {
        Code.BAD_VERSION,
        Code.NOT_ALLOWED,
        Code.LAYOUT_INVALID,
        Code.REGION_INVALID,
        Code.REGION_UNSEALED,
        Code.REGION_TOO_SMALL,
        Code.RANK_INVALID,
        Code.INCARNATION_CHANGED,
        Code.SHAPE_MISMATCH,
        Code.LAYERS_MISSING,
        Code.UNEQUAL_STAGES,
        Code.NOT_HOME,
        Code.ENDPOINT_INVALID,
        Code.GENERATION_STALE,
    }
)
