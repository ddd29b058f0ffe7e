"""The demo's report for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from kvxferd.demo.results import DemoResults
from kvxferd.tooling.output import format_bytes, format_duration, plain_text


def render_report(results: DemoResults, equal: DemoResults | None = None) -> RenderableType:
    """Return the tables and the verdict; `equal`: the same between equal engines, to compare with."""
    parts: list[RenderableType] = [_totals(results, equal)]
    if results.phases():
        parts.append(_phases(results))
    lines = list(_verdict(results))
    if equal is not None and not equal.is_ok:
        lines += ["equal engines:", *_verdict(equal)]
    elif equal is not None and results.is_ok:
        lines.insert(0, describe_difference(results, equal))
    parts += [plain_text(line) for text in lines for line in text.splitlines()]
    return Group(*parts)


def describe_difference(results: DemoResults, equal: DemoResults) -> str:
    """Return why the pair moves at another rate than equal engines do."""
    ways = results.ways()
    longer = sum(num_bytes for way, num_bytes in ways.items() if way != "direct")
    how = "They were read one by one (mover.read)."
    if longer:
        how = (
            f"{longer / sum(ways.values()):.0%} of the bytes were read in longer stretches, which the movers "
            "put into order."
        )
    return (
        f"why they differ: the engines differ in {_listed(results.shape.differences())}, so that "
        f"{format_bytes(_mean_run(results))} on average lie together on both sides, and "
        f"{format_bytes(_mean_run(equal))} between equal engines. A read takes 1 to 3 us however short it "
        f"is. {how}"
    )


def _mean_run(results: DemoResults) -> float:
    return results.bytes / max(1, results.runs)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + "".join(names[-1:])


def _totals(results: DemoResults, equal: DemoResults | None) -> Table:
    table = Table(title="kvxferd demo", title_justify="left", show_header=equal is not None)
    for head in ("", "these engines", *(("equal engines",) if equal is not None else ())):
        table.add_column(head)
    columns = [_total_cells(one) for one in (results, equal) if one is not None]
    for head, *values in zip(_TOTALS, *columns, strict=True):
        table.add_row(head, *map(plain_text, values))
    return table


_TOTALS = (
    *("prefill", "decode", "model", "requests", "pulls", "bytes", "runs", "read", "rate", "pull p50 / p99"),
    *("first request", "daemons ready", "ranks registered"),
)


def _total_cells(results: DemoResults) -> tuple[str, ...]:
    shape, pulls = results.shape, results.as_json()["pull_s"]
    return (
        str(shape.prefill),
        str(shape.decode),
        f"{shape.layers} layers, {shape.heads} KV heads of {shape.head_dim}",
        f"{results.requests} of {shape.tokens} tokens",
        f"{results.delivered} delivered, {results.failed} failed",
        format_bytes(results.bytes),
        f"{results.runs:,} of {format_bytes(_mean_run(results))}",
        " and ".join(way for way, num_bytes in sorted(results.ways().items()) if num_bytes) or "-",
        f"{results.gb_per_s:.2f} GB/s",
        f"{format_duration(pulls['p50'])} / {format_duration(pulls['p99'])}",
        format_duration(results.first_request_s),
        format_duration(results.daemons_ready_s),
        format_duration(results.registered_s),
    )


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
