"""`kvxferd status`: the node at a glance."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click
import msgspec

from kvxferd.cli.listing import engine_state
from kvxferd.cli.options import json_option, with_control_client
from kvxferd.records import NodeSnapshot, RankSnapshot
from kvxferd.telemetry.samples import LastMinute
from kvxferd.telemetry.units import format_date, format_rate, format_size, format_time
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.exit_codes import EXIT_NOT_READY
from kvxferd.tooling.output import format_count, print_fields, print_json, print_line


@click.command()
@json_option
@with_control_client
def status(daemon: ControlClient, as_json: bool) -> None:
    """Show the state of the daemon on this node.

    Exit status: 0 if it is ready, 1 if it is not, 2 if no daemon answers.
    """
    reply = daemon.get("/v1/status")
    if as_json:
        print_json(reply)
    else:
        print_fields(_lines(reply, msgspec.convert(reply["node"], NodeSnapshot)))
        if remedy := reply["verdict"]["remedy"]:
            print_line(f"to do: {remedy}")
    if not reply["ready"]:
        click.get_current_context().exit(EXIT_NOT_READY)


def _lines(reply: dict[str, Any], node: NodeSnapshot) -> list[tuple[str, str]]:
    ranks = [rank for engine in node.engines for rank in engine.ranks]
    readable = sum(engine_state(engine) == "readable" for engine in node.engines)
    return [
        ("daemon", f"{node.endpoint}, version {reply['version']}, boot {node.boot}"),
        ("state", reply["verdict"]["text"]),
        *_warnings(reply),
        *_last_minute(reply),
        ("engines", f"{len(node.engines)}, {readable} readable"),
        ("ranks", f"{len(ranks)}, {format_size(sum(rank.bytes for rank in ranks))}"),
        ("placements", _placements(ranks)),
        ("sessions", str(node.num_sessions)),
        ("peers", f"{len(node.peers)}, {sum(peer.state == 'up' for peer in node.peers)} up"),
        (
            "transfers",
            f"{sum(node.transfer_states.values())} held, {format_count(node.num_grants_given, 'grant')}",
        ),
        ("pulls", f"{sum(node.pull_phases.values())} running, {node.num_quarantined} quarantined"),
        ("retired movers", str(node.num_retired_movers)),
        ("engine ids", _ownerships(node)),
    ]


def _warnings(reply: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each warning with its kind and age."""
    from kvxferd.telemetry.warnings import NodeWarning  # it loads structlog

    warnings = msgspec.convert(reply["warnings"], list[NodeWarning])
    return [("warning", f"{w.kind.value}, since {format_date(w.since)}Z: {w.text}") for w in warnings]


def _last_minute(reply: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what was moved in the last minute, and what failed."""
    minute = msgspec.convert(reply["last_minute"], LastMinute)
    rates = (
        f"{format_count(minute.delivered, 'pull')}, {format_rate(minute.pulled_bytes_per_s)} in, "
        f"{format_rate(minute.served_bytes_per_s)} out"
    )
    if minute.p50_s is not None:
        rates += f", p50 {format_time(minute.p50_s)}, p99 {format_time(minute.p99_s)}"
    codes = ", ".join(f"{count:,} {code}" for code, count in minute.failures.items())
    why = f"{codes}; kvxferd history --failed shows them" if codes else "none"
    return [("last minute", rates), ("failures", why)]


def _placements(ranks: list[RankSnapshot]) -> str:
    """Return how many ranks have each placement: ``2 direct over cma``."""
    ways: Counter[str] = Counter()
    for rank in ranks:
        if (found := rank.placement) is not None:
            over = f" over {found.lanes}" if found.lanes else ""
            ways[f"{found.kind}{over}{'' if found.proved else ', not proved'}"] += 1
    return "; ".join(f"{count} {way}" for way, count in sorted(ways.items())) or "none"


def _ownerships(node: NodeSnapshot) -> str:
    """Return the number of owned engine ids: ``3 recorded, 1 without ranks here; 2 ranks kept``."""
    num_absent = sum(kept.uid is not None and kept.expires_in_s is not None for kept in node.ownerships)
    num_ranks = sum(kept.num_kept_ranks for kept in node.ownerships)
    ranks = f"; {format_count(num_ranks, 'rank')} kept" if num_ranks else ""
    return f"{len(node.ownerships)} recorded, {num_absent} without ranks here{ranks}"
