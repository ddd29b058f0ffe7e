"""The page of one transfer: every record of it that is left, and what of it is going on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from urllib.parse import urlencode

from kvxferd.control.status_page.html import Html, html, join, table, tag
from kvxferd.control.status_page.main_page import document, phases_bar
from kvxferd.core.snapshot import (
    PHASES,
    NodeSnapshot,
    PullRecord,
    PullSnapshot,
    Record,
    ReleaseRecord,
    TransferSnapshot,
)
from kvxferd.telemetry.units import UNKNOWN, format_date, format_size, format_time
from kvxferd.wire.endpoint import address_of

MAX_RECORDS = 50  # a transfer has one record for each rank that pulls it, and one of its release


def find_records(transfer_id: str, *sources: Iterable[Record]) -> list[PullRecord | ReleaseRecord]:
    """Return the transfer's records, each once, the latest first."""
    found = {
        id(record): record
        for records in sources
        for record in records
        if isinstance(record, PullRecord | ReleaseRecord) and record.transfer_id == transfer_id
    }
    return sorted(found.values(), key=lambda record: -record.ended_at)[:MAX_RECORDS]


def has_transfer(node: NodeSnapshot, transfer_id: str) -> bool:
    """Whether the transfer is published here, or read now."""
    published, pulled = node.transfers, node.pulls
    return any(t.transfer_id == transfer_id for t in published) or any(
        p.transfer_id == transfer_id for p in pulled
    )


def render_transfer_page(
    transfer_id: str, node: NodeSnapshot, records: Sequence[PullRecord | ReleaseRecord]
) -> str:
    """Return the document. Everything that came from outside is escaped."""
    parts = [
        Html('<p><a href="/">← status</a></p>'),
        tag("h1", f"Transfer {transfer_id}"),
        tag(
            "p", f"on {address_of(node.endpoint)}; the other node has its own records of the same id", "about"
        ),
        _as_data(transfer_id),
        _going_on(transfer_id, node),
        *map(_record, records),
    ]
    if len(parts) == 5 and not has_transfer(node, transfer_id):
        text = "No record of it is left: the daemon keeps some thousand, and its log all of them."
        parts.append(tag("p", text, "note"))
    return document(f"transfer {transfer_id[:80]} - kvxferd", Html(""), tag("main", join(parts)))


def _as_data(transfer_id: str) -> Html:
    path = f"/v1/history?{urlencode({'transfer': transfer_id}, errors='surrogatepass')}"
    return tag("p", Html(f'<a href="{escape(path)}">as data</a>'), "about")


def _going_on(transfer_id: str, node: NodeSnapshot) -> Html:
    published = [
        ("published by " + t.engine_id, t.state, f"{_ready(t)} tokens, {t.num_grants} grants",
         format_time(t.age_s), f"lease ends in {format_time(max(t.lease_left_s, 0.0))}")
        for t in node.transfers
        if t.transfer_id == transfer_id
    ]  # fmt: skip
    pulled = [
        (f"pulled: {p.source} → {p.sink} {p.rank}", p.phase, f"pull {p.pull}{_read(p)}", format_time(p.age_s),
         f"deadline in {format_time(max(p.deadline_left_s, 0.0))}")
        for p in node.pulls
        if p.transfer_id == transfer_id
    ]  # fmt: skip
    if not published and not pulled:
        return Html("")
    return table("Now", ("what", "state", "", ">age", ""), [*published, *pulled])


def _ready(transfer: TransferSnapshot) -> str:
    """Return its tokens, and how many are ready while its prefill runs."""
    if 0 <= transfer.ready_tokens < transfer.num_tokens:
        return f"{transfer.ready_tokens} of {transfer.num_tokens}"
    return str(transfer.num_tokens)


def _read(pull: PullSnapshot) -> str:
    """Return how far a progressive pull has read."""
    if not pull.progressive:
        return ""
    return f", {pull.tokens_read} of {pull.num_tokens} tokens, {format_size(pull.bytes_read)}"


def _record(record: PullRecord | ReleaseRecord) -> Html:
    return _pull(record) if isinstance(record, PullRecord) else _release(record)


def _pull(record: PullRecord) -> Html:
    is_bad = record.has_failed
    has_handover = record.handover_s is not None
    outcome = f"{record.outcome}: {record.code.value}" if record.code else record.outcome
    rows: list[tuple[str, object]] = [
        ("outcome", tag("b", outcome, "bad" if is_bad else "")),
        ("message", record.message),
        ("failed in phase", record.failed_phase),
        ("did not answer", record.silent),
        ("peer", address_of(record.peer)),
        ("from → to", f"{record.source} → {record.sink} {record.rank}"),
        ("began (UTC)", format_date(record.started_at)),
        ("ended (UTC)", format_date(record.ended_at)),
        ("took", format_time(record.total_s)),
        ("reads were predicted to take", format_time(record.predicted_s) if record.predicted_s else ""),
        ("bytes", f"{format_size(record.bytes)} in {record.runs} runs" if record.runs else ""),
        ("read", ", ".join(f"{way} {format_size(count)}" for way, count in record.ways.items() if count)),
        ("read before all was ready", format_size(record.hidden_bytes) if has_handover else ""),
        ("handover", format_time(record.handover_s) if record.handover_s is not None else ""),
        ("tried again", "yes" if record.retried else ""),
        ("phases", join([phases_bar(record), _phases(record)]) if record.phases_s else ""),
    ]
    return _facts(f"Pull {record.pull}", rows)


def _release(record: ReleaseRecord) -> Html:
    readers = "; ".join(
        f"{reader.engine_id} ({reader.num_ranks} ranks at "
        f"{', '.join(map(address_of, reader.peers)) or UNKNOWN}, {format_size(reader.bytes)})"
        for reader in record.readers
    )
    rows: list[tuple[str, object]] = [
        ("why", record.why.value),
        ("engine", record.engine_id),
        ("published (UTC)", format_date(record.started_at)),
        ("released (UTC)", format_date(record.ended_at)),
        ("held for", format_time(record.held_s)),
        ("read by", readers or "nobody that acknowledged"),
    ]
    return _facts("Release", rows)


def _phases(record: PullRecord) -> Html:
    items = [f"{phase} {format_time(record.phases_s[phase])}" for phase in PHASES if phase in record.phases_s]
    return html(", ".join(items))


def _facts(title: str, rows: Sequence[tuple[str, object]]) -> Html:
    body = join(tag("tr", join([tag("th", name), tag("td", value)])) for name, value in rows if value != "")
    return Html(
        f'<h2>{html(title)}</h2><div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'
    )
