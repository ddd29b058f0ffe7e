"""HTTP of one node: read-only over TCP, everything over `control.sock`.

Both serve the table of `kvxferd.control.http_routes`. Only root and the daemon's own user may change state,
by the credentials that the kernel gives for a Unix socket. TCP has no credentials, so it is read-only.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from aiohttp import web

from kvxferd.config import Config, split_host_port
from kvxferd.control.fd_budget import MAX_HTTP_CONNECTIONS
from kvxferd.control.http_connections import MAX_UNSENT_BYTES, HttpConnection, HttpListeners
from kvxferd.control.http_rate_limit import HttpRateLimiter
from kvxferd.control.http_routes import ROUTES, Access, Route
from kvxferd.control.node_admin import NodeAdmin
from kvxferd.control.operator_log import caller_of, log_operator_request, log_refused_request
from kvxferd.control.resolver import is_numeric
from kvxferd.control.response_cache import METRICS, NODE_ADMIN, RESPONSE_CACHE, ResponseCache, is_operator
from kvxferd.control.responses import error_response
from kvxferd.errors import Code, ConfigError, KvxferdError, count_busy_refusal
from kvxferd.telemetry.metrics import Metrics
from kvxferd.unix_socket import bind_unix_socket, is_own_uid

__all__ = ["HttpServer"]

CONTROL_SOCKET_MODE = 0o660
# Responses are small and local: do not wait longer for clients to read them.
SHUTDOWN_S = 1.0

RATE_LIMITER: web.AppKey[HttpRateLimiter] = web.AppKey("rate limiter", HttpRateLimiter)

HOST_NAMES: web.AppKey[frozenset[str]] = web.AppKey("host names", frozenset)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves a node on `control.socket` and, if it is set, on `http.bind`."""

    def __init__(
        self, config: Config, view: NodeAdmin, metrics: Metrics, max_connections: int = MAX_HTTP_CONNECTIONS
    ) -> None:
        self._config = config
        self._max_connections = max_connections
        self._app = _make_app(config, view, metrics)
        self._closing = AsyncExitStack()
        # The host and port that TCP is bound to; None while stopped, or if it is off.
        self.tcp_address: tuple[str, int] | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError if an address cannot be bound; then nothing listens."""
        async with AsyncExitStack() as closing:
            runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=SHUTDOWN_S)
            await runner.setup()
            closing.push_async_callback(runner.cleanup)
            assert runner.server is not None
            self.listeners = listeners = HttpListeners(runner.server, self._max_connections)
            closing.push_async_callback(listeners.close)
            path = Path(self._config.control.socket)
            listener = bind_unix_socket(path, CONTROL_SOCKET_MODE, "control.socket")
            # Runs before the listeners are closed, so that no client finds a socket without a listener.
            closing.callback(path.unlink, missing_ok=True)
            listeners.listen(listener)
            if self._config.http.bind:
                listener = _listen_tcp(self._config.http.bind)
                host, port = listener.getsockname()[:2]
                listeners.listen(listener)
                self.tcp_address = (host, port)
            self._closing = closing.pop_all()

    async def stop(self) -> None:
        """Remove the socket file and stop listening. Idempotent."""
        self.tcp_address = None
        await self._closing.aclose()


def _make_app(config: Config, view: NodeAdmin, metrics: Metrics) -> web.Application:
    app = web.Application(middlewares=[_limit_requests, _errors_as_json, _own_hosts_only])
    app[NODE_ADMIN] = view
    app[RESPONSE_CACHE] = ResponseCache(view)
    app[RATE_LIMITER] = HttpRateLimiter(time.monotonic)
    app[METRICS] = metrics
    bound, _ = split_host_port(config.http.bind) if config.http.bind else ("", 0)
    names = ("localhost", socket.gethostname(), bound, *config.http.hosts)
    app[HOST_NAMES] = frozenset(name.lower() for name in names if name)
    for route in ROUTES:
        handler = _admin_only(route) if route.access is Access.ADMIN else _cached(route)
        app.router.add_route(route.method, route.path, handler)
    return app


def _admin_only(route: Route) -> Handler:
    async def guarded(request: web.Request) -> web.StreamResponse:
        caller = caller_of(request)
        if caller is None:
            return error_response(
                403, Code.NOT_ALLOWED, f"cannot {route.method} {route.path} over TCP: use control.sock"
            )
        if not is_own_uid(caller.uid):
            log_refused_request(request, caller)
            return error_response(
                403,
                Code.NOT_ALLOWED,
                f"cannot {route.method} {route.path} as user {caller.uid}: "
                f"it is for root and for user {os.geteuid()}, who runs the daemon",
            )
        if route.method != "GET":
            log_operator_request(request, caller)
        return await route.handler(request)

    return guarded


def _cached(route: Route) -> Handler:
    async def shared(request: web.Request) -> web.StreamResponse:
        if not route.is_cached or is_operator(request):
            return await route.handler(request)
        return await request.app[RESPONSE_CACHE].respond(request, route.handler)

    return shared


@web.middleware
async def _limit_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Limit unprivileged clients' request rate, and their unread responses."""
    connection = request.protocol
    assert isinstance(connection, HttpConnection)
    connection.request_started()
    try:
        if is_operator(request):
            return await handler(request)
        if delay_s := request.app[RATE_LIMITER].delay_s(connection.source):
            await asyncio.sleep(delay_s)
            if request.transport is None:
                raise ConnectionResetError
        reply = await handler(request)
        size = (reply.content_length or 0) if isinstance(reply, web.Response) else 0
        if connection.listeners.num_unsent_bytes + size > MAX_UNSENT_BYTES:
            text = f"cannot {request.method} {request.path}: too many answers are not read; try again later"
            count_busy_refusal("http")
            return error_response(503, Code.BUSY, text)
        return reply
    finally:
        connection.request_finished()


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        response = error_response(
            error.status,
            error.reason.lower().replace(" ", "-"),
            f"cannot {request.method} {request.path}: {error.reason.lower()}",
        )
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except KvxferdError as error:
        status = 400 if error.code is Code.BAD_REQUEST else 409
        return error_response(status, error.code, error.message)
    except Exception:
        structlog.get_logger().exception("http request failed", method=request.method, path=request.path)
        return error_response(
            500,
            Code.INTERNAL,
            f"cannot {request.method} {request.path}: an error of the daemon's, see its log",
        )


@web.middleware
async def _own_hosts_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests over TCP that name another host.

    A page of the Internet may have its own name resolve to this node (DNS rebinding). The browser of
    somebody who reaches this node would then read the status for it.
    """
    host = request.headers.get("Host", "")
    if host and caller_of(request) is None and not _is_host_known(host, request.app[HOST_NAMES]):
        text = (
            f"cannot {request.method} {request.path} of host {host[:256]!r}: use an address or the name of "
            "this node, or add the host to http.hosts"
        )
        return error_response(403, Code.NOT_ALLOWED, text)
    return await handler(request)


def _is_host_known(host: str, names: frozenset[str]) -> bool:
    """Whether a `Host` header names a numeric address, with or without a port, or one of the names."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name.rstrip(".") in names or is_numeric(name)


def _listen_tcp(bind: str) -> socket.socket:
    host, port = split_host_port(bind)
    try:
        family, _, _, _, address = socket.getaddrinfo(
            None if host == "*" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen on http.bind = {bind!r}: {error.strerror or error}") from error
    return listener
