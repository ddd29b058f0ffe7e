"""The status page: one HTML document without scripts, with the content of `/v1/status`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import kvxferd
from kvxferd.core.snapshot import NodeSnapshot, PullRecord, Record, RemoteEngineSnapshot
from kvxferd.telemetry.gauges import engine_state

REFRESH_S = 5
MAX_PULLS = 20
MAX_ROWS = 100  # of one table: a browser reloads every five seconds
MAX_NAMES = 8

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; }
table { border-collapse: collapse; margin: 0 0 1.5em; width: 100%; }
th, td { border-bottom: 1px solid #ddd; padding: .25em .75em .25em 0; text-align: left; }
h2 { font-size: 1.1em; } .bad { color: #b00; } .none { color: #777; }
"""


def render_status_page(node: NodeSnapshot, reasons: Sequence[str], records: Sequence[Record]) -> str:
    """Return the page as HTML. Everything that came from outside is escaped."""
    about = f"Version {escape(kvxferd.__version__)}, boot {escape(node.boot)}."
    return "\n".join(
        [
            "<!doctype html><html lang=en><head><meta charset=utf-8>",
            f"<meta http-equiv=refresh content={REFRESH_S}>",
            f"<title>kvxferd {escape(node.endpoint)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>kvxferd {escape(node.endpoint)}</h1>",
            f"<p>{about} {_readiness(node, reasons)}</p>",
            _engines(node),
            _peers(node),
            _transfers(node),
            _running_pulls(node),
            _last_pulls(records),
            "<p><a href=/metrics>metrics</a> · <a href=/v1/status>status as JSON</a></p></body></html>",
        ]
    )


def _engines(node: NodeSnapshot) -> str:
    rows = [
        (
            e.engine_id,
            e.generation,
            f"{len(e.ranks)} of {e.pp_size * e.tp_size}",
            e.problem or engine_state(e),
        )
        for e in node.engines
    ]
    return _table("Engines", ("engine", "generation", "ranks", "state"), rows)


def _peers(node: NodeSnapshot) -> str:
    rows = [(p.endpoint, p.state, _some(p.engines), p.num_grants) for p in node.peers]
    return _table("Peers", ("endpoint", "state", "engines", "grants"), rows)


def _transfers(node: NodeSnapshot) -> str:
    rows = [
        (t.transfer_id, t.engine_id, t.state, t.num_tokens, t.num_grants, f"{t.lease_left_s:.1f} s")
        for t in node.transfers
    ]
    heads = ("transfer", "engine", "state", "tokens", "grants", "lease left")
    return _table("Published transfers", heads, rows)


def _running_pulls(node: NodeSnapshot) -> str:
    rows = [(p.transfer_id, p.source, p.sink, p.rank, p.phase, f"{p.age_s:.3f} s") for p in node.pulls]
    return _table("Running pulls", ("transfer", "from", "to", "rank", "phase", "age"), rows)


def _last_pulls(records: Sequence[Record]) -> str:
    pulls = [record for record in records if isinstance(record, PullRecord)][-MAX_PULLS:]
    rows = [
        (p.transfer_id, p.source, p.sink, p.rank, p.code or p.outcome, p.bytes, f"{p.total_s * 1e3:.2f} ms")
        for p in reversed(pulls)
    ]
    heads = ("transfer", "from", "to", "rank", "outcome", "bytes", "time")
    return _table("Last pulls", heads, rows)


def _readiness(node: NodeSnapshot, reasons: Sequence[str]) -> str:
    if node.draining:
        return "<b class=bad>Draining.</b>"
    if reasons:
        return f"<b class=bad>Not ready: {escape('; '.join(reasons))}.</b>"
    return "<b>Ready.</b>"


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    num_left, rows = len(rows) - MAX_ROWS, rows[:MAX_ROWS]
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    if not body:
        return f"<h2>{title}</h2><p class=none>none</p>"
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    more = f"<p class=none>and {num_left} more</p>" if num_left > 0 else ""
    return f"<h2>{title}</h2><table><tr>{head}</tr>{body}</table>{more}"


def _some(engines: Sequence[RemoteEngineSnapshot]) -> str:
    names = ", ".join(engine.engine_id for engine in engines[:MAX_NAMES])
    return names if len(engines) <= MAX_NAMES else f"{names} and {len(engines) - MAX_NAMES} more"
