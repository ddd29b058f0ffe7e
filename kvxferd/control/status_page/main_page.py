"""The status page: what is wrong, since when, and what to do; then what else the node has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

import kvxferd
from kvxferd.control.status_page.charts import (
    Series,
    columns_of,
    line_chart,
    share_bar,
    stacked_chart,
)
from kvxferd.control.status_page.html import MAX_ROWS, Html, html, join, table, tag, transfer_link
from kvxferd.control.status_page.style import RELOAD_S, SCRIPT, STYLE
from kvxferd.core.snapshot import PHASES, NodeSnapshot, PullRecord, Record
from kvxferd.telemetry.gauges import engine_state
from kvxferd.telemetry.notable_records import NotableRecords
from kvxferd.telemetry.overview import (
    Level,
    PeerLine,
    Verdict,
    failure_reasons,
    longest_phases,
    peer_lines,
    verdict_of,
)
from kvxferd.telemetry.sample_report import LastMinute, SampleReport
from kvxferd.telemetry.units import (
    UNKNOWN,
    format_clock,
    format_count,
    format_rate,
    format_share,
    format_size,
    format_time,
)
from kvxferd.telemetry.warnings.warning_list import NodeWarning
from kvxferd.wire.endpoint import address_of

MAX_FAILED = 20
MAX_SLOWEST = 10
MAX_PULLS = 20
MAX_NAMES = 8
WINDOW_S = 900
# A chart and its legend name these codes, the others together.
MAX_CODES = 7


@dataclass(frozen=True)
class PageContent:
    """What the page shows. `now`: Unix time."""

    node: NodeSnapshot
    reasons: Sequence[str]
    warnings: Sequence[NodeWarning]
    report: SampleReport  # of 15 minutes
    notable: NotableRecords
    records: Sequence[Record]
    now: float


def render_status_page(content: PageContent) -> str:
    """Return the whole document."""
    return document(
        _title(content),
        Html(f"<noscript><meta http-equiv=refresh content={RELOAD_S}></noscript>"),
        Html(f'<p id="live" class="live"></p>{render_main(content)}<script>{SCRIPT}</script>'),
    )


def document(title: str, head: Html, body: Html) -> str:
    """Return an HTML document in the page's style."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'{head}<title>{html(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>'
        f"<body>{body}</body></html>"
    )


def render_main(content: PageContent) -> Html:
    """Return the part that the script renews. Everything that came from outside is escaped."""
    node, report = content.node, content.report
    peers = peer_lines(node, report.peers)
    parts = [
        tag("h1", f"kvxferd {address_of(node.endpoint)}"),
        tag(
            "p",
            f"version {kvxferd.__version__} · boot {node.boot} · as of {format_clock(content.now)} UTC",
            "about",
        ),
        _verdict(content),
        _warnings(content.warnings),
        _tiles(report.last_minute),
        _charts(report),
        _failure_reasons(content),
        _running_pulls(node),
        _pairs(report),
        _peers(peers),
        _slowest(content),
        _failed_pulls(content),
        _expired(content.notable),
        _engines(node),
        _transfers(node),
        _last_pulls(content.records),
        _footer(),
    ]
    return Html(f'<main data-title="{html(_title(content))}">{join(parts)}</main>')


def _title(content: PageContent) -> str:
    verdict = _verdict_of(content)
    mark = {Level.GOOD: "", Level.WARN: "! ", Level.BAD: "!! "}[verdict.level]
    text = verdict.text.partition(":")[0].partition(".")[0]
    return f"{mark}{text} - kvxferd {address_of(content.node.endpoint)}"


def _verdict_of(content: PageContent) -> Verdict:
    return verdict_of(
        draining=content.node.draining,
        reasons=content.reasons,
        warnings=[warning.kind.value for warning in content.warnings],
        minute=content.report.last_minute,
    )


def _verdict(content: PageContent) -> Html:
    verdict = _verdict_of(content)
    return Html(f'<p class="verdict {verdict.level}" role="status">{html(verdict.text)}</p>')


def _warnings(warnings: Sequence[NodeWarning]) -> Html:
    items = [
        tag(
            "li",
            join(
                [
                    tag("b", warning.kind.value),
                    f" since {format_clock(warning.since)} UTC: {warning.message}. ",
                    join([tag("b", "What to do: "), f"{warning.remedy} "]) if warning.remedy else "",
                    tag("span", f"({warning.page})", "note"),
                ]
            ),
        )
        for warning in reversed(warnings)
    ]
    return Html(f'<ul class="warnings">{join(items)}</ul>') if items else Html("")


def _tiles(minute: LastMinute) -> Html:
    share = format_share(minute.failure_share) if minute.delivered + minute.failed else UNKNOWN
    tiles = [
        (format_rate(minute.pulled_bytes_per_s), "in", ""),
        (format_rate(minute.served_bytes_per_s), "out", ""),
        (f"{(minute.delivered + minute.failed) / max(minute.seconds, 1):.3g}", "pulls a second", ""),
        (share, "of pulls failed", "bad" if minute.failed else ""),
        (format_time(minute.p50_s), "pull time p50", ""),
        (format_time(minute.p99_s), "pull time p99", ""),
        (format_count(minute.running_pulls), "running pulls", ""),
        (format_time(minute.oldest_pull_s) if minute.running_pulls else UNKNOWN, "oldest running pull", ""),
    ]
    body = join(
        tag("div", join([tag("b", value), tag("span", name)]), f"tile {css}".strip())
        for value, name, css in tiles
    )
    return Html(f'<section class="tiles" aria-label="The last minute">{body}</section>')


def _charts(report: SampleReport) -> Html:
    columns, minute = report.columns, report.last_minute
    spans = columns.span_s

    def rates(values: Sequence[float | None]) -> list[float | None]:
        return columns_of(values, spans)

    def largest(values: Sequence[float | None]) -> list[float | None]:
        return columns_of(values, [None if value is None else 1 for value in values], is_rate=False)

    sampled = rates(spans)
    throughput = line_chart(
        "Throughput",
        [
            Series("in", 0, rates(columns.pulled_bytes), format_rate(minute.pulled_bytes_per_s)),
            Series("out", 1, rates(columns.served_bytes), format_rate(minute.served_bytes_per_s)),
        ],
        sampled,
        format_rate,
    )
    failed = stacked_chart(
        "Failed pulls, by code", _by_code(report), sampled, lambda value: f"{value:.3g} a second"
    )
    times = line_chart(
        "Time of a pull",
        [
            Series("p50", 0, largest(columns.p50_s), format_time(minute.p50_s)),
            Series("p99", 1, largest(columns.p99_s), format_time(minute.p99_s)),
        ],
        sampled,
        format_time,
    )
    phases = stacked_chart("Time spent in each phase, a second", _by_phase(report), sampled, format_time)
    charts = join([throughput, failed, times, phases])
    return Html(f'<section class="charts" aria-label="The last 15 minutes">{charts}</section>')


def _by_code(report: SampleReport) -> list[Series]:
    """Return failed pulls a second for each code, those with most in 15 minutes first."""
    spans = report.columns.span_s
    totals = {code: sum(v or 0 for v in values) for code, values in report.failures.items()}
    codes = sorted(totals, key=lambda code: -totals[code])
    series = [
        Series(code, (2 + index) % 8, columns_of(report.failures[code], spans), format_count(totals[code]))
        for index, code in enumerate(codes[:MAX_CODES])
    ]
    if others := codes[MAX_CODES:]:
        sums = [
            None if span is None else sum(report.failures[code][row] or 0 for code in others)
            for row, span in enumerate(spans)
        ]
        count = format_count(sum(totals[code] for code in others))
        series.append(Series(f"{len(others)} other codes", 7, columns_of(sums, spans), count))
    return series or [Series("none failed", 7, columns_of(report.columns.failed, spans))]


def _by_phase(report: SampleReport) -> list[Series]:
    spans = report.columns.span_s
    return [
        Series(phase, _PHASE_COLORS[phase], columns_of(report.phases_s[phase], spans)) for phase in PHASES
    ]


_PHASE_COLORS: Mapping[str, int] = {
    "wire": 0, "grant": 1, "handshake": 2, "queue": 5, "plan": 3, "post": 4, "fence": 6, "ack": 7,
}  # fmt: skip


def _failure_reasons(content: PageContent) -> Html:
    reasons = failure_reasons(content.notable.failed(), content.now, WINDOW_S)
    if not reasons:
        return Html("")
    rows = [
        (
            format_count(reason.num_pulls),
            tag("b", last.code or "failed", "bad"),
            f"{last.source} → {last.sink}",
            address_of(last.peer) or UNKNOWN,
            last.failed_phase or UNKNOWN,
            last.silent or UNKNOWN,
            f"{format_clock(last.ended_at)}",
            join([f"{last.message} (", transfer_link(last.transfer_id), ")"]),
        )
        for reason, last in ((reason, reason.last) for reason in reasons)
    ]
    heads = (
        ">pulls",
        "code",
        "from → to",
        "peer",
        "phase",
        "did not answer",
        "last (UTC)",
        "message of the last",
    )
    return table("Why pulls failed in the last 15 minutes", heads, rows, note="Of the last 256 failed pulls.")


def _failed_pulls(content: PageContent) -> Html:
    failed = content.notable.failed()
    if not failed:
        return Html("")
    rows = [
        (
            format_clock(p.ended_at),
            transfer_link(p.transfer_id),
            f"{p.source} → {p.sink} {p.rank}",
            tag("b", p.code or p.outcome, "bad"),
            p.failed_phase or UNKNOWN,
            format_time(p.total_s),
            p.message,
        )
        for p in failed[:MAX_FAILED]
    ]
    heads = ("|at (UTC)", "transfer", "from → to", "|code", "|phase", ">after", "message")
    found = table("The last failed pulls", heads, rows)
    return found


def _running_pulls(node: NodeSnapshot) -> Html:
    rows = [
        (
            transfer_link(p.transfer_id),
            f"{p.source} → {p.sink} {p.rank}",
            p.phase,
            format_time(p.age_s),
            format_time(max(p.deadline_left_s, 0.0)),
        )
        for p in nlargest(MAX_ROWS, node.pulls, key=lambda pull: pull.age_s)
    ]
    heads = ("transfer", "from → to", "phase", ">age", ">deadline in")
    num_pulls = sum(node.pull_phases.values())
    return table("Running pulls, the oldest first", heads, rows, total=num_pulls)


def _pairs(report: SampleReport) -> Html:
    rows = [
        (
            f"{row.source} → {row.sink}",
            format_count(row.delivered),
            _failures(row.failed, row.delivered),
            format_size(row.pulled_bytes),
            format_time(row.mean_s),
            format_time(row.p50_s),
            format_time(row.p99_s),
            f"{row.last_code} at {format_clock(row.last_failed_at)}" if row.last_code else "",
        )
        for row in report.pairs
    ]
    heads = ("from → to", ">delivered", ">failed", ">bytes", ">mean", ">p50", ">p99", "last failure (UTC)")
    return table("Pairs of engines, 15 minutes", heads, rows, "No pull ended.")


def _peers(peers: Sequence[PeerLine]) -> Html:
    rows = [
        (
            address_of(p.endpoint),
            tag("b", p.state, "bad") if p.failed and p.state == "not connected" else p.state,
            format_time(p.round_trip_s),
            f"{format_time(p.last_answer_s)} ago" if p.last_answer_s is not None else UNKNOWN,
            p.transport or UNKNOWN,
            format_count(p.delivered),
            _failures(p.failed, p.delivered),
            format_size(p.pulled_bytes),
            format_count(p.num_grants),
            _some(p.engines),
        )
        for p in peers
    ]
    heads = (
        *("|peer", "|state", ">round trip", ">last answer", "transport", ">delivered", ">failed", ">bytes"),
        *(">grants", "engines"),
    )
    return table("Peers, 15 minutes", heads, rows)


def _failures(failed: int, delivered: int) -> object:
    if not failed:
        return "0"
    return tag("b", f"{format_count(failed)} ({format_share(failed / (failed + delivered))})", "bad")


def _slowest(content: PageContent) -> Html:
    rows = [
        (
            format_clock(p.ended_at),
            transfer_link(p.transfer_id),
            f"{p.source} → {p.sink} {p.rank}",
            format_size(p.bytes),
            format_time(p.total_s),
            phases_bar(p),
            longest_phases(p),
        )
        for p in content.notable.slowest(content.now)[:MAX_SLOWEST]
    ]
    heads = ("|at (UTC)", "transfer", "from → to", ">bytes", ">took", "phases", "longest phases")
    return table("The slowest pulls of 15 minutes", heads, rows, "No pull was delivered.")


def phases_bar(record: PullRecord) -> Html:
    """Return a bar of the pull's phases, in the colors of the chart."""
    return share_bar(
        [
            (
                f"{phase} {format_time(record.phases_s[phase])}",
                _PHASE_COLORS[phase],
                max(record.phases_s[phase], 0.0),
            )
            for phase in PHASES
            if phase in record.phases_s
        ]
    )


def _expired(notable: NotableRecords) -> Html:
    rows = [
        (format_clock(r.ended_at), transfer_link(r.transfer_id), r.engine_id, format_time(r.held_s))
        for r in notable.expired()[:MAX_FAILED]
    ]
    if not rows:
        return Html("")
    note = "Published here, and not read before the lease ended: the reader never came, or came too late."
    return table("Expired leases", ("|at (UTC)", "transfer", "engine", ">held"), rows, note=note)


def _engines(node: NodeSnapshot) -> Html:
    rows = [
        (
            e.engine_id,
            e.generation,
            f"{len(e.ranks)} of {e.pp_size * e.tp_size}",
            e.problem or engine_state(e),
        )
        for e in node.engines
    ]
    return table("Engines of this node", ("engine", "generation", "ranks", "state"), rows)


def _transfers(node: NodeSnapshot) -> Html:
    rows = [
        (transfer_link(t.transfer_id), t.engine_id, t.state, format_count(t.num_tokens), t.num_grants,
         format_time(t.age_s), format_time(max(t.lease_left_s, 0.0)))
        for t in node.transfers[:MAX_ROWS]
    ]  # fmt: skip
    heads = ("transfer", "engine", "state", ">tokens", ">grants", ">age", ">lease left")
    return table("Published transfers", heads, rows, total=sum(node.transfer_states.values()))


def _last_pulls(records: Sequence[Record]) -> Html:
    pulls = [record for record in records if isinstance(record, PullRecord)][-MAX_PULLS:]
    rows = [
        (format_clock(p.ended_at), transfer_link(p.transfer_id), f"{p.source} → {p.sink} {p.rank}",
         tag("b", p.code, "bad") if p.code else p.outcome, format_size(p.bytes), format_time(p.total_s))
        for p in reversed(pulls)
    ]  # fmt: skip
    heads = ("|at (UTC)", "transfer", "from → to", "outcome", ">bytes", ">took")
    found = table("The last pulls", heads, rows)
    return Html(f'<details id="last-pulls"><summary>The last {len(rows)} pulls</summary>{found}</details>')


def _footer() -> Html:
    paths = ("/metrics", "/v1/status", "/v1/samples", "/v1/history", "/readyz")
    links = join((Html(f'<a href="{path}">{path}</a>') for path in paths), " · ")
    return tag("p", join(["As data: ", links]), "note")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"
