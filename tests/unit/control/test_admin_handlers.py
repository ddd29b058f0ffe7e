"""The levers over HTTP: what is asked how, who may, and what comes back."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from kvxferd.control.http_routes import ROUTES, Access
from tests.support.http_harness import ServedNode, ask, config_in, served
from tests.support.log_stream import json_log
from tests.support.node_samples import PEER
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
        (
            "/v1/transfers/cancel",
            {"transfer_id": "req-1"},
            200,
            {"cancelled": "req-1", "engines": ["decode-0@g1"]},
        ),
        ("/v1/transfers/cancel", {}, 400, "bad-request"),
        ("/v1/transfers/cancel", {"transfer": "req-1"}, 400, "bad-request"),
        ("/v1/pulls/cancel", {"pull": 9}, 200, {"cancelled": 9}),
        ("/v1/pulls/cancel", {"pull": "seven"}, 400, "bad-request"),
    ],
)
async def test_names_come_in_the_query(http: ServedNode, path, asked, status, answer) -> None:
    query = {name: str(value) for name, value in asked.items()}
    got = await ask(http.unix, path, "POST", params=query)
    if isinstance(answer, str):
        assert (got[0], got[1]["error"]["code"]) == (status, answer)
        assert got[1]["error"]["message"].startswith("cannot ")
    else:
        assert got == (status, answer)


@pytest.mark.parametrize("route", ADMIN_ROUTES, ids=lambda route: route.path)
async def test_no_lever_is_there_over_tcp(http: ServedNode, route) -> None:
    status, refused = await ask(http.tcp, route.path, route.method)
    assert (status, refused["error"]["code"]) == (403, "not-allowed")


@pytest.mark.process
@needs_root
@pytest.mark.parametrize(
    ("uid", "gid", "statuses", "of_status"),
    [
        (NOBODY, NOBODY, {""}, ""),  # they cannot even connect
        (NOBODY, 0, {"403"}, "200"),  # of the socket's group, so it may read
        (0, 0, {"200", "202", "400"}, "200"),
    ],
)
async def test_levers_are_for_root_and_the_daemons_user(uid, gid, statuses, of_status) -> None:
    with open_directory() as directory:
        config = config_in(directory)
        async with served(config) as http:
            got = {await status_as(uid, gid, config.control.socket, r.method, r.path) for r in ADMIN_ROUTES}
            assert got == statuses
            assert await status_as(uid, gid, config.control.socket, "GET", "/v1/status") == of_status
    assert http.node.draining is (uid == 0)


async def status_as(uid: int, gid: int, *arguments: str) -> str:
    """The status that a process of that user gets; "" where it fails."""
    process = await asyncio.create_subprocess_exec(
        *script(POST, uid, gid), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    return out.decode().strip()


async def test_each_request_for_a_change_is_logged_with_its_caller(http: ServedNode) -> None:
    with json_log(level="error") as log:
        await http.unix.get("/v1/status")
        await http.unix.post("/v1/transfers/cancel", params={"transfer_id": "req-1\u001b[2J"})
        await http.unix.post("/v1/pulls/cancel", params={"pull": "9", "note": "x" * 1500})
        await http.unix.post("/v1/drain", params={"token": "hunter2"})
        lines = log.lines()
    program = Path("/proc/self/comm").read_text().strip()
    assert [line["event"] for line in lines] == ["operator request"] * 3  # at the level of errors, too
    for line in lines:
        assert (line["uid"], line["pid"], line["program"]) == (os.geteuid(), os.getpid(), program)
        assert line["arguments"].isprintable()
        assert len(line["arguments"]) <= 1000
    assert [line["request"] for line in lines] == [
        "POST /v1/transfers/cancel", "POST /v1/pulls/cancel", "POST /v1/drain",
    ]  # fmt: skip
    assert "req-1" in lines[0]["arguments"]
    assert "hunter2" not in json.dumps(lines)
