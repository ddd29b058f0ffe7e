"""The settings that the core's decisions depend on. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxferd.config import LimitsConfig, PeerConfig, TransferConfig, WorkerConfig
from kvxferd.config.schema import TracingConfig
from kvxferd.core.allowlist import ALLOW_ALL, PeerAllowlist
from kvxferd.wire.mover import DevicePlacement, ReadWay
from kvxferd.wire.traceparent import is_sampled, read_traceparent, root_traceparent


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The core's settings: the sections of the configuration that it reads, and what is no setting."""

    transfer: TransferConfig = field(default_factory=TransferConfig)
    peer: PeerConfig = field(default_factory=PeerConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    max_lease_s: float = 3600.0  # the longest lease that a publish may ask for
    deadline_notice_s: float = 0.5  # before a pull's deadline: ask whom it waits for whether it is there
    acknowledge_for_s: float = 120.0  # an acknowledgement is repeated no longer than this
    quiesce_s: float = 5.0  # after which a mover with a pull in doubt is retired
    polling_linger_s: float = 2.0  # a source mover polls on after its last grant ended
    member_heartbeat_s: float = 3.0  # between two joins of a member's rank at the engine's home
    own_uid: int = 0  # the daemon's own user, who may replace engines that have no user here
    tombstone_s: float = 600.0  # an ended transfer is remembered, so that late messages are harmless
    allowlist: PeerAllowlist = ALLOW_ALL  # at the start; see `AllowlistChanged`
    mover_pool_size: int = 0  # child movers that are kept ready for the next registrations
    read_way: ReadWay = ReadWay.DIRECT  # of child movers
    device_placement: DevicePlacement = DevicePlacement.AUTO  # of child movers
    software: str = ""  # the version of kvxferd, for peers that ask

    @property
    def gone_after_s(self) -> float:
        """Who has sent nothing for so long is gone: what waits there is repeated, and answered each time."""
        return self.peer.silent_after_s + self.peer.request_timeout_s

    @property
    def member_silent_after_s(self) -> float:
        """After so long without a heartbeat a member's daemon counts as dead."""
        return max(self.peer.silent_after_s, 3 * self.member_heartbeat_s)

    def sampled_trace(self, traceparent: str, nonce: str) -> str:
        """Return the traceparent under which this node records a transfer; "": it does not.

        A request's own trace decides by its flag "sampled". A transfer whose engine gave none starts a trace
        with the probability `sample_ratio`, the same on both nodes.
        """
        if not self.tracing.endpoint:
            return ""
        if trace := read_traceparent(traceparent):
            return trace if is_sampled(trace) else ""
        ratio = self.tracing.sample_ratio
        return root_traceparent(nonce, ratio) if ratio else ""
