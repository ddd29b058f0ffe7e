"""`kvxferd top`: what the node does now, and what is wrong with it, as the status page shows it."""

from __future__ import annotations

import io
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import click
import msgspec

from kvxferd.cli import listing
from kvxferd.cli.options import json_option, with_control_client
from kvxferd.errors import KvxferdError
from kvxferd.fd_wait import wait_readable
from kvxferd.records import NodeSnapshot
from kvxferd.telemetry.overview import FailureReason, Level, NodeVerdict, running_pulls
from kvxferd.telemetry.samples import LastMinute, SampleReport
from kvxferd.telemetry.units import (
    UNKNOWN,
    format_clock,
    format_count,
    format_rate,
    format_share,
    format_size,
    format_time,
)
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import Column, print_json, print_line, print_table
from kvxferd.wire.endpoint import address_of

# A terminal shows some dozen lines: the page has more of each.
MAX_ROWS = 8
_STYLES = {Level.GOOD: "bold green", Level.WARN: "bold yellow", Level.BAD: "bold red"}
# The other screen, without line breaks of its own: what was on the terminal is there afterwards.
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?7l", "\x1b[?7h\x1b[?1049l"
_HOME_AND_CLEAR = "\x1b[H\x1b[2J"


@click.command()
@click.option("--once", is_flag=True, help="Print it once. The default where standard output is no terminal.")
@click.option(
    "--interval",
    "interval_s",
    type=click.IntRange(1, 86_400),
    default=2,
    show_default=True,
    metavar="SECONDS",
    help="Renew it every so many seconds, until q or Ctrl-C.",
)
@json_option
@with_control_client
def top(daemon: ControlClient, as_json: bool, once: bool, interval_s: int) -> None:
    """Show traffic, pairs of engines, failures and their reasons, peers and slow pulls of this node.

    It is what the status page shows, from the same samples: one in ten seconds for 15 minutes. Times are UTC.
    With --json: the replies of /v1/status and /v1/samples.
    """

    def show() -> None:
        status, samples = daemon.get("/v1/status"), daemon.get("/v1/samples")
        if as_json:
            print_json({"status": status, "samples": samples})
        else:
            print_report(status, samples)

    if once or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        show()
    else:
        _show_until_q(show, interval_s)


class _Frame(io.StringIO):
    """What is printed for one screen."""

    def isatty(self) -> bool:
        return True


def _show_until_q(show: Callable[[], object], interval_s: int) -> None:
    """Redraw the terminal every so many seconds. A daemon that restarts is shown again once it serves."""
    with _full_screen():
        while True:
            frame = _Frame()
            with redirect_stdout(frame):
                try:
                    show()
                except KvxferdError as lost:
                    print_line(f"{lost.message} [{lost.code.value}]; trying again")
            lines = frame.getvalue().splitlines()[: os.get_terminal_size().lines - 1]
            sys.stdout.write(_HOME_AND_CLEAR + "\n".join(lines))
            sys.stdout.flush()
            if wait_readable([sys.stdin.fileno()], interval_s) and b"q" in os.read(0, 64):
                return


@contextmanager
def _full_screen() -> Iterator[None]:
    """Take the terminal's other screen, and keys as they are pressed, without an echo, until Ctrl-C."""
    modes = termios.tcgetattr(0)
    try:
        tty.setcbreak(0)
        sys.stdout.write(_OTHER_SCREEN)
        yield
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(_FIRST_SCREEN)
        sys.stdout.flush()
        termios.tcsetattr(0, termios.TCSADRAIN, modes)


def print_report(status: dict[str, Any], samples: dict[str, Any]) -> None:
    """Print the replies of `/v1/status` and `/v1/samples`."""
    from kvxferd.telemetry.warnings import NodeWarning  # it loads structlog

    node = msgspec.convert(status["node"], NodeSnapshot)
    report = msgspec.convert(samples, SampleReport)
    verdict = msgspec.convert(status["verdict"], NodeVerdict)
    print_line(f"{address_of(node.endpoint)}, version {status['version']}", "bold")
    print_line(verdict.text, _STYLES[verdict.level])
    if verdict.remedy:
        print_line(f"to do: {verdict.remedy}")
    for warning in reversed(msgspec.convert(status["warnings"], list[NodeWarning])):
        print_line(f"{warning.kind.value} since {format_clock(warning.since)}Z: {warning.text}", "yellow")
    print_line(_last_minute(msgspec.convert(status["last_minute"], LastMinute), node))
    _print_first("Pairs of engines, 15 minutes", PAIRS, sorted(report.pairs, key=lambda row: -row.delivered))
    if reasons := msgspec.convert(samples["failure_reasons"], list[FailureReason]):
        _print_first("Why pulls failed in the last 15 minutes", REASONS, reasons)
    if node.pulls:
        oldest = sorted(node.pulls, key=lambda pull: -pull.age_s)
        _print_first("Running pulls, the oldest first", listing.PULLS.columns, oldest)


def _print_first(title: str, columns: Sequence[Column], rows: Sequence[Any]) -> None:
    print_line("")
    print_table(title, columns, rows[:MAX_ROWS], more=max(0, len(rows) - MAX_ROWS))


def _last_minute(minute: LastMinute, node: NodeSnapshot) -> str:
    share = format_share(minute.failure_share) if minute.delivered + minute.failed else UNKNOWN
    num_running, oldest = running_pulls(node)
    rate = (minute.delivered + minute.failed) / max(minute.seconds, 1)
    return (
        f"in {format_rate(minute.pulled_bytes_per_s)}, out {format_rate(minute.served_bytes_per_s)}, "
        f"{rate:.3g} pulls/s, {share} failed, p50 {format_time(minute.p50_s)}, "
        f"p99 {format_time(minute.p99_s)}, {format_count(num_running)} running, "
        f"oldest {format_time(oldest.age_s if oldest else None)}"
    )


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
