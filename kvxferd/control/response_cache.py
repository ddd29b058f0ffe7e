"""Caches responses to unprivileged HTTP clients.

A snapshot of 8,192 transfers and its JSON take 26 ms of the loop (one core of 2.5 GHz). A
client that requests them in a loop would leave the daemon no time for other work. Root and the daemon's own
user, on control.sock, always get the current state. All others share one snapshot, and one response for
each path, for `MAX_AGE_S` or ten times the time they took, whichever is longer: such clients take a tenth
of the loop's time. A snapshot is made in steps, between which the loop runs other work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvxferd.control.http_connections import HttpConnection
from kvxferd.control.node_admin import NodeAdmin
from kvxferd.records import NodeSnapshot
from kvxferd.telemetry.metrics import Metrics

MAX_AGE_S = 0.5
COST_FACTOR = 10.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ResponseCache:
    """The last snapshot for unprivileged clients, and the responses made from it."""

    def __init__(self, view: NodeAdmin) -> None:
        self._node = view
        self._snapshot: asyncio.Future[NodeSnapshot] | None = None
        self._stale_at = 0.0
        self._responses: dict[str, asyncio.Future[web.Response]] = {}

    async def fresh_snapshot(self) -> NodeSnapshot:
        """Return a new snapshot."""
        for node in self._node.snapshot_steps():
            if node is not None:
                return node
            await asyncio.sleep(0)
        raise AssertionError("a snapshot without an end")

    async def cached_snapshot(self) -> NodeSnapshot:
        """Return the cached snapshot, or a new one if it is too old."""
        loop = asyncio.get_running_loop()
        if self._snapshot is None or (self._snapshot.done() and loop.time() >= self._stale_at):
            self._responses.clear()
            self._snapshot = loop.create_task(self._make_snapshot())
        return await asyncio.shield(self._snapshot)

    async def respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return the path's response, made from the cached snapshot. Paths are few."""
        await self.cached_snapshot()
        made = self._responses.get(request.path)
        if made is None:
            made = self._responses[request.path] = asyncio.ensure_future(self._render(request, handler))
        reply = await asyncio.shield(made)
        return web.Response(body=reply.body, status=reply.status, headers=reply.headers)

    async def _make_snapshot(self) -> NodeSnapshot:
        started = asyncio.get_running_loop().time()
        try:
            return await self.fresh_snapshot()
        finally:
            self._set_stale(started)

    async def _render(self, request: web.Request, handler: Handler) -> web.Response:
        started = asyncio.get_running_loop().time()
        reply = await handler(request)
        assert isinstance(reply, web.Response)
        self._set_stale(started)
        return reply

    def _set_stale(self, started: float) -> None:
        now = asyncio.get_running_loop().time()
        self._stale_at = max(self._stale_at, now + MAX_AGE_S, now + COST_FACTOR * (now - started))


NODE_ADMIN: web.AppKey[NodeAdmin] = web.AppKey("node admin", NodeAdmin)
METRICS: web.AppKey[Metrics] = web.AppKey("metrics", Metrics)
RESPONSE_CACHE: web.AppKey[ResponseCache] = web.AppKey("response cache", ResponseCache)


def is_operator(request: web.Request) -> bool:
    """Whether root or the daemon's own user sent the request, on control.sock."""
    return isinstance(request.protocol, HttpConnection) and request.protocol.share.is_operator


async def snapshot_for(request: web.Request) -> NodeSnapshot:
    """Return a new snapshot for an operator, the cached one for others."""
    replies = request.app[RESPONSE_CACHE]
    return await (replies.fresh_snapshot() if is_operator(request) else replies.cached_snapshot())
