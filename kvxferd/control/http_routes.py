"""The table of HTTP routes: method, path, access and handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import NamedTuple

from aiohttp import web

import kvxferd
from kvxferd.control import admin_handlers
from kvxferd.control.node_api import METRICS, NODE_API
from kvxferd.control.response_cache import snapshot_for
from kvxferd.control.responses import error_response, json_response
from kvxferd.control.status_page import render_status_page
from kvxferd.control.topology_response import topology_response
from kvxferd.errors import Code
from kvxferd.ids import EngineId
from kvxferd.telemetry.history import record_to_json


class Access(Enum):
    """Who may send the request."""

    ANYONE = "anyone"
    ADMIN = "admin"  # root or the daemon's own user, on control.sock


class Route(NamedTuple):
    """One row of the table. `is_cached`: unprivileged clients share one cached response."""

    method: str
    path: str
    access: Access
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    is_cached: bool = False


async def status_page(request: web.Request) -> web.StreamResponse:
    """The status page, for a browser."""
    view, node = request.app[NODE_API], await snapshot_for(request)
    text = render_status_page(node, view.readiness(), view.history())
    return web.Response(text=text, content_type="text/html")


async def metrics(request: web.Request) -> web.StreamResponse:
    """Prometheus' text format."""
    return web.Response(
        body=request.app[METRICS].render(await snapshot_for(request)),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


async def healthz(request: web.Request) -> web.StreamResponse:
    """200 while the daemon's event loop runs."""
    return json_response({"healthy": True})


async def readyz(request: web.Request) -> web.StreamResponse:
    """200 when the node takes registrations and pulls, else 503 with the reasons; warnings with either."""
    reasons = request.app[NODE_API].readiness()
    answer = {"ready": not reasons, "reasons": reasons, "warnings": request.app[NODE_API].warnings()}
    return json_response(answer, 503 if reasons else 200)


async def status(request: web.Request) -> web.StreamResponse:
    """The whole node."""
    view = request.app[NODE_API]
    reasons = view.readiness()
    return json_response(
        {
            "version": kvxferd.__version__,
            "ready": not reasons,
            "reasons": reasons,
            "warnings": view.warnings(),
            "node": await snapshot_for(request),
        }
    )


async def engines(request: web.Request) -> web.StreamResponse:
    """Local engines and their ranks, retired movers that have not exited, and engine ids' owners."""
    node = await snapshot_for(request)
    return json_response(
        {"engines": node.engines, "retired_movers": node.retired_movers, "ownerships": node.ownerships}
    )


async def layouts(request: web.Request) -> web.StreamResponse:
    """Spec and layout of every rank known of one engine: what `kvxferd explain @ENGINE_ID` reads."""
    engine_id = EngineId(request.match_info["engine_id"])
    ranks = request.app[NODE_API].layouts(engine_id)
    if not ranks:
        message = f"cannot tell of engine {engine_id!r}: it is neither registered here nor learnt from a peer"
        return error_response(404, Code.ENGINE_UNKNOWN, message)
    return json_response({"ranks": [{"spec": spec, "layout": layout} for spec, layout in ranks]})


async def topology(request: web.Request) -> web.StreamResponse:
    """Each remote engine as each local rank knows it: facts, ratios, regions, splits and reads."""
    return await topology_response(request, None)


async def engine_topology(request: web.Request) -> web.StreamResponse:
    """One remote engine as each local rank knows it: what `kvxferd engines --topology ENGINE` shows."""
    return await topology_response(request, EngineId(request.match_info["engine_id"]))


async def peers(request: web.Request) -> web.StreamResponse:
    """Other daemons, and the engines learnt from them."""
    return json_response({"peers": (await snapshot_for(request)).peers})


async def transfers(request: web.Request) -> web.StreamResponse:
    """Transfers published here and pulls that run here: the first of them, and their number."""
    node = await snapshot_for(request)
    return json_response(
        {
            "transfers": node.transfers,
            "pulls": node.pulls,
            "num_transfers": sum(node.transfer_states.values()),
            "num_pulls": sum(node.pull_phases.values()),
        }
    )


async def history(request: web.Request) -> web.StreamResponse:
    """The last records, oldest first."""
    return json_response({"records": [record_to_json(record) for record in request.app[NODE_API].history()]})


ROUTES = [
    Route("GET", "/", Access.ANYONE, status_page, is_cached=True),
    Route("GET", "/metrics", Access.ANYONE, metrics, is_cached=True),
    Route("GET", "/healthz", Access.ANYONE, healthz),
    Route("GET", "/readyz", Access.ANYONE, readyz),
    Route("GET", "/v1/status", Access.ANYONE, status, is_cached=True),
    Route("GET", "/v1/engines", Access.ANYONE, engines, is_cached=True),
    Route("GET", "/v1/engines/{engine_id}/layouts", Access.ANYONE, layouts),
    Route("GET", "/v1/engines/{engine_id}/topology", Access.ANYONE, engine_topology),
    Route("GET", "/v1/topology", Access.ANYONE, topology),
    Route("GET", "/v1/peers", Access.ANYONE, peers, is_cached=True),
    Route("GET", "/v1/transfers", Access.ANYONE, transfers, is_cached=True),
    Route("GET", "/v1/history", Access.ANYONE, history, is_cached=True),
    Route("POST", "/v1/reload", Access.ADMIN, admin_handlers.reload),
    Route("POST", "/v1/drain", Access.ADMIN, admin_handlers.drain),
    Route("POST", "/v1/peers/drop", Access.ADMIN, admin_handlers.drop_peer),
    Route("POST", "/v1/engines/disown", Access.ADMIN, admin_handlers.disown),
    Route("POST", "/v1/transfers/cancel", Access.ADMIN, admin_handlers.cancel_transfer),
    Route("POST", "/v1/pulls/cancel", Access.ADMIN, admin_handlers.cancel_pull),
]
