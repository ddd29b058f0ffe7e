"""The status page in Chromium: what stands on it within seconds of a fault, and that texts stay texts."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from kvxferd.errors import Code
from kvxferd.ids import Endpoint, EngineId, PullId, TransferId
from kvxferd.records import PullRecord, Record, ReleaseRecord
from kvxferd.telemetry import units
from kvxferd.telemetry.samples import Samples
from kvxferd.telemetry.warnings import NodeWarning
from tests.support.browser import Page, browser_page, find_browser
from tests.support.http_harness import config_in, serving
from tests.support.node_samples import StillNode, node_warning, pull_record, samples
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.processes import stopped
from tests.support.nodes.requests import TOKENS, ids_for, publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until
from tests.support.ports import free_port

BROWSER = find_browser()
# A failure is a sample within a second, and the script renews the page every two.
WITHIN_S = 5.0
DEADLINE_S = 1.5

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no chromium is installed"),
    pytest.mark.timeout(180),
]


async def until(page: Page, holds: Callable[[str], bool], what: str, limit_s: float) -> str:
    """Return the page's text once it is as wanted."""
    text = ""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while True:
                text = await page.text()
                if holds(text):
                    return text
                await asyncio.sleep(0.1)
    raise AssertionError(f"not within {limit_s} s: {what}; the page: {text[:2000]}")


def test_a_failure_is_on_the_page_in_seconds(fleet: Fleet, tmp_path: Path) -> None:
    port = free_port()
    prefill = fleet.daemon("prefill")
    decode = fleet.daemon("decode", "--http-bind", f"127.0.0.1:{port}")
    (source,) = fleet.engine(prefill, spec_of("prefill-0"))
    (sink,) = fleet.engine(decode, spec_of("decode-0"))
    pull_and_check([sink], publish([source], 1), 1)
    served = lambda: prefill.control.get("/v1/status")["last_minute"]  # noqa: E731
    wait_until(lambda: served()["served_bytes"] > 0, "the other side counts it")
    assert served()["served_bytes"] == decode.control.get("/v1/status")["last_minute"]["pulled_bytes"] > 0
    lost, peer = publish([source], 2), prefill.endpoint

    async def look() -> None:
        assert BROWSER is not None
        async with browser_page(BROWSER) as page:
            await page.open(f"http://127.0.0.1:{port}/")
            text = await until(page, lambda text: "1 pull delivered" in text, "the good pull", WITHIN_S)
            assert "Ready." in text.partition("IN")[0]
            await _fail_a_pull(page)
            await _follow_the_link(page)
            assert page.errors == []
            decode.send_signal(signal.SIGTERM)  # and does not answer any more
            await until(page, lambda text: "does not answer" in text, "the daemon's end", 2 * WITHIN_S)

    async def _fail_a_pull(page: Page) -> None:
        with stopped([prefill.pid]):  # its connections stay, and nothing answers
            ticket = sink.pull(lost, ids_for(1002), TOKENS, DEADLINE_S)
            name, fields = await asyncio.to_thread(sink.end_of, ticket)
            assert (name, fields["code"]) == ("Failed", "deadline")
            text = await until(page, lambda text: "Pulls fail" in text, "the failure", WITHIN_S)
        first = text.split("\n\n")[:4]
        assert any("1 of 2 failed in the last" in line and peer in line for line in first), first
        assert "Why pulls failed" in text
        assert f"kvxferd ping {peer}" in text  # what to do
        assert "Ready." not in text
        assert (await page.evaluate("document.title")).startswith("!! Pulls fail")

    async def _follow_the_link(page: Page) -> None:
        await page.evaluate("[...document.links].find(link => link.textContent == 'req-2').click()")
        text = await until(page, lambda text: "Transfer req-2" in text, "the transfer", WITHIN_S)
        for part in ("failed: deadline", peer, "prefill-0 → decode-0"):
            assert part in text, (part, text)
        await page.evaluate("history.back()")
        await until(page, lambda text: "Pulls fail" in text, "the node again", WITHIN_S)

    asyncio.run(look())


HOSTILE = (
    *("</script><script>document.title='run'</script>", '"><img src=x onerror="document.title=1">', "<!--"),
    *("' onmouseover='x", "a/../../b?c#d&e=f", "javascript:alert(1)", "%2e%2e", "&lt;b&gt;", "</style>"),
)
# Elements with the names of their attributes, each once.
SHAPE = (
    "[...new Set([...document.querySelectorAll('*')]"
    ".map(one => [one.localName, ...one.getAttributeNames()].join(' ')))].sort().join()"
)
LINKS = "[...document.links].filter(link => link.hash).map(link => link.textContent)"


class HostileNode(StillNode):
    """A node whose every text from outside is `text`."""

    def __init__(self, text: str) -> None:
        super().__init__([text])
        self.text = text
        self._ended_at = time.time() - 1

    def warnings(self) -> list[NodeWarning]:
        return [msgspec.structs.replace(node_warning("x; y"), message=self.text, remedy=self.text)]

    def records(self) -> list[Record]:
        engine, transfer = EngineId(self.text), TransferId(self.text)
        pull = msgspec.structs.replace(
            pull_record("failed", Code.DEADLINE),
            transfer_id=transfer,
            source=engine,
            message=self.text,
            peer=Endpoint(self.text),
            silent=self.text,
            ended_at=self._ended_at,
            phases_s={"wire": 1e6, "plan": 0.001},
        )
        lease = ReleaseRecord(transfer_id=transfer, engine_id=engine, why=Code.LEASE_EXPIRED, held_s=30.0)
        return [pull, msgspec.structs.replace(pull, outcome="delivered", code=None, pull=PullId(9)), lease]

    @property
    def samples(self) -> Samples:
        _, delivered, _ = self.records()
        assert isinstance(delivered, PullRecord)
        return samples(delivered)


async def test_texts_from_outside_stay_texts(tmp_path: Path) -> None:
    assert BROWSER is not None
    shapes: dict[str, list[str]] = {}
    async with browser_page(BROWSER) as page:
        for text in ("plain", "\u202e\x1b[31m", *HOSTILE):
            config = config_in(tmp_path)
            async with serving(config, HostileNode(text)) as server:
                assert server.tcp_address is not None
                await page.open(f"http://127.0.0.1:{server.tcp_address[1]}/")
                seen = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
                await until(page, lambda found, seen=seen: f"Not ready: {seen}." in found, text, WITHIN_S)
                await page.evaluate("document.querySelector('summary').click()")
                await until(page, lambda found: "OUTCOME" in found.upper(), "the last pulls", WITHIN_S)
                links: list[str] = await page.evaluate(LINKS)
                assert links.count(seen) == 6  # why, the slowest, failed, expired; the last pulls twice
                shapes[text] = [await page.evaluate(SHAPE)]
                await page.evaluate("[...document.links].find(link => link.hash).click()")
                shown = await until(page, lambda found: "Transfer " in found, text, WITHIN_S)
                assert shown.count(f"message\t{seen}") == 2, shown
                assert "plan 1 ms, wire 278 h" in shown
                shapes[text].append(await page.evaluate(SHAPE))
        assert page.errors == []
    assert all(shape == shapes["plain"] for shape in shapes.values())


TIMES = (None, 0.0, 3.21e-7, 0.000999, 0.0123, 0.25, 1.0, 9.87, 99.96, 119.4, 121.0, 7201.0, 1e6)
SIZES = (0.0, 1.0, 999.4, 1536.0, 99_960.0, 1.234e6, 2.5e9, 1.234e12)
SHARES = (0.0, 0.0004, 0.0123, 0.333, 0.9997, 1.0)


async def test_numbers_are_written_as_in_the_terminal(tmp_path: Path) -> None:
    assert BROWSER is not None
    config = config_in(tmp_path)
    async with serving(config, StillNode()) as server, browser_page(BROWSER) as page:
        assert server.tcp_address is not None
        await page.open(f"http://127.0.0.1:{server.tcp_address[1]}/")
        for name, form, values in (
            ("formatTime", units.format_time, TIMES),
            ("formatSize", units.format_size, SIZES),
            ("formatRate", units.format_rate, SIZES),
            ("formatShare", units.format_share, SHARES),
            ("formatCount", units.format_count, (0, 999, 2782, 1_234_567)),
            ("formatDate", units.format_date, (0, 1_700_000_000.25)),
            ("formatClock", units.format_clock, (0, 1_700_000_000.25)),
        ):
            found = await page.evaluate(f"{json.dumps(values)}.map(value => {name}(value))")
            assert found == [form(value) for value in values], name  # type: ignore[operator]
