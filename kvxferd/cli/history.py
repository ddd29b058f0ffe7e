"""`kvxferd history`: what ended on this node, when, with whom, and what went wrong."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlencode

import click

from kvxferd.cli.options import json_option, watchable, with_control_client
from kvxferd.cli.transfers import format_handover, format_ways
from kvxferd.errors import Code, KvxferdError
from kvxferd.records import HandshakeRecord, PullRecord, Record, ReleaseRecord
from kvxferd.telemetry.history import DEFAULT_PAGE, MAX_PAGE, record_from_json
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import format_bytes, format_duration, plain_text, print_json
from kvxferd.wire.endpoint import address_of

KINDS = "pull,handshake,release"
HEADS = ("time", "what", "transfer", "from", "to", "peer", "bytes", "way", "total", "slowest", "end")
SHOWN = 40
SHOWN_AT_FIRST = 10  # by --follow, before what is new
FOLLOW_EVERY_S = 0.5
RETRY_S = 1.0  # after a daemon that went away

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m)?")


class Duration(click.ParamType[float]):
    """A duration such as ``100ms``; without a unit in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return it in seconds."""
        if isinstance(value, float):
            return value
        match = _DURATION.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no duration; give one such as 100ms, 2.5s or 1m", param, ctx)
        return float(match[1]) * _UNITS_S[match[2] or "s"]


@click.command()
@click.option(
    "--failed",
    is_flag=True,
    help="Only pulls and handshakes that failed, and releases that no engine wanted.",
)
@click.option("--slower", type=Duration(), metavar="TIME", help="Only what took that long: 100ms, 2s.")
@click.option("--transfer", metavar="ID", help="Only this transfer's pulls, and its release.")
@click.option("--engine", metavar="ID", help="Only of this engine, at either end.")
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_PAGE),
    help=f"At most so many of the last: {SHOWN}, {DEFAULT_PAGE} with --json, {SHOWN_AT_FIRST} with --follow.",
)
@click.option("--follow", is_flag=True, help="Go on: print each record as it comes, until interrupted.")
@json_option
@with_control_client
@watchable
def history(
    daemon: ControlClient,
    as_json: bool,
    failed: bool,
    slower: float | None,
    transfer: str | None,
    engine: str | None,
    limit: int | None,
    follow: bool,
) -> None:
    """Show what ended on this node: pulls, handshakes, and releases of what it published.

    With --json and --follow: one JSON object a line.
    """
    filters = {
        "kind": KINDS,
        **({"failed": "true"} if failed else {}),
        **({"slower": repr(slower)} if slower else {}),
        **({"transfer": transfer} if transfer else {}),
        **({"engine": engine} if engine else {}),
    }
    shown = limit or (SHOWN_AT_FIRST if follow else DEFAULT_PAGE if as_json else SHOWN)
    page = _search(daemon, filters | {"limit": str(shown)})
    if follow:
        _follow(daemon, filters, page, as_json)
    elif as_json:
        print_json(page)
    else:
        _print_page(page, shown)


def _search(daemon: ControlClient, query: dict[str, str]) -> Any:
    return daemon.get(f"/v1/history?{urlencode(query)}")


def _print_page(page: Any, limit: int) -> None:
    """Print a line for each record, in columns, and below it its details."""
    records = [record_from_json(one) for one in page["records"]]
    if not records:
        click.echo("History: none")
        return
    rows = [tuple(plain_text(cell).plain for cell in row) for row in (HEADS, *map(_row, records))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    for row, record in zip(rows, (None, *records), strict=True):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
        for line in _details(record) if record is not None else ():
            click.echo(plain_text(line).plain)
    if len(records) == limit < MAX_PAGE:
        click.echo(f"These are the last {limit}; --limit {MAX_PAGE} shows more.", err=True)


def _follow(daemon: ControlClient, filters: dict[str, str], page: Any, as_json: bool) -> None:
    try:
        while True:
            _print_lines(page, as_json)
            if page["is_complete"]:
                time.sleep(FOLLOW_EVERY_S)
            page = _search_again(daemon, filters | {"after": page["cursor"], "limit": str(MAX_PAGE)})
    except KeyboardInterrupt:
        return


def _search_again(daemon: ControlClient, query: dict[str, str]) -> Any:
    """Search; wait for a daemon that went away, because somebody who follows wants to see it come back."""
    is_lost = False
    while True:
        try:
            return _search(daemon, query)
        except KvxferdError as error:
            if error.code is not Code.DAEMON_LOST:
                raise
            if not is_lost:
                click.echo(f"kvxferd: {error.message}; waiting for it", err=True)
            is_lost = True
            time.sleep(RETRY_S)


def _print_lines(page: Any, as_json: bool) -> None:
    if page["restarted"]:
        click.echo("kvxferd: the daemon has restarted; what it had not shown is lost", err=True)
    if page["dropped"]:
        text = f"kvxferd: {page['dropped']} records came faster than they were shown, and are lost"
        click.echo(f"{text}; the log has them", err=True)
    for one in page["records"]:
        if as_json:
            sys.stdout.write(json.dumps(one) + "\n")
            continue
        record = record_from_json(one)
        sys.stdout.write("".join(f"{plain_text(line)}\n" for line in _lines(record)))
    sys.stdout.flush()


def _lines(record: Record) -> Iterable[str]:
    """Yield the record's line, and below it its details."""
    when, what, transfer, source, sink, peer, size, way, total, slowest, end = map(str, _row(record))
    phase = "" if slowest == "-" else f" ({slowest})"
    yield f"{when}  {what}  {transfer}  {source} > {sink}  {peer}  {size} {way}  {total}{phase}  {end}"
    yield from _details(record)


def _details(record: Record) -> Iterable[str]:
    """Yield why the record's pull or handshake failed, and what a progressive pull hid."""
    for failed_in, silent, text in _failure(record):
        who = f"no reply from {silent}: " if silent and silent not in text else ""
        yield f"    in {failed_in}: {who}{text}"
    if isinstance(record, PullRecord) and record.handover_s is not None:
        yield f"    handover {format_handover(record)}"


def _row(record: Record) -> tuple[object, ...]:
    """Return time, kind, transfer, both engines, peer, bytes, way, total, slowest phase and end."""
    match record:
        case PullRecord():
            slowest = max(record.phases_s.items(), key=lambda item: item[1], default=("", 0.0))
            return (
                _time(record), "pull", record.transfer_id, record.source, f"{record.sink} {record.rank}",
                address_of(record.peer), format_bytes(record.bytes), format_ways(record.ways),
                format_duration(record.total_s),
                f"{slowest[0]} {format_duration(slowest[1])}" if slowest[0] else "-",
                (record.code or record.outcome) + (", read twice" if record.retried else ""),
            )  # fmt: skip
        case HandshakeRecord():
            return (
                _time(record), "handshake", "-", record.engine_id, "-", address_of(record.endpoint), "-", "-",
                format_duration(record.elapsed_s), "-", record.outcome,
            )  # fmt: skip
        case ReleaseRecord():
            return (
                _time(record), "release", record.transfer_id, record.engine_id,
                _some(reader.engine_id for reader in record.readers),
                _some(address_of(peer) for reader in record.readers for peer in reader.peers),
                format_bytes(record.bytes), "-", format_duration(record.held_s), "-", record.why,
            )  # fmt: skip
        case _:
            return (_time(record), type(record).__name__, *["-"] * 9)


def _failure(record: Record) -> Iterable[tuple[str, str, str]]:
    """Yield the phase, who did not reply, and the message, if the record is of a failure."""
    match record:
        case PullRecord() if record.outcome != "delivered":
            yield record.failed_phase, record.silent, record.message
        case HandshakeRecord() if record.outcome != "ok":
            yield "handshake", "", record.message


def _some(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts)) or "-"


def _time(record: Record) -> str:
    """Return when it ended: the local time of day, with the day where that is another one."""
    ended, now = time.localtime(record.ended_at), time.localtime()
    day = "" if ended[:3] == now[:3] else time.strftime("%Y-%m-%d ", ended)
    return f"{day}{time.strftime('%H:%M:%S', ended)}.{int(record.ended_at * 1000) % 1000:03d}"
