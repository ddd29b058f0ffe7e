"""The levers over HTTP: what is asked how, who may, and what comes back."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from kvxferd.config import LogConfig
from kvxferd.control.http_routes import ROUTES, Access
from tests.support.http_harness import config_in, over_tcp, over_unix, serving
from tests.support.log_stream import log_to
from tests.support.node_samples import PEER, StillNode
from tests.support.other_user import NOBODY, needs_root, open_directory, script

ADMIN_ROUTES = [route for route in ROUTES if route.access is Access.ADMIN]

# A whole exchange with curl's own words; prints the status.
POST = """
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
head = f"{sys.argv[2]} {sys.argv[3]} HTTP/1.1", "Host: kvxferd", "Content-Length: 2", "Connection: close"
connection.sendall("\\r\\n".join([*head, "", "{}"]).encode())
print(connection.recv(65536).split()[1].decode())
"""


@pytest.mark.parametrize(
    ("path", "asked", "status", "answer"),
    [
        ("/v1/peers/drop", {"endpoint": PEER}, 200, {"dropped": [PEER]}),
        ("/v1/peers/drop", {"endpoint": "tcp://1.2.3.4:5"}, 404, "not-found"),
        ("/v1/engines/disown", {"engine_id": "gone-0"}, 200, {"disowned": "gone-0", "uid": 1000, "ranks": 2}),
        ("/v1/engines/disown", {"engine_id": "decode-0"}, 409, "rank-taken"),
        ("/v1/engines/disown", {"engine_id": "nobodys-0"}, 404, "not-found"),
        (
            "/v1/transfers/cancel",
            {"transfer_id": "req-1"},
            200,
            {"cancelled": "req-1", "engines": ["decode-0@g1"]},
        ),
        ("/v1/transfers/cancel", {"transfer_id": "req-1", "engine_id": "other"}, 404, "transfer-unknown"),
        ("/v1/transfers/cancel", {}, 400, "bad-request"),
        ("/v1/transfers/cancel", {"transfer": "req-1"}, 400, "bad-request"),
        ("/v1/pulls/cancel", {"pull": 9}, 200, {"cancelled": 9}),
        ("/v1/pulls/cancel", {"pull": 9999}, 404, "not-found"),
        ("/v1/pulls/cancel", {"pull": "seven"}, 400, "bad-request"),
    ],
)
async def test_names_come_as_json_or_in_the_query(tmp_path: Path, path, asked, status, answer) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()), over_unix(config) as client:
        query = {name: str(value) for name, value in asked.items()}
        for given in ({"data": json.dumps(asked)}, {"params": query}):
            async with client.post(path, **given) as response:
                got = await response.json()
                assert response.status == status, got
                if isinstance(answer, str):
                    assert got["error"]["code"] == answer
                    assert got["error"]["message"].startswith("cannot ")
                else:
                    assert got == answer


async def test_a_drain_that_is_waited_for_says_what_it_left(tmp_path: Path) -> None:
    config, node = config_in(tmp_path), StillNode()
    async with serving(config, node), over_unix(config) as client:
        got = await (await client.post("/v1/drain", params={"wait": "true"})).json()
    assert node.draining
    assert got["drained"] is False
    assert [t["transfer_id"] for t in got["transfers"]] == ["req-1", "req-2"]
    assert len(got["pulls"]) == 1


async def test_warnings_do_not_make_a_node_unready(tmp_path: Path) -> None:
    config, node = config_in(tmp_path), StillNode()
    node.warned = ["the peer socket is open"]
    async with serving(config, node), over_unix(config) as client, client.get("/readyz") as response:
        assert response.status == 200
        reply = await response.json()
        active = reply.pop("active_warnings")
        assert reply == {"ready": True, "reasons": [], "warnings": node.warned}
        assert [(w["kind"], w["message"], w["since"]) for w in active] == [
            ("peer-socket-open", "the peer socket is open", 1_790_000_000.0)
        ]


@pytest.mark.parametrize("route", ADMIN_ROUTES, ids=lambda route: route.path)
async def test_no_lever_is_there_over_tcp(tmp_path: Path, route) -> None:
    async with serving(config_in(tmp_path), StillNode()) as server, over_tcp(server) as tcp:
        refused = await tcp.request(route.method, route.path)
        assert (refused.status, (await refused.json())["error"]["code"]) == (403, "not-allowed")


@pytest.mark.process
@needs_root
@pytest.mark.parametrize(
    ("uid", "gid", "statuses"),
    [
        (NOBODY, 0, {"403"}),  # of the socket's group, so it may read
        (0, 0, {"200", "202", "400"}),
    ],
)
async def test_levers_are_for_root_and_the_daemons_user(uid, gid, statuses) -> None:
    node = StillNode()
    with open_directory() as directory:
        config = config_in(directory)
        async with serving(config, node):
            got = {await status_as(uid, gid, config.control.socket, r.method, r.path) for r in ADMIN_ROUTES}
            assert got == statuses
            assert await status_as(uid, gid, config.control.socket, "GET", "/v1/status") == "200"
    assert node.draining is (uid == 0)


@pytest.mark.process
@needs_root
async def test_others_cannot_even_connect() -> None:
    with open_directory() as directory:
        config = config_in(directory)
        async with serving(config, StillNode()):
            assert await status_as(NOBODY, NOBODY, config.control.socket, "GET", "/v1/status") == ""


async def status_as(uid: int, gid: int, *arguments: str) -> str:
    """The status that a process of that user gets; "" where it fails."""
    process = await asyncio.create_subprocess_exec(
        *script(POST, uid, gid), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    return out.decode().strip()


@pytest.fixture
def json_log() -> Iterator[io.StringIO]:
    """The log of this process, errors alone and as JSON."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    log_to(LogConfig(level="error", format="json"), stream)
    yield stream
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level


async def test_each_request_for_a_change_is_logged_with_its_caller(
    tmp_path: Path, json_log: io.StringIO
) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()), over_unix(config) as client:
        await client.get("/v1/status")
        await client.post("/v1/transfers/cancel", json={"transfer_id": "req-1\u001b[2J"})
        await client.post("/v1/pulls/cancel", params={"pull": "9", "note": "x" * 1500})
        await client.post("/v1/drain", json={"token": "hunter2"})
    lines = [json.loads(line) for line in json_log.getvalue().splitlines()]
    program = Path("/proc/self/comm").read_text().strip()
    assert [line["event"] for line in lines] == ["operator request"] * 3  # at the level of errors, too
    for line in lines:
        assert (line["uid"], line["pid"]) == (os.geteuid(), os.getpid())
        assert line["program"] == program
        assert line["arguments"].isprintable()
        assert len(line["arguments"]) <= 1000
    assert [line["request"] for line in lines] == [
        "POST /v1/transfers/cancel", "POST /v1/pulls/cancel", "POST /v1/drain",
    ]  # fmt: skip
    assert "req-1" in lines[0]["arguments"]
    assert "hunter2" not in json.dumps(lines)
