"""The status page: what a browser is sent, and the JSON that it shows. A real browser is in tests/proofs."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from kvxferd.control.status_page import HEADERS, PAGE
from tests.support.http_harness import config_in, over_tcp, over_unix, serving
from tests.support.node_samples import StillNode

(SCRIPT,) = re.findall(r"<script>(.*?)</script>", PAGE, re.DOTALL)
(STYLE,) = re.findall(r"<style>(.*?)</style>", PAGE, re.DOTALL)


def test_the_policy_allows_one_style_and_one_script_and_no_html_of_texts() -> None:
    policy = dict(part.split(" ", 1) for part in HEADERS["Content-Security-Policy"].split("; "))
    for text, directive in ((SCRIPT, "script-src"), (STYLE, "style-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    for directive in ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert policy[directive] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_the_page_loads_nothing_and_has_no_style_or_handler_in_an_attribute() -> None:
    assert re.findall(r"https?://[^\s\"']+", PAGE) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert not re.search(r"<[^>]* (style|src|on\w+)=", PAGE)
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "DOMParser", "document.write", "eval("):
        assert sink not in SCRIPT


async def test_the_page_and_what_it_shows_over_http(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()) as server, over_tcp(server) as tcp, over_unix(config) as unix:
        for client in (tcp, unix):
            async with client.get("/") as reply:
                assert await reply.text() == PAGE
                for name, value in HEADERS.items():
                    assert reply.headers[name] == value
            async with client.get("/v1/status") as reply:
                verdict = (await reply.json())["verdict"]
                assert verdict["level"] == "bad"
                assert verdict["text"].startswith("Pulls fail: 1 of 3 failed in the last 3 s (33.3 %)")


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
                    (peer,) = found["peers"]
                    assert (peer["state"], peer["failed"], peer["num_grants"]) == ("up", 1, 7)
            for query in ("-1", "x", "", "1.5", "9999999", "\N{SUPERSCRIPT TWO}"):
                async with client.get("/v1/samples", params={"seconds": query}) as reply:
                    assert reply.status == 400, query
