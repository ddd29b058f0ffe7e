"""An HTTP server of the control plane, and requests to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvxferd.config import Config, load_config
from kvxferd.control.fd_budget import MAX_HTTP_CONNECTIONS
from kvxferd.control.http_server import HttpServer
from kvxferd.telemetry.metrics import Metrics
from tests.support.node_samples import StillNode


def config_in(run_dir: Path, bind: str = "127.0.0.1:0") -> Config:
    """A configuration whose sockets lie in that directory."""
    return load_config(None, {}, {"node.run_dir": str(run_dir), "http.bind": bind})


@asynccontextmanager
async def serving(
    config: Config, node: StillNode, max_connections: int = MAX_HTTP_CONNECTIONS
) -> AsyncIterator[HttpServer]:
    """A server, stopped at the end."""
    server = HttpServer(config, node, Metrics(), max_connections)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def over_tcp(server: HttpServer) -> aiohttp.ClientSession:
    """A client on the server's TCP address."""
    assert server.tcp_address is not None
    host, port = server.tcp_address
    return aiohttp.ClientSession(f"http://{host}:{port}")


def over_unix(config: Config) -> aiohttp.ClientSession:
    """A client on the control socket."""
    return aiohttp.ClientSession(
        "http://kvxferd", connector=aiohttp.UnixConnector(path=config.control.socket)
    )


@dataclass(frozen=True)
class ServedNode:
    """A node that is served, and clients of its TCP address and of its control socket."""

    node: StillNode
    config: Config
    server: HttpServer
    tcp: aiohttp.ClientSession
    unix: aiohttp.ClientSession


@asynccontextmanager
async def served(config: Config, node: StillNode | None = None) -> AsyncIterator[ServedNode]:
    """Serve a node, until the end."""
    node = node or StillNode()
    async with serving(config, node) as server, over_tcp(server) as tcp, over_unix(config) as unix:
        yield ServedNode(node, config, server, tcp, unix)


async def ask(client: aiohttp.ClientSession, path: str, method: str = "GET", **how: Any) -> tuple[int, Any]:
    """Return the status of a reply, and what its JSON holds, or its text."""
    async with client.request(method, path, **how) as reply:
        return reply.status, await (reply.json() if "json" in reply.content_type else reply.text())
