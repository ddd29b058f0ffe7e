"""What HTTP says of a node for people, computed once: the verdict, peers, and why pulls failed.

The status page, `kvxferd top` and `kvxferd status` show it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from kvxferd.ids import Endpoint
from kvxferd.records import LimitSnapshot, NodeSnapshot, PeerSnapshot, PullRecord, PullSnapshot
from kvxferd.telemetry.remedies import remedy_of
from kvxferd.telemetry.samples import LastMinute, PeerRow
from kvxferd.telemetry.units import format_count, format_share, format_time
from kvxferd.wire.endpoint import address_of, host_of

# A share of failed pulls from which a node counts as failing; below, one is still named.
FAILING_SHARE = 0.01
# One user gets seven eighths of a limit, and then `busy`: KvxferdLimitNear has the same share.
NEAR_LIMIT_SHARE = 0.8
# A pull that takes this long is worth a line, long before its deadline of 30 s or more.
LONG_PULL_S = 3.0
IN_DOUBT = "in-doubt"


class Level(StrEnum):
    """How bad a verdict is."""

    GOOD = "good"
    WARN = "warn"
    BAD = "bad"


class NodeVerdict(msgspec.Struct, frozen=True):
    """One sentence on the node, and how bad it is."""

    level: Level
    text: str
    remedy: str = ""  # what to do about the pulls that fail; "" where none does


def verdict_of(
    node: NodeSnapshot,
    *,
    reasons: Sequence[str],
    warnings: Sequence[str],
    minute: LastMinute,
    failed: Sequence[PullRecord] = (),
    config_path: str = "",
) -> NodeVerdict:
    """Return what an operator must know first.

    `reasons`: why the node is not ready. `warnings`: the kinds of the current ones. `failed`: the pulls that
    did, the latest first. `config_path`: of the daemon's configuration file, for commands that need it; "":
    it has none.
    """
    if node.draining:
        return NodeVerdict(Level.WARN, f"Draining: nothing new is taken. {_pulls(minute)}")
    if reasons:
        return NodeVerdict(Level.BAD, f"Not ready: {'; '.join(reasons)}.")
    kinds = ", ".join(dict.fromkeys(warnings))
    noun = "warning" if len(warnings) == 1 else "warnings"
    others = f"{_long_pull(node)}{_near_limits(node.limits)}"
    if warnings:
        others += f" {len(warnings)} {noun}: {kinds}."
    if minute.failed:
        level = Level.BAD if minute.failure_share >= FAILING_SHARE else Level.WARN
        remedy = remedy_of(minute.worst_code, Endpoint(minute.worst_peer), config_path)
        last = next((f" The last: {one.message}." for one in failed if one.code == minute.worst_code), "")
        return NodeVerdict(level, f"Pulls fail: {_pulls(minute)}{last}{others}", remedy)
    if others:
        return NodeVerdict(Level.WARN, f"Ready, but:{others} {_pulls(minute)}")
    return NodeVerdict(Level.GOOD, f"Ready. {_pulls(minute)}")


def _near_limits(limits: Iterable[LimitSnapshot]) -> str:
    near = [limit for limit in limits if limit.used and limit.used >= NEAR_LIMIT_SHARE * limit.limit]
    return "".join(
        f" {format_count(limit.used)} of {limit.name} = {format_count(limit.limit)} are used."
        for limit in near
    )


def _pulls(minute: LastMinute) -> str:
    when = "in the last minute" if minute.seconds >= 60 else f"in the last {minute.seconds:.0f} s"
    ended = minute.delivered + minute.failed
    if not ended:
        return f"No pull ended {when}."
    if not minute.failed:
        noun = "pull" if ended == 1 else "pulls"
        return f"{format_count(ended)} {noun} delivered {when}, none failed."
    text = (
        f"{format_count(minute.failed)} of {format_count(ended)} failed {when} "
        f"({format_share(minute.failure_share)})"
    )
    from_peer = f" from {address_of(Endpoint(minute.worst_peer))}" if minute.worst_peer else ""
    return f"{text}, most with {minute.worst_code}{from_peer}."


def running_pulls(node: NodeSnapshot) -> tuple[int, PullSnapshot | None]:
    """Return how many pulls have not ended, and the oldest of them. Those in doubt have."""
    shown = [pull for pull in node.pulls if pull.phase != IN_DOUBT]
    num_running = sum(node.pull_phases.values()) - node.pull_phases.get(IN_DOUBT, 0)
    return num_running, max(shown, key=lambda pull: pull.age_s, default=None)


def _long_pull(node: NodeSnapshot) -> str:
    num_running, oldest = running_pulls(node)
    if oldest is None or oldest.age_s < LONG_PULL_S:
        return ""
    runs = f"has run for {format_time(oldest.age_s)}{f', {oldest.waits}' if oldest.waits else ''}."
    if num_running == 1:
        return f" The one running pull {runs}"
    return f" The oldest of {format_count(num_running)} running pulls {runs}"


class PeerLine(PeerRow, frozen=True, kw_only=True):
    """One other daemon: the pulls from it, and what is known of it."""

    state: str
    round_trip_s: float | None
    last_reply_s: float | None
    transport: str  # over which local movers read from such nodes; "" where none has connected
    num_grants: int
    engines: tuple[str, ...]


def peer_lines(node: NodeSnapshot, rows: Iterable[PeerRow]) -> list[PeerLine]:
    """Return all peers, known ones and those that pulls have named: most failures first, then by name."""
    known = {str(peer.endpoint): peer for peer in node.peers}
    counted = {row.peer: row for row in rows}
    lines = [
        _peer_line(node, known.get(endpoint), counted.get(endpoint) or PeerRow(peer=endpoint))
        for endpoint in dict.fromkeys([*known, *counted])
    ]
    return sorted(lines, key=lambda line: (-line.failed, line.peer))


def _peer_line(node: NodeSnapshot, peer: PeerSnapshot | None, row: PeerRow) -> PeerLine:
    state = peer.state if peer is not None else "not connected"
    if row.peer == node.endpoint:
        state = "this node"
    return PeerLine(
        **msgspec.structs.asdict(row),
        state=state,
        round_trip_s=peer.round_trip_s if peer else None,
        last_reply_s=peer.last_reply_s if peer else None,
        transport=_transport(node, row.peer),
        num_grants=peer.num_grants if peer else 0,
        engines=tuple(str(engine.engine_id) for engine in peer.engines) if peer else (),
    )


def _transport(node: NodeSnapshot, endpoint: str) -> str:
    """Return the transports of local ranks to processes of that node: ``rc (network)``.

    Which of several a read took is not known; a node has most often one to the network, one to itself.
    """
    reach = "node" if host_of(Endpoint(endpoint)) == host_of(node.endpoint) else "network"
    used = {
        lanes.lanes
        for engine in node.engines
        for rank in engine.ranks
        for lanes in rank.lanes
        if lanes.reach == reach
    }
    return f"{', '.join(sorted(used))} ({reach})" if used else ""


class FailureReason(msgspec.Struct, frozen=True):
    """Failed pulls of one reason."""

    num_pulls: int
    last: PullRecord


def failure_reasons(failed: Sequence[PullRecord], now: float, within_s: float) -> list[FailureReason]:
    """Return the failed pulls of the last seconds by code, peer, phase and who did not answer.

    `failed`: the latest first. The commonest reason first.
    """
    found: dict[tuple[object, ...], FailureReason] = {}
    for record in failed:
        if record.ended_at < now - within_s:
            continue
        key = record.code, record.peer, record.failed_phase, record.silent, record.source, record.sink
        before = found.get(key)
        found[key] = FailureReason(before.num_pulls + 1, before.last) if before else FailureReason(1, record)
    return sorted(found.values(), key=lambda reason: -reason.num_pulls)
