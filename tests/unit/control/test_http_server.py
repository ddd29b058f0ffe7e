"""HTTP on real sockets: who is answered what, and what is left behind."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import socket
import stat
from pathlib import Path

import msgspec
import pytest

from kvxferd.config import load_config
from kvxferd.control.http_routes import ROUTES, Access
from kvxferd.control.node_admin import terms_of_all
from kvxferd.control.status_page import HEADERS, PAGE
from kvxferd.errors import Code, ConfigError
from kvxferd.ids import EngineId
from kvxferd.plan import TransferTopology
from kvxferd.records import NodeSnapshot
from kvxferd.telemetry.history import record_from_json
from tests.support.attention_engines import engine, layout_of, spec
from tests.support.fetched_engine import register
from tests.support.http_harness import ServedNode, ask, config_in, served, serving
from tests.support.node_samples import SOURCE, StillNode, node_snapshot, records

READ_ROUTES = [route.path for route in ROUTES if route.access is Access.ANYONE]


async def test_reading_is_the_same_on_both(http: ServedNode) -> None:
    for path in (route.format(engine_id=SOURCE) for route in READ_ROUTES):
        for client in (http.tcp, http.unix):
            assert (await ask(client, path))[0] == 200, path
    async with http.tcp.get("/metrics") as reply:
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "kvxferd_registered_ranks" in await reply.text()


async def test_json_holds_what_the_node_said(http: ServedNode) -> None:
    _, status = await ask(http.unix, "/v1/status")
    assert msgspec.convert(status["node"], NodeSnapshot) == node_snapshot()
    assert status["ready"] is True
    _, history = await ask(http.unix, "/v1/history")
    assert [record_from_json(record) for record in history["records"]] == records()


async def test_a_node_that_is_not_ready_says_why_and_a_warning_does_not_make_it_so(http: ServedNode) -> None:
    http.node.warned = ["the peer socket is open"]
    status, reply = await ask(http.unix, "/readyz")
    assert status == 200
    (warning,) = reply.pop("warnings")
    assert reply == {"ready": True, "reasons": []}
    assert (warning["kind"], warning["message"], warning["since"]) == (
        "peer-socket-open",
        "the peer socket is open",
        1_790_000_000.0,
    )
    http.node.reasons = ["nixl cannot be imported"]
    status, reply = await ask(http.unix, "/readyz")
    assert (status, reply["ready"], reply["reasons"]) == (503, False, http.node.reasons)
    assert (await ask(http.unix, "/healthz"))[0] == 200
    _, reply = await ask(http.unix, "/v1/status")
    assert reply["verdict"] == {"level": "bad", "text": "Not ready: nixl cannot be imported.", "remedy": ""}


async def test_what_is_not_in_the_table_gets_a_code_and_a_sentence(http: ServedNode) -> None:
    status, reply = await ask(http.unix, "/v2/status")
    assert (status, reply["error"]["code"]) == (404, "not-found")
    async with http.unix.get("/v1/drain") as reply:
        assert (reply.status, reply.headers["Allow"]) == (405, "POST")


async def test_an_error_of_the_daemons_costs_one_answer(tmp_path: Path) -> None:
    class Broken(StillNode):
        def records(self) -> list:  # type: ignore[type-arg]
            raise ValueError("secret")

    async with served(config_in(tmp_path), Broken()) as http:
        status, reply = await ask(http.unix, "/v1/history")
        assert status == 500
        assert "secret" not in str(reply)
        assert (await ask(http.unix, "/v1/transfers"))[0] == 200


async def test_the_control_socket_comes_and_goes(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    path = Path(config.control.socket)
    async with serving(config, StillNode()) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert not path.exists()
    assert server.tcp_address is None
    await server.stop()


async def test_a_dead_daemons_socket_is_replaced_and_a_living_ones_is_left_to_it(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(config.control.socket)
    async with served(config) as http:
        assert (await ask(http.unix, "/healthz"))[0] == 200
        with pytest.raises(ConfigError, match=f"process {os.getpid()}") as refused:
            async with serving(config, StillNode()):
                pass
        assert refused.value.code is Code.ALREADY_RUNNING
        assert (await ask(http.unix, "/healthz"))[0] == 200


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
        assert policy.pop(directive) == f"'sha256-{digest}'"
    assert policy.pop("require-trusted-types-for") == "'script'"
    for directive in ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert policy[directive] == "'none'"
    assert not re.search("unsafe|[*]", HEADERS["Content-Security-Policy"])
    # The page loads nothing (the one address is a name), and has no style or handler in an attribute.
    assert re.findall(r"https?://[^\s\"']+", PAGE) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<[^>]* (style|src|on\w+)=", PAGE)
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "DOMParser", "document.write", "eval("):
        assert sink not in SCRIPT


async def test_the_page_and_what_it_shows_over_http(http: ServedNode) -> None:
    for client in (http.tcp, http.unix):
        async with client.get("/") as reply:
            assert await reply.text() == PAGE
            assert {name: reply.headers[name] for name in HEADERS} == HEADERS
        _, status = await ask(client, "/v1/status")
        assert status["verdict"]["level"] == "bad"
        assert status["verdict"]["text"].startswith("Pulls fail: 1 of 3 failed in the last 20 s (33.3 %)")


async def test_samples_over_http(http: ServedNode) -> None:
    for client in (http.tcp, http.unix):
        status, found = await ask(client, "/v1/samples")
        assert status == 200
        assert [slot and slot["delivered"] for slot in found["slots"]] == [1, None, 1]
        assert found["failed_pulls"][0]["code"] == "lease-expired"
        assert found["slowest_pulls"][0]["transfer_id"] == "req-0"
        (peer,) = found["peers"]
        assert (peer["state"], peer["failed"], peer["num_grants"]) == ("up", 1, 7)


def test_the_topology_shows_the_last_used_first_as_far_as_ranks_have_room() -> None:
    own = spec(tp=1, heads=8)
    made = TransferTopology(own, layout_of(own))
    for now, (name, tp) in enumerate((("many", 64), ("second", 2), ("third", 1))):
        named = {
            rank: (msgspec.structs.replace(own, engine_id=EngineId(name)), layout)
            for rank, (own, layout) in engine(tp=tp, heads=8).items()
        }
        register(made, named)
        [*_, known] = made.engines()
        known.last_used = float(now)
    shown = [(terms["engine_id"], terms["last_used_s"]) for terms in terms_of_all([made], now=10.0)]
    assert shown == [("third", 8.0), ("second", 9.0), ("many", 10.0)]
    assert [terms["engine_id"] for terms in terms_of_all([made], 10.0, max_ranks=6)] == ["third", "second"]
    assert "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] and 48 more" in made.describe(
        EngineId("many")
    )


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
    async with served(load_config(None, {}, sections)) as http:
        found, reply = await ask(http.tcp, "/v1/status", headers={"Host": host})
        assert found == status
        if status == 403:
            assert reply["error"]["code"] == "not-allowed"
            assert "http.hosts" in reply["error"]["message"]
        assert (await ask(http.unix, "/v1/status", headers={"Host": host}))[0] == 200
