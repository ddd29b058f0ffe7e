"""Examines the way to one other daemon, for `kvxferd doctor --peer`.

First from this process, as `kvxferd ping` does. Then by what the local daemon has: its own connection to that
peer, the pulls that read from it and the transfers that it read, with what they really took. At last, with a
reference that `kvxferd doctor --serve` printed there, by pulls (`link`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvxferd.doctor.link import measure_link, not_measured
from kvxferd.doctor.ping import Outcome, ping, read_identity
from kvxferd.doctor.report import CheckContext, Finding, Verdict, fail, no_daemon, ok, warn
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import Endpoint
from kvxferd.telemetry.units import format_size, format_time
from kvxferd.wire.common import TransferRef
from kvxferd.wire.endpoint import address_of

# A link that answers so late has no business in a rack; a pull takes three round trips.
SLOW_ROUND_TRIP_S = 0.05
# Pulls that are too short say nothing of the link.
MIN_MEASURED_BYTES = 1 << 20


def check_peer(node: CheckContext, peer: Endpoint, ref: TransferRef | None = None) -> Iterator[Finding]:
    """Yield what is found between this node and the daemon at that endpoint, with `ref` by pulls too."""
    reach = _reach(node, peer)
    yield reach
    try:
        peers = node.daemon.get("/v1/peers")["peers"]
        records = node.daemon.get("/v1/history")["records"]
    except KvxferdError as error:
        yield no_daemon("this node's daemon", error, essential=ref is not None)
        return
    yield _connection(peers, peer)
    yield _reads_from(records, peer)
    yield _reads_by(records, peer)
    if ref is None:
        yield not_measured()
    elif reach.verdict is not Verdict.FAIL:
        yield from measure_link(node, ref)


def read_ref_of(peer: Endpoint, text: str) -> TransferRef:
    """Return the reference that was printed at the peer. Raises EngineError if it is none, or another's."""
    ref = TransferRef.parse(text)
    if not _is_at(ref.endpoint, peer):
        what = f"cannot measure the link to {peer}: the reference is of {str(ref.endpoint)!r:.300}"
        raise EngineError(what, Code.BAD_REQUEST)
    return ref


def _reach(node: CheckContext, peer: Endpoint) -> Finding:
    try:
        allowlist, key = read_identity(node.config.peer)
    except KvxferdError as error:
        return warn("reach", f"not tried: {error.message}", "run doctor as root or as the daemon's user")
    result = ping(peer, allowlist, key)
    facts: dict[str, Any] = {"outcome": result.outcome.value, "round_trips_s": result.round_trips_s}
    if result.outcome is not Outcome.OK:
        return fail("reach", result.message, result.remedy, essential=True, **facts)
    facts |= {"boot": result.boot, "version": result.version, "software": result.software_there}
    found = f"{result.message}; round trip {format_time(result.median_s)}"
    if result.software_there:
        found += f"; kvxferd {result.software_there} there"
    if result.median_s > SLOW_ROUND_TRIP_S:
        return warn("reach", found, "a pull takes three round trips: look at the network between", **facts)
    return ok("reach", found, **facts)


def _connection(peers: Sequence[Mapping[str, Any]], peer: Endpoint) -> Finding:
    """Return what the local daemon's own connection to the peer is like."""
    for one in peers:
        if peer not in (one["endpoint"], address_of(Endpoint(one["endpoint"]))):
            continue
        round_trip, last = one.get("round_trip_s"), one.get("last_reply_s")
        facts = {"state": one["state"], "round_trip_s": round_trip, "last_reply_s": last}
        found = one["state"]
        found += f", round trip {format_time(round_trip)}" if round_trip is not None else ""
        found += f", last reply {format_time(last)} ago" if last is not None else ""
        if one["state"] != "up":
            todo = "where `ping` works and this stays: `kvxferd drop-peer`, so that the daemon connects again"
            return warn("daemon's connection", found, todo, **facts)
        return ok("daemon's connection", found, **facts)
    return ok("daemon's connection", "none now: it is made by the first pull from there", state="none")


def _reads_from(records: Sequence[Mapping[str, Any]], peer: Endpoint) -> Finding:
    """Return what pulls of this node from the peer came to."""
    pulls = [r for r in records if r["kind"] == "pull" and _is_at(r.get("peer", ""), peer)]
    delivered = [pull for pull in pulls if pull["outcome"] == "delivered"]
    failed = [pull for pull in pulls if pull["outcome"] == "failed"]
    facts: dict[str, Any] = {"delivered": len(delivered), "failed": len(failed)}
    if not pulls:
        return ok("reads from it", "none in the history", **facts)
    found = f"{len(delivered)} delivered, {len(failed)} failed"
    speeds = [
        pull["bytes"] / read_s / 1e9
        for pull in delivered
        if pull["bytes"] >= MIN_MEASURED_BYTES
        and (read_s := pull["phases_s"].get("post", 0.0) + pull["phases_s"].get("wire", 0.0)) > 0
    ]
    if speeds:
        facts["gigabytes_per_s"] = statistics.median(speeds)
        found += (
            f"; {statistics.median(speeds):.3g} GB/s (median of {len(speeds)}, {max(speeds):.3g} at best)"
        )
    ways = Counter[str]()
    for pull in delivered:
        ways.update(pull.get("ways", {}))
    found += f"; read {', '.join(f'{way} {format_size(n)}' for way, n in ways.most_common())}" if ways else ""
    if not failed:
        return ok("reads from it", found, **facts)
    code, times = Counter(pull["code"] or "" for pull in failed).most_common(1)[0]
    last = next(pull for pull in reversed(failed) if (pull["code"] or "") == code)
    facts |= {"code": code, "last_failure": last["message"]}
    found += f"; {times} with {code}, the last: {last['message']}"
    return warn("reads from it", found, f"docs/how-to/when-something-is-wrong.md explains {code}", **facts)


def _reads_by(records: Sequence[Mapping[str, Any]], peer: Endpoint) -> Finding:
    """Return what the peer's engines read of transfers that were published here."""
    readers = [
        reader
        for record in records
        if record["kind"] == "release"
        for reader in record.get("readers", ())
        if any(_is_at(one, peer) for one in reader["peers"])
    ]
    num_bytes = sum(reader["bytes"] for reader in readers)
    facts = {"transfers": len(readers), "bytes": num_bytes}
    if not readers:
        return ok("reads by it", "none in the history; run doctor there for its pulls", **facts)
    return ok("reads by it", f"{len(readers)} transfers, {format_size(num_bytes)}", **facts)


def _is_at(endpoint: str, peer: Endpoint) -> bool:
    """Whether a record's endpoint is the peer's; a peer without its key means every key there."""
    return bool(endpoint) and peer in (endpoint, address_of(Endpoint(endpoint)))
