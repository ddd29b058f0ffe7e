"""What stands on the status page within seconds of a fault: two daemons, a real pull, and Chromium."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.support.browser import Page, browser_page, find_browser
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
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


@asynccontextmanager
async def stopped(daemon: Daemon) -> AsyncIterator[None]:
    """Stop a daemon's process: its connections stay, and nothing answers."""
    daemon.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.send_signal(signal.SIGCONT)


def test_a_failure_is_on_the_page_in_seconds(fleet: Fleet, tmp_path: Path) -> None:
    port = free_port()
    prefill = fleet.daemon("prefill")
    decode = fleet.daemon("decode", "--http-bind", f"127.0.0.1:{port}")
    (source,) = fleet.engine(prefill, spec_of("prefill-0"))
    (sink,) = fleet.engine(decode, spec_of("decode-0"))
    pull_and_check([sink], publish([source], 1), 1)
    served = lambda: prefill.control.get("/v1/samples?seconds=60")["last_minute"]  # noqa: E731
    wait_until(lambda: served()["served_transfers"] == 1, "the other side counts it")
    assert served()["served_bytes"] == decode.control.get("/v1/samples")["last_minute"]["pulled_bytes"] > 0
    lost, peer = publish([source], 2), prefill.endpoint

    async def look() -> None:
        assert BROWSER is not None
        async with browser_page(BROWSER) as page:
            await page.emulate(1300, 1000)
            await page.open(f"http://127.0.0.1:{port}/")
            text = await until(page, lambda text: "1 pull delivered" in text, "the good pull", WITHIN_S)
            assert "Ready." in text.partition("IN")[0]
            await _fail_a_pull(page)
            await _follow_the_link(page)
            await page.open(f"http://127.0.0.1:{port}/")
            assert page.errors == []
            decode.send_signal(signal.SIGTERM)  # and does not answer any more
            await until(page, lambda text: "does not answer" in text, "the daemon's end", 2 * WITHIN_S)

    async def _fail_a_pull(page: Page) -> None:
        async with stopped(prefill):
            ticket = sink.pull(lost, ids_for(1002), TOKENS, DEADLINE_S)
            name, fields = await asyncio.to_thread(sink.end_of, ticket)
            assert (name, fields["code"]) == ("Failed", "deadline")
            text = await until(page, lambda text: "Pulls fail" in text, "the failure", WITHIN_S)
        first = text.split("\n\n")[:4]
        assert any("1 of 2 failed in the last" in line and peer in line for line in first), first
        assert "Why pulls failed" in text
        assert "pulls-fail" in text  # the warning, with what to do
        assert "Ready." not in text
        assert (await page.evaluate("document.title")).startswith("!! Pulls fail")

    async def _follow_the_link(page: Page) -> None:
        url = await page.evaluate("[...document.links].find(link => link.textContent == 'req-2').href")
        await page.open(url)
        text = await page.text()
        for part in ("Transfer req-2", "failed: deadline", peer, "prefill-0 → decode-0"):
            assert part in text, (part, text)

    asyncio.run(look())
