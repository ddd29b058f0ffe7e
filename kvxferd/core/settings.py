"""The settings that the core's decisions depend on. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.config import LimitsConfig
from kvxferd.core.allowlist import ALLOW_ALL, PeerAllowlist
from kvxferd.wire.mover import DevicePlacement, ReadWay
from kvxferd.wire.traceparent import is_sampled, read_traceparent, root_traceparent

DEFAULT_LIMITS = LimitsConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The core's settings. The daemon fills them from its configuration."""

    lease_s: float = 30.0  # of a publish that names no lease, and of a grant between renewals
    max_lease_s: float = 3600.0  # the longest lease that a publish may ask for
    max_hold_s: float = 600.0  # a grant is renewed, and what is written waited for, no longer than this
    unknown_wait_s: float = 1.0  # a reference may outrun its publish
    handshake_wait_s: float = 10.0  # for the missing ranks of an engine, and for ranks not ready
    resend_s: float = 2.0  # after which a request without a reply is sent again
    deadline_notice_s: float = 0.5  # before a pull's deadline: ask whom it waits for whether it is there
    silent_after_s: float = 10.0  # after which a peer that sends no reply is unreachable
    restart_grace_s: float = 1.0  # after which a peer that accepts no connection is unreachable
    acknowledge_for_s: float = 120.0  # an acknowledgement is repeated no longer than this
    quiesce_s: float = 5.0  # after which a mover with a pull in doubt is retired
    polling_linger_s: float = 2.0  # a source mover polls on after its last grant ended
    member_heartbeat_s: float = 3.0  # between two joins of a member's rank at the engine's home
    ownership_s: float = 600.0  # its user owns an engine id for so long after its last rank has left
    own_uid: int = 0  # the daemon's own user, who may replace engines that have no user here
    tombstone_s: float = 600.0  # an ended transfer is remembered, so that late messages are harmless
    allowlist: PeerAllowlist = ALLOW_ALL  # at the start; see `AllowlistChanged`
    limits: LimitsConfig = DEFAULT_LIMITS
    mover_pool_size: int = 0  # child movers that are kept ready for the next registrations
    read_way: ReadWay = ReadWay.DIRECT  # of child movers
    device_placement: DevicePlacement = DevicePlacement.AUTO  # of child movers
    software: str = ""  # the version of kvxferd, for peers that ask
    tracing: bool = False  # its daemon exports spans: records carry the traces of sampled requests
    trace_sample_ratio: float = 0.0  # of the transfers whose engine gave no trace
    pp_aware: bool = True  # False: this node reads no engine with more than one pipeline stage

    @property
    def gone_after_s(self) -> float:
        """Who has sent nothing for so long is gone: what waits there is repeated, and answered each time."""
        return self.silent_after_s + self.resend_s

    @property
    def member_silent_after_s(self) -> float:
        """After so long without a heartbeat a member's daemon counts as dead."""
        return max(self.silent_after_s, 3 * self.member_heartbeat_s)

    def sampled_trace(self, traceparent: str, nonce: str) -> str:
        """Return the traceparent under which this node records a transfer; "": it does not.

        A request's own trace decides by its flag "sampled". A transfer whose engine gave none starts a trace
        with the probability `trace_sample_ratio`, the same on both nodes.
        """
        if not self.tracing:
            return ""
        if trace := read_traceparent(traceparent):
            return trace if is_sampled(trace) else ""
        return root_traceparent(nonce, self.trace_sample_ratio) if self.trace_sample_ratio else ""
