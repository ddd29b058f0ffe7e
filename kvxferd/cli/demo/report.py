"""What a demo says at its end, for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from kvxferd.cli.demo.tally import Tally
from kvxferd.cli.showing import in_bytes, in_time, plain


def report(tally: Tally) -> RenderableType:
    """Return the tables and the verdict."""
    parts: list[RenderableType] = [_totals(tally)]
    if tally.phases():
        parts.append(_phases(tally))
    parts += [plain(line) for text in _verdict(tally) for line in text.splitlines()]
    return Group(*parts)


def _totals(tally: Tally) -> Table:
    table = Table(title="kvxferd demo", title_justify="left", show_header=False)
    pulls = tally.as_json()["pull_s"]
    rows = [
        ("prefill", tally.shape.prefill),
        ("decode", tally.shape.decode),
        ("model", f"{tally.shape.layers} layers, {tally.shape.heads} KV heads of {tally.shape.head_dim}"),
        ("requests", f"{tally.requests} of {tally.shape.tokens} tokens"),
        ("pulls", f"{tally.delivered} delivered, {tally.failed} failed"),
        ("bytes", in_bytes(tally.bytes)),
        ("runs", f"{tally.runs}"),
        ("rate", f"{tally.gb_per_s:.2f} GB/s"),
        ("pull p50 / p99", f"{in_time(pulls['p50'])} / {in_time(pulls['p99'])}"),
        ("first request", in_time(tally.first_request_s)),
        ("daemons ready", in_time(tally.daemons_ready_s)),
        ("ranks registered", in_time(tally.registered_s)),
    ]
    for head, value in rows:
        table.add_row(head, plain(value))
    return table


def _phases(tally: Tally) -> Table:
    table = Table(title="Where a pull's time goes", title_justify="left")
    for head in ("phase", "p50", "p99", "mean"):
        table.add_column(head, justify="left" if head == "phase" else "right")
    for phase, times in tally.phases().items():
        table.add_row(phase, *(in_time(times[key]) for key in ("p50", "p99", "mean")))
    return table


def _verdict(tally: Tally) -> Iterator[str]:
    yield (
        f"checked {tally.checked_items} items (layer, component, head, token): {tally.wrong_items} wrong; "
        f"{tally.spilled_bytes} bytes changed outside the pulled blocks"
    )
    for wrong in (tally.first_wrong, tally.first_failure, tally.error):
        if wrong:
            yield wrong
    yield "every byte is right" if tally.is_good else "FAILED"
