"""The report of `kvxferd doctor`, and its exit status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from kvxferd.doctor.finding import Finding, Verdict
from kvxferd.doctor.placement_trial import PlacementResult
from kvxferd.tooling.exit_codes import EXIT_FAILED, EXIT_NO_GPU, EXIT_OK
from kvxferd.tooling.output import console, plain_text, print_fitted

_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


def print_findings(findings: Sequence[Finding], title: str = "This node") -> None:
    """Print a row for each finding, and below it what to do."""
    table = Table(title=title, title_justify="left")
    for head in ("check", "looked at", "", "found", "what to do"):
        table.add_column(head)
    for finding in findings:
        verdict = Text(finding.verdict.value, style=_STYLES[finding.verdict])
        shown = (plain_text(finding.found), plain_text(finding.todo))
        table.add_row(plain_text(finding.name), plain_text(finding.check), verdict, *shown)
    print_fitted(console(), table)


def print_placements(tried: Sequence[PlacementResult]) -> None:
    """Print each placement with its speed against a plain device copy, or its refusal."""
    table = Table(title="Placements of GPU memory", title_justify="left")
    for head in ("placement", "works", "GB/s", "of a device copy"):
        table.add_column(head, justify="right" if head == "GB/s" else "left")
    copy = next((one.gigabytes_per_s for one in tried if one.placement == "device copy"), 0.0)
    for one in tried:
        speed = f"{one.gigabytes_per_s:.3g}" if one.gigabytes_per_s else ""
        share = f"{one.gigabytes_per_s / copy:.1%}" if one.gigabytes_per_s and copy else ""
        table.add_row(one.placement, plain_text(one.refusal or "yes" + _over_transports(one)), speed, share)
    print_fitted(console(), table)


def _over_transports(one: PlacementResult) -> str:
    return f", over {one.lanes}" if one.lanes else ""


def as_json(findings: Sequence[Finding], tried: Sequence[PlacementResult] | None) -> dict[str, Any]:
    """Return findings and placements as one JSON object."""
    shown: dict[str, Any] = {
        "findings": msgspec.to_builtins(list(findings)),
        "status": exit_status(findings, tried),
    }
    if tried is not None:
        shown["placements"] = msgspec.to_builtins(list(tried))
    return shown


def exit_status(findings: Sequence[Finding], tried: Sequence[PlacementResult] | None) -> int:
    """Return the exit status. `tried`: None if placements were not requested, () if there is no GPU."""
    if any(finding.essential and finding.verdict is Verdict.FAIL for finding in findings):
        return EXIT_FAILED
    if tried is not None and not tried:
        return EXIT_NO_GPU
    return EXIT_FAILED if any(one.refusal for one in tried or ()) else EXIT_OK
