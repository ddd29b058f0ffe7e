"""The table of HTTP routes: method, path, access and handler.

Nothing changes state over TCP: on control.sock the kernel names the user, and a token would be one more
secret on every node.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import NamedTuple

import msgspec
from aiohttp import web

import kvxferd
from kvxferd.control import admin_handlers
from kvxferd.control.response_cache import METRICS, NODE_ADMIN, snapshot_for
from kvxferd.control.responses import error_response, json_response
from kvxferd.control.status_page import page_response
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import EngineId
from kvxferd.telemetry.history import HistoryQuery
from kvxferd.telemetry.log_buffer import LOG_BUFFER
from kvxferd.telemetry.overview import failure_reasons, peer_lines, verdict_of
from kvxferd.telemetry.samples import RING_S

# Records of each list in `/v1/samples`.
MAX_NOTABLE = 64


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
    return page_response()


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
    reasons = request.app[NODE_ADMIN].readiness()
    reply = {"ready": not reasons, "reasons": reasons, "warnings": request.app[NODE_ADMIN].warnings()}
    return json_response(reply, 503 if reasons else 200)


async def status(request: web.Request) -> web.StreamResponse:
    """The whole node."""
    view, node = request.app[NODE_ADMIN], await snapshot_for(request)
    reasons, warnings, minute = view.readiness(), view.warnings(), view.samples.last_minute()
    return json_response(
        {
            "version": kvxferd.__version__,
            "ready": not reasons,
            "reasons": reasons,
            "verdict": verdict_of(
                node,
                reasons=reasons,
                warnings=[warning.kind.value for warning in warnings],
                minute=minute,
                failed=view.history.failed_pulls(),
                config_path=view.config_path,
            ),
            "warnings": warnings,
            "last_minute": minute,
            "node": node,
        }
    )


async def config(request: web.Request) -> web.StreamResponse:
    """The settings that the daemon runs with, and where each comes from. Secrets are not among them."""
    view = request.app[NODE_ADMIN]
    return json_response({"file": view.config_path or None, "settings": view.settings()})


async def engines(request: web.Request) -> web.StreamResponse:
    """Local engines and their ranks, and engine ids' owners."""
    node = await snapshot_for(request)
    return json_response({"engines": node.engines, "ownerships": node.ownerships})


async def layouts(request: web.Request) -> web.StreamResponse:
    """Spec and layout of every rank known of one engine: what `kvxferd explain @ENGINE_ID` reads."""
    engine_id = EngineId(request.match_info["engine_id"])
    ranks = request.app[NODE_ADMIN].layouts(engine_id)
    if not ranks:
        message = f"cannot tell of engine {engine_id!r}: it is neither registered here nor learnt from a peer"
        return error_response(404, Code.ENGINE_UNKNOWN, message)
    return json_response({"ranks": [{"spec": spec, "layout": layout} for spec, layout in ranks]})


async def topology(request: web.Request) -> web.StreamResponse:
    """Each stage of a remote engine as each local rank knows it, by the names of in-engine connectors."""
    return json_response({"topology": request.app[NODE_ADMIN].topologies()})


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
    """The last records that the query finds, oldest first."""
    try:
        query = msgspec.convert(dict(request.query), HistoryQuery, strict=False)
    except msgspec.ValidationError as error:
        raise KvxferdError(f"cannot search the history: {error}", Code.BAD_REQUEST) from error
    return json_response({"records": request.app[NODE_ADMIN].history.search(query)})


async def samples(request: web.Request) -> web.StreamResponse:
    """The last 15 minutes in numbers; by pair of engines and by peer; what failed."""
    view, node, now = request.app[NODE_ADMIN], await snapshot_for(request), time.time()
    report, failed = view.samples.report(), view.history.failed_pulls()
    return json_response(
        {
            **{name: getattr(report, name) for name in report.__struct_fields__},
            "peers": peer_lines(node, report.peers),
            "failure_reasons": failure_reasons(failed, now, RING_S)[:MAX_NOTABLE],
            "failed_pulls": failed[:MAX_NOTABLE],
            "slowest_pulls": view.samples.slowest_pulls()[:MAX_NOTABLE],
            "expired_leases": view.history.expired_leases()[:MAX_NOTABLE],
        }
    )


async def recent_log(request: web.Request) -> web.StreamResponse:
    """The last lines of the log, oldest first, or those `after` a cursor, and the cursor for what follows."""
    lines, cursor = LOG_BUFFER.lines(request.query.get("after", "")[:64])
    return json_response({"lines": lines, "cursor": cursor})


ROUTES = [
    Route("GET", "/", Access.ANYONE, status_page),
    Route("GET", "/metrics", Access.ANYONE, metrics, is_cached=True),
    Route("GET", "/healthz", Access.ANYONE, healthz),
    Route("GET", "/readyz", Access.ANYONE, readyz),
    Route("GET", "/v1/status", Access.ANYONE, status, is_cached=True),
    Route("GET", "/v1/engines", Access.ANYONE, engines, is_cached=True),
    Route("GET", "/v1/engines/{engine_id}/layouts", Access.ANYONE, layouts),
    Route("GET", "/v1/topology", Access.ANYONE, topology, is_cached=True),
    Route("GET", "/v1/peers", Access.ANYONE, peers, is_cached=True),
    Route("GET", "/v1/transfers", Access.ANYONE, transfers, is_cached=True),
    Route("GET", "/v1/history", Access.ANYONE, history),
    Route("GET", "/v1/samples", Access.ANYONE, samples, is_cached=True),
    Route("GET", "/v1/config", Access.ADMIN, config),
    Route("GET", "/v1/log", Access.ADMIN, recent_log),
    Route("POST", "/v1/reload", Access.ADMIN, admin_handlers.reload),
    Route("POST", "/v1/drain", Access.ADMIN, admin_handlers.drain),
    Route("POST", "/v1/peers/drop", Access.ADMIN, admin_handlers.drop_peer),
    Route("POST", "/v1/engines/disown", Access.ADMIN, admin_handlers.disown),
    Route("POST", "/v1/transfers/cancel", Access.ADMIN, admin_handlers.cancel_transfer),
    Route("POST", "/v1/pulls/cancel", Access.ADMIN, admin_handlers.cancel_pull),
]
