"""The result of a probe of the way between two daemons, for the operator, the log and the metrics."""

from __future__ import annotations

import msgspec

from kvxferd.errors import Code
from kvxferd.ids import ProbeId
from kvxferd.wire.probe import ProbeRead

# Of this daemon in a probe: its operator requested it, or a peer did.
PROBE_ROLES = REQUESTED, SERVED = ("requested", "served")


class ProbeDirection(msgspec.Struct, frozen=True, kw_only=True):
    """One direction: how its reader read, or why it did not."""

    code: Code | None = None  # None: it was read
    message: str = ""
    verified_bytes: int = 0  # as the source has them
    wrong_bytes: int = 0  # in slices that differ from the source's
    gigabytes_per_s: float = 0.0
    first_s: float = 0.0  # of the first slice, which connects
    transports: str = ""  # that carried the bytes; "": not known
    reach: str = ""  # "node": both movers are on one machine; "network"; "": not known
    is_slow: bool = False  # TCP within one machine, although a faster transport exists


class ProbeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A probe that has ended."""

    probe: ProbeId
    role: str  # among PROBE_ROLES
    peer: str  # its endpoint, or where it requested the probe its key; "" without one
    size_bytes: int  # of the region
    elapsed_s: float
    code: Code | None = None  # why it did not begin, or ended early; None: both directions were tried
    message: str = ""
    retry_after_s: float = 0.0
    read: ProbeDirection | None = None  # this node read from the peer
    read_back: ProbeDirection | None = None  # the peer read from this node, as it reports

    @property
    def is_ok(self) -> bool:
        """Whether every direction that this side knows of was read, and with the right bytes."""
        directions = [one for one in (self.read, self.read_back) if one is not None]
        return self.code is None and all(one.code is None and not one.wrong_bytes for one in directions)


def direction_of(read: ProbeRead) -> ProbeDirection:
    """Return the direction that was read so."""
    return ProbeDirection(
        verified_bytes=read.verified_bytes,
        wrong_bytes=read.wrong_bytes,
        gigabytes_per_s=read.gigabytes_per_s,
        first_s=read.first_s,
        transports=read.transports,
        reach=read.reach,
        is_slow=read.is_slow,
    )
