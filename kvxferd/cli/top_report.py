"""The report of `kvxferd top`: the status page's content for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from kvxferd.cli.transfers import format_read
from kvxferd.ids import Endpoint
from kvxferd.records import NodeSnapshot, PullRecord, ReleaseRecord
from kvxferd.telemetry.overview import FailureReason, Level, NodeVerdict, PeerLine, longest_phases
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
from kvxferd.tooling.output import console, plain_text, print_fitted, print_line, print_table
from kvxferd.wire.endpoint import address_of

# A terminal shows some dozen lines: the page has more of each.
MAX_ROWS = 8
_STYLES = {Level.GOOD: "bold green", Level.WARN: "bold yellow", Level.BAD: "bold red"}
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*#@"
_GAP = "?"  # no slot


def print_report(status: dict[str, Any], samples: dict[str, Any]) -> None:
    """Print the replies of `/v1/status` and `/v1/samples`."""
    node = msgspec.convert(status["node"], NodeSnapshot)
    report = msgspec.convert(samples, SampleReport)
    warnings = msgspec.convert(status["active_warnings"], list[NodeWarning])
    verdict = msgspec.convert(status["verdict"], NodeVerdict)
    out = console()
    out.print(Text(f"{address_of(node.endpoint)}, version {status['version']}", style="bold"), soft_wrap=True)
    out.print(Text(plain_text(verdict.text).plain, style=_STYLES[verdict.level]))
    if verdict.remedy:
        print_line(f"to do: {verdict.remedy}")
    for warning in reversed(warnings):
        since = f"{warning.kind.value} since {format_clock(warning.since)} UTC: "
        out.print(Text.assemble((since, "yellow"), plain_text(warning.text)))
    out.print()
    print_fitted(out, _numbers(report.last_minute), _charts(report, out.width))
    out.print()
    _print_pulls(node, samples)
    _print_sums(report, samples)
    _print_notable(samples)


def _numbers(minute: LastMinute) -> Table:
    table = Table.grid(padding=(0, 3))
    share = format_share(minute.failure_share) if minute.delivered + minute.failed else UNKNOWN
    oldest = format_time(minute.oldest_pull_s) if minute.running_pulls else UNKNOWN
    rate = (minute.delivered + minute.failed) / max(minute.seconds, 1)
    rows = [
        (f"in {format_rate(minute.pulled_bytes_per_s)}", f"out {format_rate(minute.served_bytes_per_s)}"),
        (f"{rate:.3g} pulls/s", f"{share} failed"),
        (f"p50 {format_time(minute.p50_s)}", f"p99 {format_time(minute.p99_s)}"),
        (f"{format_count(minute.running_pulls)} running", f"oldest {oldest}"),
    ]
    table.add_row(*(plain_text(value) for pair in rows for value in pair))
    return table


def _charts(report: SampleReport, width: int) -> Table:
    num_columns = max(20, min(width - 30, RING_S // SLOT_S))
    table = Table.grid(padding=(0, 2))
    rows: list[tuple[str, str, bool, Callable[[float], str]]] = [
        ("in", "pulled_bytes", True, format_rate),
        ("out", "served_bytes", True, format_rate),
        ("failed", "failed", True, lambda value: f"{value:.3g}/s"),
        ("p99", "p99_s", False, format_time),
    ]
    for name, field, is_rate, form in rows:
        bars, top = sparkline(report.slots, field, num_columns, is_rate=is_rate)
        style = "red" if name == "failed" else ""
        table.add_row(name, Text(bars, style=style), f"max {form(top)}")
    table.add_row("", Text("-15 min" + "now".rjust(num_columns - 7)), "")
    return table


def sparkline(
    slots: Sequence[SlotRow | None], field: str, num_columns: int, *, is_rate: bool
) -> tuple[str, float]:
    """Return one character for each part of the last 15 minutes, and the value of the highest.

    A space is zero, `?` a part without a slot. With `is_rate` a part's value is the field's sum per second,
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
    top = max((value for value in found if value is not None), default=0.0)
    bars = (
        _BARS if (getattr(sys.__stdout__, "encoding", None) or "").lower().startswith("utf") else _ASCII_BARS
    )
    return "".join(_bar(value, top, bars) for value in found), top


def _bar(value: float | None, top: float, bars: str) -> str:
    if value is None:
        return _GAP
    return bars[min(int(value / top * len(bars)), len(bars) - 1)] if value else " "


def _print_pulls(node: NodeSnapshot, samples: dict[str, Any]) -> None:
    if reasons := msgspec.convert(samples["failure_reasons"], list[FailureReason]):
        found = [(reason.num_pulls, reason.last) for reason in reasons[:MAX_ROWS]]
        print_table(
            "Why pulls failed in the last 15 minutes",
            ("pulls", "code", "from", "to", "peer", "phase", "did not answer", "last", "message"),
            [
                (num, r.code or "failed", r.source, r.sink, address_of(r.peer), r.failed_phase, r.silent,
                 format_clock(r.ended_at), f"{r.message} ({r.transfer_id})")
                for num, r in found
            ],
        )  # fmt: skip
    if node.pulls:
        print_table(
            "Running pulls, the oldest first",
            ("transfer", "from", "to", "rank", "phase", "read", "age", "deadline in"),
            [
                (p.transfer_id, p.source, p.sink, p.rank, p.phase, format_read(p), format_time(p.age_s),
                 format_time(max(p.deadline_left_s, 0.0)))
                for p in sorted(node.pulls, key=lambda pull: -pull.age_s)[:MAX_ROWS]
            ],
        )  # fmt: skip


def _print_sums(report: SampleReport, samples: dict[str, Any]) -> None:
    print_table(
        "Pairs of engines, 15 minutes",
        ("from", "to", "delivered", "failed", "bytes", "p50", "p99", "last failure"),
        [
            (row.source, row.sink, row.delivered, row.failed, format_size(row.pulled_bytes),
             format_time(row.p50_s), format_time(row.p99_s),
             f"{row.last_code} at {format_clock(row.last_failed_at)}" if row.last_code else "")
            for row in report.pairs[:MAX_ROWS]
        ],
    )  # fmt: skip
    print_table(
        "Peers, 15 minutes",
        ("peer", "state", "round trip", "last reply", "transport", "delivered", "failed", "bytes"),
        [
            (address_of(Endpoint(line.peer)), line.state, format_time(line.round_trip_s),
             f"{format_time(line.last_reply_s)} ago" if line.last_reply_s is not None else UNKNOWN,
             line.transport or UNKNOWN, line.delivered, line.failed, format_size(line.pulled_bytes))
            for line in msgspec.convert(samples["peers"], list[PeerLine])[:MAX_ROWS]
        ],
    )  # fmt: skip


def _print_notable(samples: dict[str, Any]) -> None:
    if slowest := msgspec.convert(samples["slowest_pulls"], list[PullRecord]):
        print_table(
            "The slowest pulls of 15 minutes",
            ("at", "transfer", "from", "to", "bytes", "took", "longest phases"),
            [
                (format_clock(r.ended_at), r.transfer_id, r.source, r.sink, format_size(r.bytes),
                 format_time(r.total_s), longest_phases(r))
                for r in slowest[:MAX_ROWS]
            ],
        )  # fmt: skip
    if expired := msgspec.convert(samples["expired_leases"], list[ReleaseRecord]):
        print_table(
            "Expired leases: published here, and not read in time",
            ("at", "transfer", "engine", "held"),
            [
                (format_clock(r.ended_at), r.transfer_id, r.engine_id, format_time(r.held_s))
                for r in expired[:MAX_ROWS]
            ],
        )
