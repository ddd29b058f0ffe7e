"""The scale simulation's tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from scaling.control_plane import LoadResult
from scaling.fits import exponent
from scaling.fleet import FleetResult
from scaling.handshake import HandshakeResult

# A rarer kind of event is measured too coarsely for a fit.
MIN_EVENTS = 100


def growth(sizes: Sequence[float], runs: Sequence[LoadResult]) -> dict[str, float]:
    """Return, for each kind of event, the exponent with which one event's cost grows with the size."""
    kinds = set.intersection(*({k for k, n in run.num_events.items() if n >= MIN_EVENTS} for run in runs))
    return {kind: exponent(sizes, [run.us_per_event[kind] for run in runs]) for kind in sorted(kinds)}


def totals(runs: Sequence[LoadResult]) -> dict[str, list[float]]:
    """Return, run by run, the growth that a fit of single events misses: few events, each with more work."""
    return {
        "% of a processor": [run.core_percent for run in runs],
        "all ticks, ms": [run.us_per_event["Tick"] * run.num_events["Tick"] / 1e3 for run in runs],
        "meeting an engine, ms": [run.learn_ms for run in runs],
    }


def show_sweep(console: Console, title: str, sizes: Sequence[float], runs: Sequence[LoadResult]) -> None:
    """Print one row per kind of event, one column per size, and the fit at the end."""
    names = [f"{size:g}" for size in sizes]
    table = Table("us of the core", *names, "~ size^", title=title)
    for kind, fit in growth(sizes, runs).items():
        table.add_row(kind, *(f"{run.us_per_event[kind]:.0f}" for run in runs), f"{fit:+.2f}")
    table.add_section()
    for name, costs in totals(runs).items():
        table.add_row(name, *(f"{cost:.1f}" for cost in costs), f"{exponent(sizes, costs):+.2f}")
    table.add_row("grants held", *(str(run.num_grants_held) for run in runs), "")
    table.add_row("keeping an engine, KiB", *(f"{run.learn_kib:.0f}" for run in runs), "")
    table.add_row("all else, MiB", *(f"{run.run_mib:.0f}" for run in runs), "")
    console.print(table)


def show_handshake(console: Console, found: HandshakeResult) -> None:
    """Print what connecting to one engine takes, step by step."""
    title = (
        f"An engine of {found.num_ranks} ranks, {found.num_tensors} cache tensors, met by TP{found.reader.tp}"
        "; shortest of some rounds"
    )
    table = Table("step", "", title=title)
    for name, value in (
        ("manifest", f"{found.manifest_bytes / 1024:.0f} KiB"),
        ("aggregate at its home", f"{found.aggregate_ms:.1f} ms"),
        ("encode", f"{found.encode_ms:.2f} ms"),
        ("fetch over TCP, loopback", f"{found.fetch_ms:.2f} ms"),
        ("decode", f"{found.decode_ms:.2f} ms"),
        ("check, layouts never seen", f"{found.check_ms:.1f} ms"),
        ("check, layouts known", f"{found.check_again_ms:.2f} ms"),
        ("plan, one rank", f"{found.plan_ms:.1f} ms"),
        ("plan, all ranks of the node", f"{found.plan_all_ms:.1f} ms"),
        ("plan, known", f"{found.plan_known_ms:.3f} ms"),
        ("plan for the mover", f"{found.plan_bytes} bytes"),
        ("bind in the mover", f"{found.bind_ms:.3f} ms"),
    ):
        table.add_row(name, value)
    console.print(table)


def show_fleet(console: Console, found: FleetResult) -> None:
    """Print messages and bytes of a node, and which limit comes first."""
    fleet = found.fleet
    nodes = f"{fleet.num_prefill} prefill and {fleet.num_decode} decode nodes"
    title = f"{nodes}, {fleet.requests_per_s:g} requests/s"
    table = Table("message", "from", "per node and s", "by the formula", "KiB/s", title=title)
    for said in found.said:
        expected = f"{said.expected_per_s:.1f}" if said.expected_per_s else ""
        table.add_row(said.kind, said.sender, f"{said.per_s:.1f}", expected, f"{said.bytes_per_s / 1024:.1f}")
    console.print(table)
    console.print(
        f"{found.num_handshakes} handshakes of {found.handshake_bytes / 1024:.0f} KiB; "
        + "core time of a request: "
        + ", ".join(f"{ms:.2f} ms on a {role} node" for role, ms in found.core_ms_per_request.items())
        + f"; a grant through codec and socket {found.codec_us_per_message:.1f} us"
    )
    limits = Table("full at", "requests/s of one node", title="What fills up first")
    for name, rate in sorted(found.limits.items(), key=lambda item: item[1]):
        limits.add_row(name, f"{rate:.0f}")
    console.print(limits)
