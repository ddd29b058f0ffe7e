"""The demo's report for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from kvxferd.demo.results import DemoResults
from kvxferd.tooling.output import format_bytes, format_duration, plain_text


def render_report(results: DemoResults) -> RenderableType:
    """Return the tables and the verdict."""
    parts: list[RenderableType] = [_totals(results)]
    if results.phases():
        parts.append(_phases(results))
    parts += [plain_text(line) for text in _verdict(results) for line in text.splitlines()]
    return Group(*parts)


def _totals(results: DemoResults) -> Table:
    table = Table(title="kvxferd demo", title_justify="left", show_header=False)
    pulls = results.as_json()["pull_s"]
    rows = [
        ("prefill", results.shape.prefill),
        ("decode", results.shape.decode),
        (
            "model",
            f"{results.shape.layers} layers, {results.shape.heads} KV heads of {results.shape.head_dim}",
        ),
        ("requests", f"{results.requests} of {results.shape.tokens} tokens"),
        ("pulls", f"{results.delivered} delivered, {results.failed} failed"),
        ("bytes", format_bytes(results.bytes)),
        ("runs", f"{results.runs}"),
        ("rate", f"{results.gb_per_s:.2f} GB/s"),
        ("pull p50 / p99", f"{format_duration(pulls['p50'])} / {format_duration(pulls['p99'])}"),
        ("first request", format_duration(results.first_request_s)),
        ("daemons ready", format_duration(results.daemons_ready_s)),
        ("ranks registered", format_duration(results.registered_s)),
    ]
    for head, value in rows:
        table.add_row(head, plain_text(value))
    return table


def _phases(results: DemoResults) -> Table:
    table = Table(title="Where a pull's time goes", title_justify="left")
    for head in ("phase", "p50", "p99", "mean"):
        table.add_column(head, justify="left" if head == "phase" else "right")
    for phase, times in results.phases().items():
        table.add_row(phase, *(format_duration(times[key]) for key in ("p50", "p99", "mean")))
    return table


def _verdict(results: DemoResults) -> Iterator[str]:
    yield (
        f"checked {results.checked_items} items (layer, component, head, token): "
        f"{results.wrong_items} wrong; {results.spilled_bytes} bytes changed outside the pulled blocks"
    )
    for wrong in (results.first_wrong, results.first_failure, results.error):
        if wrong:
            yield wrong
    yield "every byte is right" if results.is_ok else "FAILED"
