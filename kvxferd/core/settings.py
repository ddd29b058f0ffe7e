"""The numbers that the core's decisions depend on, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.core.allowlist import ALLOW_ALL, PeerAllowlist
from kvxferd.core.limits import DEFAULT_LIMITS, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Defaults are the design's; the daemon fills them from its configuration."""

    lease_s: float = 30.0  # of a publish that names none, and of a grant between renewals
    max_lease_s: float = 3600.0  # the longest lease that a publish may ask for
    max_hold_s: float = 600.0  # a grant is renewed no longer than this
    unknown_wait_s: float = 1.0  # a reference may outrun its publish
    handshake_wait_s: float = 10.0  # for the missing ranks of an engine, and for ranks not ready
    resend_s: float = 2.0  # an unanswered question is asked again
    silent_after_s: float = 10.0  # a peer that answers nothing for so long is unreachable
    acknowledge_for_s: float = 120.0  # an acknowledgement is repeated no longer than this
    quiesce_s: float = 5.0  # a mover in doubt is given this long, then killed
    polling_linger_s: float = 2.0  # a source mover polls on after its last grant ended
    member_heartbeat_s: float = 3.0  # a member repeats its ranks to the engine's home
    ownership_s: float = 600.0  # an engine id stays its user's after its last rank has left
    own_uid: int = 0  # the daemon's own user, who may replace what has no user here
    tombstone_s: float = 600.0  # an ended transfer is remembered, so that late messages are harmless
    allowlist: PeerAllowlist = ALLOW_ALL  # at the start; see `TrustChanged`
    limits: Limits = DEFAULT_LIMITS
    pp_aware: bool = True  # False: this node refuses engines with more than one pipeline stage

    @property
    def member_silent_after_s(self) -> float:
        """Without a heartbeat for so long, a member's daemon is taken to be dead."""
        return max(self.silent_after_s, 3 * self.member_heartbeat_s)
