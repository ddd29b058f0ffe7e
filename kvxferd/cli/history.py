"""`kvxferd history`: what ended on this node, when, with whom, and what went wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

import click

from kvxferd.cli.options import json_option, with_control_client
from kvxferd.records import HandshakeRecord, PullRecord, Record, ReleaseRecord
from kvxferd.telemetry.history import DEFAULT_PAGE, MAX_PAGE, record_from_json
from kvxferd.telemetry.units import format_date, format_size, format_time
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import Column, print_json, print_table
from kvxferd.wire.endpoint import address_of

KINDS = "pull,handshake,release"
SHOWN = 40

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h)?")


class Duration(click.ParamType[float]):
    """A duration such as ``100ms``; without a unit in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return it in seconds."""
        if isinstance(value, float):
            return value
        match = _DURATION.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no duration; give one such as 100ms, 2.5s or 10m", param, ctx)
        return float(match[1]) * _UNITS_S[match[2] or "s"]


@click.command()
@click.option(
    "--failed",
    is_flag=True,
    help="Only pulls and handshakes that failed, and releases that no engine wanted.",
)
@click.option("--slower", type=Duration(), metavar="TIME", help="Only what took that long: 100ms, 2s.")
@click.option("--since", type=Duration(), metavar="TIME", help="Only what ended so long ago: 90s, 10m, 2h.")
@click.option("--transfer", metavar="ID", help="Only this transfer's pulls, and its release.")
@click.option("--engine", metavar="ID", help="Only of this engine, at either end.")
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_PAGE),
    help=f"At most so many of the last: {SHOWN}, {DEFAULT_PAGE} with --json, {MAX_PAGE} with --since.",
)
@json_option
@with_control_client
def history(
    daemon: ControlClient,
    as_json: bool,
    failed: bool,
    slower: float | None,
    since: float | None,
    transfer: str | None,
    engine: str | None,
    limit: int | None,
) -> None:
    """Show what ended on this node: pulls, handshakes, and releases of what it published. Times are UTC."""
    shown = limit or (MAX_PAGE if since is not None else DEFAULT_PAGE if as_json else SHOWN)
    query = {
        "kind": KINDS,
        **({"failed": "true"} if failed else {}),
        **({"slower": repr(slower)} if slower else {}),
        **({"transfer": transfer} if transfer else {}),
        **({"engine": engine} if engine else {}),
        "limit": str(shown),
    }
    page = daemon.get(f"/v1/history?{urlencode(query)}")
    is_cut = len(page["records"]) == shown < MAX_PAGE
    if since is not None:
        first = time.time() - since
        page["records"] = [record for record in page["records"] if record["ended_at"] >= first]
    if as_json:
        print_json(page)
        return
    print_table("History", COLUMNS, map(record_from_json, page["records"]), details=_details)
    if is_cut:
        click.echo(f"These are the last {shown}; --limit {MAX_PAGE} shows more.", err=True)


# --- a record's line


def _details(record: Record) -> Iterable[str]:
    """Yield why the record's pull or handshake failed, and what a progressive pull hid."""
    match record:
        case PullRecord() if record.outcome != "delivered":
            silent = record.silent if record.silent not in record.message else ""
            who = f"no reply from {silent}: " if silent else ""
            yield f"    in {record.failed_phase}: {who}{record.message}"
        case HandshakeRecord() if record.outcome != "ok":
            yield f"    in handshake: {record.message}"
        case PullRecord() if record.handover_s is not None:
            yield f"    handover {format_handover(record)}"


def format_handover(record: PullRecord) -> str:
    """Return what was waited for at the end, and what was read before: ``12 ms, 470 MB (88%) hidden``."""
    if record.handover_s is None:
        return "-"
    hidden = f"{format_size(record.hidden_bytes)} ({record.hidden_bytes / max(record.bytes, 1):.0%}) hidden"
    return f"{format_time(record.handover_s)}, {hidden}"


def format_ways(ways: Mapping[str, int]) -> str | None:
    """Return how the bytes were read: ``covering``, or ``75% covering, 25% direct`` where in several ways."""
    total = sum(ways.values())
    used = sorted(((num_bytes, way) for way, num_bytes in ways.items() if num_bytes > 0), reverse=True)
    if len(used) < 2:
        return used[0][1] if used else None
    return ", ".join(f"{num_bytes / total:.0%} {way}" for num_bytes, way in used)


def _time(record: Record) -> str:
    """Return when it ended, in UTC, without the day where that is today."""
    day, _, clock = format_date(record.ended_at).partition(" ")
    today, _, _ = format_date(time.time()).partition(" ")
    clock = f"{clock}.{int(record.ended_at * 1000) % 1000:03d}Z"
    return clock if day == today else f"{day} {clock}"


def _source(record: Record) -> str | None:
    return record.source if isinstance(record, PullRecord) else getattr(record, "engine_id", None)


def _sink(record: Record) -> str | None:
    match record:
        case PullRecord():
            return f"{record.sink} {record.rank}"
        case ReleaseRecord():
            return _joined(reader.engine_id for reader in record.readers)
    return None


def _peer(record: Record) -> str | None:
    match record:
        case PullRecord() | HandshakeRecord():
            return address_of(record.peer)
        case ReleaseRecord():
            return _joined(address_of(peer) for reader in record.readers for peer in reader.peers)
    return None


def _took_s(record: Record) -> float | None:
    match record:
        case PullRecord():
            return record.total_s
        case HandshakeRecord():
            return record.elapsed_s
        case ReleaseRecord():
            return record.held_s
    return None


def _slowest(record: Record) -> str | None:
    """Return the three longest phases of a pull: ``wire 12 ms, grant 3 ms``."""
    if not isinstance(record, PullRecord):
        return None
    longest = sorted(record.phases_s.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{phase} {format_time(took_s)}" for phase, took_s in longest if took_s > 0) or None


def _end(record: Record) -> str:
    match record:
        case PullRecord():
            return (record.code or record.outcome) + (", read twice" if record.retried else "")
        case ReleaseRecord():
            return record.why
    return getattr(record, "outcome", "-")


def _joined(texts: Iterable[str]) -> str | None:
    return ", ".join(dict.fromkeys(texts)) or None


COLUMNS = (
    Column("time", _time),
    Column("what", lambda record: type(record).__name__.removesuffix("Record").lower()),
    Column("transfer", lambda record: getattr(record, "transfer_id", None)),
    Column("from", _source, rank=1),
    Column("to", _sink, rank=3),
    Column("peer", _peer, rank=5),
    Column("size", lambda record: getattr(record, "bytes", None), format_size, 4),
    Column("way", lambda record: format_ways(getattr(record, "ways", {})), rank=6),
    Column("took", _took_s, format_time),
    Column("predicted", lambda record: getattr(record, "predicted_s", None) or None, format_time, 7),
    Column("slowest", _slowest, rank=2),
    Column("end", _end),
)
