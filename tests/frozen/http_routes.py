"""The control socket's routes, and the shape of every reply.

Two nodes are served in this process: the sample of `samples.py`, which has everything there is to show, and
a real core with an engine, a peer, a transfer and a pull. No daemon is started.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any, get_args

import aiohttp
import structlog
from msgspec import inspect as types

from kvxferd.control.http_routes import ROUTES
from kvxferd.control.node_api import ReloadResult
from kvxferd.core.snapshot import NodeSnapshot, Record
from kvxferd.core.topology_snapshot import TopologySnapshot
from kvxferd.errors import Code, KvxferdError
from kvxferd.telemetry.history import kind_of
from tests.frozen.real_node import real_node
from tests.frozen.serving import Served, serving
from tests.frozen.shapes import example_of, shape_of, struct_of
from tests.support.node_samples import PEER, SOURCE, StillNode

READS = [route.path for route in ROUTES if route.method == "GET"]
# What is asked of the routes that change something, and of none that is right.
ASKED: list[tuple[str, Any]] = [
    ("/v1/reload", None),
    ("/v1/reload", {"all": True}),
    ("/v1/drain", None),
    ("/v1/drain", {"wait": True}),
    ("/v1/drain", {"wait": "long"}),
    ("/v1/peers/drop", {"endpoint": PEER}),
    ("/v1/peers/drop", {"endpoint": "tcp://1.2.3.4:5"}),
    ("/v1/peers/drop", {}),
    ("/v1/peers/probe", {"endpoint": PEER}),
    ("/v1/peers/probe", {"endpoint": "tcp://1.2.3.4:5"}),
    ("/v1/peers/probe", {}),
    ("/v1/engines/disown", {"engine_id": "gone-0"}),
    ("/v1/engines/disown", {"engine_id": "decode-0"}),
    ("/v1/transfers/cancel", {"transfer_id": "req-1"}),
    ("/v1/transfers/cancel", {"transfer_id": "req-1", "engine_id": "other"}),
    ("/v1/transfers/cancel", {"transfer": "req-1"}),
    ("/v1/pulls/cancel", {"pull": 9}),
    ("/v1/pulls/cancel", {"pull": 9999}),
    ("/v1/pulls/cancel", {"pull": "seven"}),
]


class Failing(StillNode):
    """A node whose history cannot be read, and whose configuration is wrong."""

    def history(self) -> list[Any]:
        """Fail by an error of the daemon's."""
        raise ValueError("of the daemon's own")

    def reload(self) -> ReloadResult:
        """Refuse."""
        raise KvxferdError("cannot reload", Code.CONFIG_INVALID)


def surface() -> dict[str, Any]:
    """Return routes, replies, and the types of what a reply holds."""
    return {
        "routes": [
            {
                "name": f"{route.method} {route.path}",
                "access": route.access.value,
                "shared": route.is_cached,
            }
            for route in ROUTES
        ],
        **asyncio.run(_replies()),
        "node": struct_of(NodeSnapshot),
        "topology": struct_of(TopologySnapshot),
        "reloaded": struct_of(ReloadResult),
        "history": _history(),
    }


def _history() -> dict[str, Any]:
    kinds = get_args(Record)
    return {kind_of(example_of(types.type_info(kind), "record")): struct_of(kind) for kind in kinds}


async def _replies() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        places = [Path(directory, name) for name in ("sample", "real", "failing")]
        for place in places:
            place.mkdir()
        sample, real, failing = places
        async with serving(sample, StillNode()) as served:
            of_sample = await _reads(served, str(SOURCE))
            asked = await _asked(served)
            refused = await _refused(served)
        async with serving(real, real_node()) as served:
            of_real = await _reads(served, "prefill")
        node = Failing(["the movers' parent is still importing its library"])
        async with serving(failing, node) as served, served.over_unix() as client:
            failed = {}
            with structlog.testing.capture_logs():  # the daemon's own errors are logged with a traceback
                for method, path in (("GET", "/readyz"), ("GET", "/v1/history"), ("POST", "/v1/reload")):
                    failed[f"{method} {path}"] = await _reply(client, method, path)
    return {
        "replies of the sample": of_sample,
        "replies of a real node": of_real,
        "replies to operators": asked,
        "refusals": refused,
        "replies of a node that fails": failed,
    }


async def _reads(served: Served, engine_id: str) -> dict[str, Any]:
    async with served.over_unix() as client:
        return {path: await _reply(client, "GET", path.format(engine_id=engine_id)) for path in READS}


async def _asked(served: Served) -> dict[str, Any]:
    async with served.over_unix() as client:
        return {
            f"POST {path} {json.dumps(body)}": await _reply(client, "POST", path, body)
            for path, body in ASKED
        }


async def _refused(served: Served) -> dict[str, Any]:
    admin = [route for route in ROUTES if route.access.value == "admin"]
    async with served.over_tcp() as tcp, served.over_unix() as unix:
        found = {
            f"{route.method} {route.path} over TCP": await _reply(tcp, route.method, route.path)
            for route in admin
        }
        found["no such path"] = await _reply(unix, "GET", "/v2/status")
        found["no such method"] = await _reply(unix, "GET", "/v1/drain")
        found["no such engine"] = await _reply(unix, "GET", "/v1/engines/nobody/layouts")
        found["no such remote engine"] = await _reply(unix, "GET", "/v1/engines/nobody/topology")
        found["a large body"] = await _reply(unix, "POST", "/v1/drain", {"wait": "x" * (1 << 15)})
    return found


async def _reply(client: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> dict[str, Any]:
    given = {} if body is None else {"json": body}
    async with client.request(method, path, **given) as answer:
        reply: dict[str, Any] = {"status": answer.status, "type": answer.headers["Content-Type"]}
        if "Allow" in answer.headers:
            reply["allow"] = answer.headers["Allow"]
        if answer.content_type == "application/json":
            value = await answer.json()
            reply["shape"] = shape_of(value)
            if answer.status >= 400 and "error" in value:
                reply["code"] = value["error"]["code"]
        return reply
