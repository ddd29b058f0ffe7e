"""A node's HTTP in this process, and the command line against it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import structlog.testing
from click.testing import CliRunner, Result

from kvxferd.cli.root import root
from kvxferd.config import Config, load_config
from kvxferd.control.http_server import HttpServer
from kvxferd.telemetry.metrics import Metrics


class Served(NamedTuple):
    """Where a node is served."""

    config: Config
    tcp: str  # http://HOST:PORT

    @property
    def socket(self) -> str:
        """The path of control.sock."""
        return self.config.control.socket

    def over_unix(self) -> aiohttp.ClientSession:
        """Return a client of control.sock."""
        return aiohttp.ClientSession("http://kvxferd", connector=aiohttp.UnixConnector(path=self.socket))

    def over_tcp(self) -> aiohttp.ClientSession:
        """Return a client of TCP."""
        return aiohttp.ClientSession(self.tcp)


@asynccontextmanager
async def serving(run_dir: Path, node: Any) -> AsyncIterator[Served]:
    """Serve the node on `control.sock` and on TCP; both are gone at the end."""
    config = load_config(None, {}, {"node.run_dir": str(run_dir), "http.bind": "127.0.0.1:0"})
    server = HttpServer(config, node, Metrics(node.snapshot))
    with structlog.testing.capture_logs():  # its log is not the verb's output
        await server.start()
        try:
            assert server.tcp_address is not None
            host, port = server.tcp_address
            yield Served(config, f"http://{host}:{port}")
        finally:
            await server.stop()


async def run_verb(*arguments: str) -> Result:
    """Run a verb, in a thread where it may ask the node that is served by this one."""
    if "serve" in arguments:  # it sets signals before it looks at the settings
        before = signal.getsignal(signal.SIGHUP)
        try:
            return _invoke(arguments)
        finally:
            signal.signal(signal.SIGHUP, before)
    return await asyncio.to_thread(_invoke, arguments)


def _invoke(arguments: Sequence[str]) -> Result:
    unset = {name: None for name in os.environ if name.startswith("KVXFERD_")}
    return CliRunner().invoke(root, list(arguments), env=unset)
