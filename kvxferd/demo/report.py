"""What a demo says at its end, for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from kvxferd.demo.results import DemoResults
from kvxferd.tooling.output import format_bytes, format_duration, plain_text


def render_report(tally: DemoResults) -> RenderableType:
    """Return the tables and the verdict."""
    parts: list[RenderableType] = [_totals(tally)]
    if tally.phases():
        parts.append(_phases(tally))
    parts += [plain_text(line) for text in _verdict(tally) for line in text.splitlines()]
    return Group(*parts)


def _totals(tally: DemoResults) -> Table:
    table = Table(title="kvxferd demo", title_justify="left", show_header=False)
    pulls = tally.as_json()["pull_s"]
    rows = [
        ("prefill", tally.shape.prefill),
        ("decode", tally.shape.decode),
        ("model", f"{tally.shape.layers} layers, {tally.shape.heads} KV heads of {tally.shape.head_dim}"),
        ("requests", f"{tally.requests} of {tally.shape.tokens} tokens"),
        ("pulls", f"{tally.delivered} delivered, {tally.failed} failed"),
        ("bytes", format_bytes(tally.bytes)),
        ("runs", f"{tally.runs}"),
        ("rate", f"{tally.gb_per_s:.2f} GB/s"),
        ("pull p50 / p99", f"{format_duration(pulls['p50'])} / {format_duration(pulls['p99'])}"),
        ("first request", format_duration(tally.first_request_s)),
        ("daemons ready", format_duration(tally.daemons_ready_s)),
        ("ranks registered", format_duration(tally.registered_s)),
    ]
    for head, value in rows:
        table.add_row(head, plain_text(value))
    return table


def _phases(tally: DemoResults) -> Table:
    table = Table(title="Where a pull's time goes", title_justify="left")
    for head in ("phase", "p50", "p99", "mean"):
        table.add_column(head, justify="left" if head == "phase" else "right")
    for phase, times in tally.phases().items():
        table.add_row(phase, *(format_duration(times[key]) for key in ("p50", "p99", "mean")))
    return table


def _verdict(tally: DemoResults) -> Iterator[str]:
    yield (
        f"checked {tally.checked_items} items (layer, component, head, token): {tally.wrong_items} wrong; "
        f"{tally.spilled_bytes} bytes changed outside the pulled blocks"
    )
    for wrong in (tally.first_wrong, tally.first_failure, tally.error):
        if wrong:
            yield wrong
    yield "every byte is right" if tally.is_ok else "FAILED"
