"""The last minute of a node in one or two sentences: for `kvxferd status`."""

from __future__ import annotations

from kvxferd.ids import Endpoint
from kvxferd.telemetry.samples import LastMinute
from kvxferd.telemetry.units import format_count, format_rate, format_share, format_time
from kvxferd.wire.endpoint import address_of


def describe_rates(minute: LastMinute) -> str:
    """Return what was moved: ``2,479 pulls, 1.2 GB/s in, 0 B/s out, p50 4 ms, p99 31 ms``."""
    noun = "pull" if minute.delivered == 1 else "pulls"
    rates = (
        f"{format_count(minute.delivered)} {noun}, {format_rate(minute.pulled_bytes_per_s)} in, "
        f"{format_rate(minute.served_bytes_per_s)} out"
    )
    if minute.p50_s is None or minute.p99_s is None:
        return rates
    return f"{rates}, p50 {format_time(minute.p50_s)}, p99 {format_time(minute.p99_s)}"


def describe_failures(minute: LastMinute) -> str:
    """Return how many pulls failed, and why; "" where none did: ``303 of 2,782 pulls (10.9 %): ...``."""
    if not minute.failed:
        return ""
    codes = ", ".join(f"{format_count(count)} {code}" for code, count in minute.failures.items())
    peer = f"; most from {address_of(Endpoint(minute.worst_peer))}" if minute.worst_peer else ""
    total = format_count(minute.delivered + minute.failed)
    share = format_share(minute.failure_share)
    return f"{format_count(minute.failed)} of {total} pulls ({share}): {codes}{peer}"
