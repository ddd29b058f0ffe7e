"""HTTP on real sockets: who is answered what, and what is left behind."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import socket
import stat
from pathlib import Path

import pytest

from kvxferd.config import load_config
from kvxferd.control.http_routes import ROUTES, Access
from kvxferd.control.status_page import HEADERS, PAGE
from kvxferd.errors import Code, ConfigError
from kvxferd.records import NodeSnapshot
from kvxferd.telemetry.history import record_from_json
from tests.support.http_harness import config_in, over_tcp, over_unix, serving
from tests.support.node_samples import SOURCE, StillNode, node_snapshot, records

READ_ROUTES = [route.path for route in ROUTES if route.access is Access.ANYONE]


async def test_reading_is_the_same_on_both(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()) as server, over_tcp(server) as tcp, over_unix(config) as unix:
        for path in (route.format(engine_id=SOURCE) for route in READ_ROUTES):
            for client in (tcp, unix):
                query = {"id": "req-1"} if path == "/transfers" else {}
                async with client.get(path, params=query) as reply:
                    assert reply.status == 200, path
        async with tcp.get("/metrics") as reply:
            assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert "kvxferd_registered_ranks" in await reply.text()


async def test_json_holds_what_the_node_said(tmp_path: Path) -> None:
    import msgspec

    config = config_in(tmp_path)
    async with serving(config, StillNode()), over_unix(config) as client:
        status = await (await client.get("/v1/status")).json()
        assert msgspec.convert(status["node"], NodeSnapshot) == node_snapshot()
        assert status["ready"] is True
        engines = await (await client.get("/v1/engines")).json()
        assert [engine["engine_id"] for engine in engines["engines"]] == ["decode-0", "<b>odd</b>"]
        peers = await (await client.get("/v1/peers")).json()
        assert peers["peers"][0]["num_grants"] == 7
        transfers = await (await client.get("/v1/transfers")).json()
        assert [len(transfers["transfers"]), len(transfers["pulls"])] == [2, 1]
        history = await (await client.get("/v1/history")).json()
        assert [record_from_json(record) for record in history["records"]] == records()


async def test_a_node_that_is_not_ready_says_why(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode(["nixl cannot be imported"])), over_unix(config) as client:
        async with client.get("/readyz") as reply:
            assert reply.status == 503
            assert await reply.json() == {
                "ready": False,
                "reasons": ["nixl cannot be imported"],
                "warnings": [],
                "active_warnings": [],
            }
        async with client.get("/healthz") as reply:
            assert reply.status == 200
        async with client.get("/v1/status") as reply:
            verdict = (await reply.json())["verdict"]
            text = "Not ready: nixl cannot be imported."
            assert verdict == {"level": "bad", "text": text, "remedy": ""}


async def test_what_is_not_in_the_table_gets_a_code_and_a_sentence(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()), over_unix(config) as client:
        async with client.get("/v2/status") as reply:
            assert reply.status == 404
            assert (await reply.json())["error"]["code"] == "not-found"
        async with client.get("/v1/drain") as reply:
            assert reply.status == 405
            assert reply.headers["Allow"] == "POST"


async def test_an_error_of_the_daemons_costs_one_answer(tmp_path: Path) -> None:
    class Broken(StillNode):
        def records(self) -> list:  # type: ignore[type-arg]
            raise ValueError("secret")

    config = config_in(tmp_path)
    async with serving(config, Broken()), over_unix(config) as client:
        async with client.get("/v1/history") as reply:
            assert reply.status == 500
            assert "secret" not in await reply.text()
        async with client.get("/v1/transfers") as reply:
            assert reply.status == 200


async def test_the_control_socket_comes_and_goes(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    path = Path(config.control.socket)
    async with serving(config, StillNode()) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert not path.exists()
    assert server.tcp_address is None
    await server.stop()


async def test_a_dead_daemons_socket_is_replaced(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(config.control.socket)
    async with serving(config, StillNode()), over_unix(config) as client, client.get("/healthz") as reply:
        assert reply.status == 200


async def test_a_living_daemons_socket_is_left_to_it(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()), over_unix(config) as client:
        with pytest.raises(ConfigError, match=f"process {os.getpid()}") as refused:
            async with serving(config, StillNode()):
                pass
        assert refused.value.code is Code.ALREADY_RUNNING
        async with client.get("/healthz") as reply:
            assert reply.status == 200


async def test_an_address_that_is_taken_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = config_in(tmp_path, bind=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"http\.bind"):
            async with serving(config, StillNode()):
                pass
    assert not Path(config.control.socket).exists()


async def test_a_file_in_the_sockets_place_is_left_alone(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    Path(config.control.socket).write_text("mine")
    with pytest.raises(ConfigError, match=r"control\.socket"):
        async with serving(config, StillNode()):
            pass
    assert Path(config.control.socket).read_text() == "mine"


# --- the status page: what a browser is sent, and the JSON that it shows. A real browser is in tests/proofs


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
                assert verdict["text"].startswith("Pulls fail: 1 of 3 failed in the last 20 s (33.3 %)")


async def test_samples_over_http(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()) as server, over_tcp(server) as tcp, over_unix(config) as unix:
        for client in (tcp, unix):
            for query in ("", "?seconds=1", "?seconds=60", "?seconds=900", "?seconds=999999"):
                async with client.get(f"/v1/samples{query}") as reply:
                    assert reply.status == 200, query
                    found = await reply.json()
                    assert [slot and slot["delivered"] for slot in found["slots"]] == [1, None, 1]
                    assert found["failed_pulls"][0]["code"] == "lease-expired"
                    assert found["slowest_pulls"][0]["transfer_id"] == "req-0"
                    (peer,) = found["peers"]
                    assert (peer["state"], peer["failed"], peer["num_grants"]) == ("up", 1, 7)
            for query in ("-1", "x", "", "1.5", "9999999", "\N{SUPERSCRIPT TWO}"):
                async with client.get("/v1/samples", params={"seconds": query}) as reply:
                    assert reply.status == 400, query


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9440", 200),
        ("[::1]:9440", 200),
        ("10.0.0.7", 200),
        ("localhost:1", 200),
        (f"{socket.gethostname().upper()}:9440", 200),
        ("node-7.example:9440", 200),  # in http.hosts
        ("rebind.evil.example:9440", 403),
        ("127.0.0.1.evil.example", 403),
        ("evil.example@127.0.0.1", 200),  # of the address; no browser sends it
        ("[::1", 403),
        ("a" * 2000, 403),
    ],
)
async def test_over_tcp_only_hosts_of_this_node_are_served(tmp_path: Path, host: str, status: int) -> None:
    sections = {"node.run_dir": str(tmp_path), "http.bind": "127.0.0.1:0", "http.hosts": ["node-7.example"]}
    config = load_config(None, {}, sections)
    async with serving(config, StillNode()) as server, over_tcp(server) as tcp, over_unix(config) as unix:
        async with tcp.get("/v1/status", headers={"Host": host}) as reply:
            assert reply.status == status
            if status == 403:
                error = (await reply.json())["error"]
                assert error["code"] == "not-allowed"
                assert "http.hosts" in error["message"]
        async with unix.get("/v1/status", headers={"Host": host}) as reply:
            assert reply.status == 200
