"""The status page: what it says first, and that no text from outside becomes more than text."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxferd.control.status_page.charts import NUM_COLUMNS, columns_of
from kvxferd.control.status_page.main_page import PageContent, render_main, render_status_page
from kvxferd.control.status_page.style import HEADERS, SCRIPT, STYLE
from kvxferd.control.status_page.transfer_page import find_records, render_transfer_page
from kvxferd.control.status_page.watchers import FORGET_S, MAX_WATCHERS, Watchers
from kvxferd.core.snapshot import PullRecord, ReleaseRecord
from kvxferd.errors import Code
from kvxferd.ids import Endpoint, EngineId, TransferId
from kvxferd.telemetry.history import History
from kvxferd.telemetry.samples import Gauges, Samples
from tests.support.http_harness import config_in, over_tcp, over_unix, serving
from tests.support.node_samples import SINK, StillNode, node_snapshot, pull_record

NOW = 1_700_000_000.0


def content(*records: PullRecord | ReleaseRecord, reasons: list[str] | None = None) -> PageContent:
    samples, history = Samples(), History()
    samples.start(0)
    for record in records:
        samples.add(record)
        history.add(record)
    samples.finish_second(1.0, NOW, Gauges(running_pulls=1, oldest_pull_s=0.25))
    return PageContent(
        node=node_snapshot(),
        reasons=reasons or [],
        warnings=[],
        report=samples.report(900),
        notable=history.notable,
        records=history.records(),
        now=NOW,
    )


def pull(code: Code | None = None, **changes: object) -> PullRecord:
    record = pull_record("failed" if code else "delivered", code)
    return msgspec.structs.replace(record, ended_at=NOW - 1, **changes)


class Elements(HTMLParser):
    """Collects tags with the names of their attributes, links, and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.shapes: set[tuple[str, ...]] = set()
        self.links: list[str] = []
        self.texts: list[str] = []
        self.verdict = ""
        self._in_verdict = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.shapes.add((tag, *(name for name, _ in attrs)))
        given = dict(attrs)
        if tag == "a" and given["href"]:
            self.links.append(given["href"])
        self._in_verdict = (given.get("class") or "").startswith("verdict")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._in_verdict:
            self.verdict += data
        self._in_verdict = False


def test_the_first_sentence_names_failures() -> None:
    records = [pull() for _ in range(9)] + [pull(Code.DEADLINE, peer=Endpoint("tcp://10.9.9.9:1"))]
    found = Elements(render_status_page(content(*records)))
    assert found.verdict == (
        "Pulls fail: 1 of 10 failed in the last 1 s (10.0 %), most with deadline from tcp://10.9.9.9:1."
    )
    assert "Ready" not in found.verdict


def test_the_first_sentence_of_a_node_without_failures() -> None:
    assert Elements(render_status_page(content(pull()))).verdict == (
        "Ready. 1 pull delivered in the last 1 s, none failed."
    )
    assert Elements(render_status_page(content())).verdict == "Ready. No pull ended in the last 1 s."
    assert Elements(render_status_page(content(reasons=["no movers"]))).verdict == "Not ready: no movers."


def test_an_empty_node_and_a_full_one_have_the_same_frame() -> None:
    for page in (render_status_page(content()), render_status_page(content(pull(), pull(Code.BUSY)))):
        assert page.count("<svg viewBox") == 4
        assert "http://" not in page.replace("http-equiv", "")
        assert "https://" not in page
        assert "style=" not in page
        assert "onclick" not in page


TEXTS = st.text(min_size=1, max_size=60) | st.sampled_from(
    ["</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onmouseover='x",
     "a/../../b?c#d&e=f", "\x00\x1b[31m", "javascript:alert(1)", "%2e%2e", "&lt;b&gt;", "<!--",
     "]]>", "</style>", "\u202e", "\ud7ff"]
)  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_text_from_outside_stays_text(transfer: str, engine: str, message: str, peer: str) -> None:
    def pages_of(transfer: str, engine: str, message: str, peer: str) -> list[str]:
        changes = {
            "transfer_id": TransferId(transfer), "source": EngineId(engine), "message": message,
            "peer": Endpoint(peer), "silent": peer,
        }  # fmt: skip
        records = [
            pull(**changes),
            pull(Code.DEADLINE, **changes),
            ReleaseRecord(
                transfer_id=TransferId(transfer), engine_id=SINK, why=Code.LEASE_EXPIRED, held_s=30.0
            ),
        ]
        made = content(*records, reasons=[message])
        found = find_records(transfer, made.records, made.notable)
        assert len(found) == 3
        return [render_status_page(made), render_transfer_page(transfer, made.node, found)]

    pages = pages_of(transfer, engine, message, peer)
    plain = pages_of("transfer", "engine", "message", "peer")
    for page, expected in zip(pages, plain, strict=True):
        assert Elements(page).shapes == Elements(expected).shapes
        assert "\x00" not in page
        assert "\x1b" not in page
    ids = [parse_qs(urlsplit(link).query, keep_blank_values=True).get("id") for link in
           Elements(pages[0]).links]  # fmt: skip
    assert ids.count([transfer]) == 6  # why, the slowest, failed, expired; the last pulls twice


@pytest.mark.parametrize("elapsed_s", [float("inf"), float("-inf"), float("nan"), -1.0, 1e300, 5e-324])
def test_absurd_times_of_a_mover_break_no_page(elapsed_s: float) -> None:
    record = pull(phases_s={"wire": elapsed_s, "plan": 0.001}, predicted_s=elapsed_s)
    made = content(record, msgspec.structs.replace(record, outcome="failed", code=Code.TRANSPORT))
    page = render_status_page(made) + render_transfer_page("req-0", made.node, [record])
    assert "plan 1 ms" in page
    assert not re.search(r'="[^"]*(inf|nan)[^"]*"', page.partition("<main")[2].partition("<script>")[0])


def test_the_policy_is_of_the_style_and_script_that_are_sent() -> None:
    page = render_status_page(content(pull()))
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert (script, style) == (SCRIPT, STYLE)
    for text in (script, style):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in HEADERS["Content-Security-Policy"]
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_a_transfer_without_a_record_is_404(tmp_path: Path) -> None:
    text = render_transfer_page("nobody", node_snapshot(), [])
    assert "No record of it is left" in text


def test_a_progressive_pull_shows_how_far_it_is_and_what_it_hid() -> None:
    node = node_snapshot()
    assert "256 of 1000 tokens, 8.39 MB" in render_transfer_page("req-3", node, [])
    assert "512 of 1000 tokens" in render_transfer_page("req-2", node, [])
    record = pull(progressive=True, hidden_bytes=3 << 18, handover_s=0.004)
    page = render_transfer_page("req-0", node, [record])
    assert "read before all was ready" in page
    assert "handover" in page
    assert "handover" not in render_transfer_page("req-0", node, [pull()])


async def test_pages_over_http(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()) as server, over_tcp(server) as tcp, over_unix(config) as unix:
        for client in (tcp, unix):
            async with client.get("/") as reply:
                assert reply.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
                assert reply.headers["X-Content-Type-Options"] == "nosniff"
                links = Elements(await reply.text()).links
            for link in {link for link in links if link.startswith("/transfers")}:
                async with client.get(link) as reply:
                    assert reply.status == 200
                    assert reply.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
            for link in (
                "/transfers",
                "/transfers?id=nobody",
                "/transfers?id=%00%3Cb%3E",
                "/transfers?id=%FF",
            ):
                async with client.get(link) as reply:
                    assert reply.status == 404, link
                    assert "<b>" not in (await reply.text()).replace('<b class="bad">', "")


async def test_watchers_are_capped(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()), over_unix(config) as client:
        for number in range(MAX_WATCHERS):
            async with client.get(f"/fragment?watcher={number}") as reply:
                assert reply.status == 200
                assert (await reply.text()).startswith("<main ")
        async with client.get("/fragment?watcher=another") as reply:
            assert reply.status == 503
        async with client.get("/fragment?watcher=3") as reply:
            assert reply.status == 200
        async with client.get("/") as reply:
            assert reply.status == 200


def test_a_client_with_many_ids_keeps_no_other_out() -> None:
    watchers = Watchers(lambda: 0.0)
    for number in range(3 * MAX_WATCHERS):
        watchers.admit("10.0.0.1", str(number))
    others = [("operator", "a"), ("operator", "b"), ("10.0.0.2", "a")]
    for _ in range(2):
        assert all(watchers.admit(*other) for other in others)
        watchers.admit("10.0.0.1", "one more")
    assert len(watchers._last_seen) == MAX_WATCHERS


def test_watchers_that_are_gone_leave_their_place() -> None:
    now = 0.0
    watchers = Watchers(lambda: now)
    assert all(watchers.admit("10.0.0.1", str(number)) for number in range(MAX_WATCHERS))
    assert not watchers.admit("10.0.0.1", "x" * 1000)
    now = FORGET_S + 1
    assert watchers.admit("10.0.0.1", "x" * 1000)
    assert len(watchers._last_seen) == 1


async def test_samples_over_http(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()) as server, over_tcp(server) as tcp, over_unix(config) as unix:
        for client in (tcp, unix):
            for query in ("", "?seconds=1", "?seconds=60", "?seconds=900", "?seconds=999999"):
                async with client.get(f"/v1/samples{query}") as reply:
                    assert reply.status == 200, query
                    found = await reply.json()
                    assert found["columns"]["delivered"] == [1, None, 1]
                    assert found["failed_pulls"][0]["code"] == "lease-expired"
                    assert found["slowest_pulls"][0]["transfer_id"] == "req-0"
            for query in ("-1", "x", "", "1.5", "9999999", "\N{SUPERSCRIPT TWO}"):
                async with client.get("/v1/samples", params={"seconds": query}) as reply:
                    assert reply.status == 400, query


@given(
    st.lists(st.none() | st.floats(0, 1e12), max_size=900).map(
        lambda values: (values, [None if value is None else 1 for value in values])
    )
)
def test_columns_keep_the_sum(sampled: tuple[list[float | None], list[int | None]]) -> None:
    values, spans = sampled
    columns = columns_of(values, spans)
    assert len(columns) == NUM_COLUMNS
    largest = max((value for value in values if value is not None), default=0.0)
    assert all(value is None or 0 <= value <= largest * 1.000001 for value in columns)
    assert any(value is not None for value in columns) == any(value is not None for value in values)


@pytest.mark.parametrize("num_pulls", [2_000])
def test_a_page_is_bounded(num_pulls: int) -> None:
    records = [
        pull(code, transfer_id=TransferId(f"{number}" * 60), message="m" * 5_000)
        for number in range(num_pulls)
        for code in (None, Code.DEADLINE)
    ]
    page = render_main(content(*records))
    assert len(page) < 400_000
