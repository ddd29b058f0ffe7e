"""`kvxferd top`: what the node does now, and what is wrong with it, as the status page shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec

from kvxferd.cli import history, listing
from kvxferd.cli.options import MAX_INTERVAL_S, MIN_INTERVAL_S, json_option, with_control_client
from kvxferd.ids import Endpoint
from kvxferd.records import NodeSnapshot, PullRecord, ReleaseRecord
from kvxferd.telemetry.overview import FailureReason, Level, NodeVerdict, PeerLine
from kvxferd.telemetry.samples import RING_S, SLOT_S, LastMinute, SampleReport, SlotRow
from kvxferd.telemetry.units import (
    UNKNOWN,
    format_clock,
    format_count,
    format_rate,
    format_share,
    format_size,
    format_time,
)
from kvxferd.telemetry.warnings.warning_list import NodeWarning
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import Column, console, print_json, print_line, print_table
from kvxferd.wire.endpoint import address_of

# A terminal shows some dozen lines: the page has more of each.
MAX_ROWS = 8
_STYLES = {Level.GOOD: "bold green", Level.WARN: "bold yellow", Level.BAD: "bold red"}
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_-=+*#%@"


@click.command()
@click.option("--once", is_flag=True, help="Print it once. The default where standard output is no terminal.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(MIN_INTERVAL_S, MAX_INTERVAL_S),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Renew it every so many seconds, until q or Ctrl-C.",
)
@json_option
@with_control_client
def top(daemon: ControlClient, as_json: bool, once: bool, interval_s: float) -> None:
    """Show traffic, pairs of engines, failures and their reasons, peers and slow pulls of this node.

    It is what the status page shows, from the same samples: one in ten seconds for 15 minutes. Times are UTC.
    With --json: the replies of /v1/status and /v1/samples.
    """
    # Imported here: a completion needs no tables.
    from kvxferd.tooling.watch import watch

    if not interval_s >= MIN_INTERVAL_S:  # not a number, which no range excludes
        raise click.BadParameter("give a number of seconds", param_hint="--interval")

    def show() -> None:
        status, samples = daemon.get("/v1/status"), daemon.get("/v1/samples")
        if as_json:
            print_json({"status": status, "samples": samples})
        else:
            print_report(status, samples)

    if once or as_json or not sys.stdout.isatty():
        show()
    else:
        watch("kvxferd top", show, interval_s, as_json)


def print_report(status: dict[str, Any], samples: dict[str, Any]) -> None:
    """Print the replies of `/v1/status` and `/v1/samples`."""
    node = msgspec.convert(status["node"], NodeSnapshot)
    report = msgspec.convert(samples, SampleReport)
    verdict = msgspec.convert(status["verdict"], NodeVerdict)
    print_line(f"{address_of(node.endpoint)}, version {status['version']}", "bold")
    print_line(verdict.text, _STYLES[verdict.level])
    if verdict.remedy:
        print_line(f"to do: {verdict.remedy}")
    for warning in reversed(msgspec.convert(status["active_warnings"], list[NodeWarning])):
        print_line(f"{warning.kind.value} since {format_clock(warning.since)}Z: {warning.text}", "yellow")
    print_line(_last_minute(report.last_minute))
    _print_charts(report)
    _print_first("Pairs of engines, 15 minutes", PAIRS, sorted(report.pairs, key=lambda row: -row.delivered))
    if reasons := msgspec.convert(samples["failure_reasons"], list[FailureReason]):
        _print_first("Why pulls failed in the last 15 minutes", REASONS, reasons)
    if node.pulls:
        oldest = sorted(node.pulls, key=lambda pull: -pull.age_s)
        _print_first("Running pulls, the oldest first", listing.PULLS.columns, oldest)
    _print_first("Peers, 15 minutes", PEERS, msgspec.convert(samples["peers"], list[PeerLine]))
    if slowest := msgspec.convert(samples["slowest_pulls"], list[PullRecord]):
        _print_first("The slowest pulls of 15 minutes", history.COLUMNS, slowest)
    if expired := msgspec.convert(samples["expired_leases"], list[ReleaseRecord]):
        _print_first("Expired leases: published here, and not read in time", history.COLUMNS, expired)


def _print_first(title: str, columns: Sequence[Column], rows: Sequence[Any]) -> None:
    print_line("")
    print_table(title, columns, rows[:MAX_ROWS], more=max(0, len(rows) - MAX_ROWS))


def _last_minute(minute: LastMinute) -> str:
    share = format_share(minute.failure_share) if minute.delivered + minute.failed else UNKNOWN
    oldest = format_time(minute.oldest_pull_s) if minute.running_pulls else UNKNOWN
    rate = (minute.delivered + minute.failed) / max(minute.seconds, 1)
    return (
        f"in {format_rate(minute.pulled_bytes_per_s)}, out {format_rate(minute.served_bytes_per_s)}, "
        f"{rate:.3g} pulls/s, {share} failed, p50 {format_time(minute.p50_s)}, "
        f"p99 {format_time(minute.p99_s)}, {format_count(minute.running_pulls)} running, oldest {oldest}"
    )


def _print_charts(report: SampleReport) -> None:
    num_columns = max(20, min(console().width - 25, RING_S // SLOT_S))
    rows: list[tuple[str, str, bool, Callable[[float], str]]] = [
        ("in", "pulled_bytes", True, format_rate),
        ("out", "served_bytes", True, format_rate),
        ("failed", "failed", True, lambda value: f"{value:.3g}/s"),
        ("p99", "p99_s", False, format_time),
    ]
    print_line("")
    for name, field, is_rate, form in rows:
        bars, highest = sparkline(report.slots, field, num_columns, is_rate=is_rate)
        print_line(f"{name:6}  {bars}  max {form(highest)}")
    print_line(f"{'':6}  -15 min{'now':>{num_columns - 7}}")


def sparkline(
    slots: Sequence[SlotRow | None], field: str, num_columns: int, *, is_rate: bool
) -> tuple[str, float]:
    """Return one character for each part of the last 15 minutes, and the value of the highest.

    A dot is zero, a blank a part without a slot. With `is_rate` a part's value is the field's sum per second,
    else its largest value.
    """
    num_slots = RING_S // SLOT_S
    padded = [None] * (num_slots - len(slots)) + list(slots)
    found: list[float | None] = []
    for column in range(num_columns):
        start, end = column * num_slots // num_columns, (column + 1) * num_slots // num_columns
        here = [slot for slot in padded[start:end] if slot is not None]
        values = [value for slot in here if (value := getattr(slot, field)) is not None]
        if not here:
            found.append(None)
        elif is_rate:
            found.append(sum(values) / max(sum(slot.span_s for slot in here), 1))
        else:
            found.append(max(values, default=0.0))
    highest = max((value for value in found if value is not None), default=0.0)
    encoding = (getattr(sys.__stdout__, "encoding", None) or "").lower()
    bars = _BARS if encoding.startswith("utf") else _ASCII_BARS
    return "".join(_bar(value, highest, bars) for value in found), highest


def _bar(value: float | None, highest: float, bars: str) -> str:
    if value is None:
        return " "
    return bars[min(int(value / highest * len(bars)), len(bars) - 1)] if value else "."


def _clock(unix_time: float) -> str:
    return f"{format_clock(unix_time)}Z"


PAIRS = (
    Column("from", lambda pair: pair.source),
    Column("to", lambda pair: pair.sink),
    Column("delivered", lambda pair: pair.delivered),
    Column("failed", lambda pair: pair.failed),
    Column("size", lambda pair: pair.pulled_bytes, format_size, 1),
    Column("p50", lambda pair: pair.p50_s, format_time, 3),
    Column("p99", lambda pair: pair.p99_s, format_time),
    Column(
        "last failure",
        lambda pair: f"{pair.last_code} at {_clock(pair.last_failed_at)}" if pair.last_code else None,
        rank=2,
    ),
)
REASONS = (
    Column("pulls", lambda reason: reason.num_pulls),
    Column("code", lambda reason: reason.last.code or "failed"),
    Column("from", lambda reason: reason.last.source, rank=2),
    Column("to", lambda reason: reason.last.sink, rank=3),
    Column("peer", lambda reason: address_of(reason.last.peer), rank=4),
    Column("phase", lambda reason: reason.last.failed_phase, rank=5),
    Column("did not answer", lambda reason: reason.last.silent, rank=1),
    Column("last", lambda reason: reason.last.ended_at, _clock),
    Column("message", lambda reason: f"{reason.last.message} ({reason.last.transfer_id})"),
)
PEERS = (
    Column("peer", lambda line: address_of(Endpoint(line.peer))),
    Column("state", lambda line: line.state),
    Column("round trip", lambda line: line.round_trip_s, format_time, 1),
    Column("last reply", lambda line: line.last_reply_s, lambda ago_s: f"{format_time(ago_s)} ago", 2),
    Column("transport", lambda line: line.transport or None, rank=3),
    Column("delivered", lambda line: line.delivered),
    Column("failed", lambda line: line.failed),
    Column("size", lambda line: line.pulled_bytes, format_size, 4),
)
