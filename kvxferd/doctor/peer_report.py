"""What `kvxferd ping` prints, and its exit codes."""

from __future__ import annotations

import click

import kvxferd
from kvxferd.doctor.peer_ping import Outcome, Ping
from kvxferd.tooling.exit_codes import EXIT_OK
from kvxferd.tooling.output import format_duration, plain_text

# In the order of the steps, so that a higher code is a later step.
FIRST_FAILURE = 10
_FAILURES = [outcome for outcome in Outcome if outcome is not Outcome.OK]


def exit_status_of(outcome: Outcome) -> int:
    """Return the exit code of an outcome: 0, or a code of its own."""
    return EXIT_OK if outcome is Outcome.OK else FIRST_FAILURE + _FAILURES.index(outcome)


def print_ping(result: Ping) -> None:
    """Print the result, a fact a line."""
    _print(f"{result.endpoint}: {result.message} [{result.outcome.value}]")
    if result.remedy:
        _print(f"  to do: {result.remedy}")
    if result.outcome is not Outcome.OK:
        return
    software = f", kvxferd {result.software_there}" if result.software_there else ""
    _print(f"  there: boot {result.boot}, protocol version {result.versions_there}{software}")
    _print(f"  here:  protocol version {result.versions_here}, kvxferd {kvxferd.__version__}")
    fastest, slowest = min(result.round_trips_s), max(result.round_trips_s)
    _print(
        f"  round trips: {len(result.round_trips_s)}, median {format_duration(result.median_s)} "
        f"({format_duration(fastest)} to {format_duration(slowest)}); "
        f"connecting took {format_duration(result.connect_s)}"
    )


def _print(line: str) -> None:
    click.echo(plain_text(line).plain)
