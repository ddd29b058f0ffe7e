"""Responses with the topologies of remote engines, within limits of size and time.

One topology may have a megabyte, and a node has one for each local rank and remote engine. The event loop
runs other work between the steps that build them. Root and the daemon's own user, on control.sock, are served
as fast as that allows. All others together take a tenth of the loop's time: one request of theirs is served
at a time, with pauses and for a short time, and one of each source may wait for its turn. Further ones are
refused (`busy`): so one client cannot keep all connections of its share occupied, nor take every turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from kvxferd.control.http_connections import HttpConnection
from kvxferd.control.node_api import NODE_API, NodeApi
from kvxferd.control.response_cache import COST_FACTOR, is_operator
from kvxferd.control.responses import error_response, json_response
from kvxferd.errors import Code, count_busy_refusal
from kvxferd.ids import EngineId

# As much as the largest other response, of 8,192 transfers. It is exceeded by one topology at most.
MAX_BYTES = 8 << 20
# Half of what `kvxferd` waits for a response.
MAX_BUILD_S = 5.0
# Of all but operators: four that wait before a fifth delay it by 8 s.
MAX_SHARED_BUILD_S = 2.0
MAX_SOURCES = 5  # that wait or are served


class TopologyTurns:
    """The turns of all but operators: one after the other, in the order of their requests."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._sources: set[str] = set()

    def has_room(self, source: str) -> bool:
        """Whether a request of that source may wait."""
        return source not in self._sources and len(self._sources) < MAX_SOURCES

    @asynccontextmanager
    async def turn(self, source: str) -> AsyncIterator[None]:
        """Wait for the source's turn, which lasts as long as the context."""
        self._sources.add(source)
        try:
            async with self._lock:
                yield
        finally:
            self._sources.remove(source)


TOPOLOGY_TURNS: web.AppKey[TopologyTurns] = web.AppKey("topology turns", TopologyTurns)


async def topology_response(request: web.Request, engine_id: EngineId | None) -> web.Response:
    """Return the topologies of one engine, or (None) of all: 404 for an unknown engine, 503 for busy."""
    if is_operator(request):
        return await _build(request.app[NODE_API], engine_id, 0.0, MAX_BUILD_S)
    turns, connection = request.app[TOPOLOGY_TURNS], request.protocol
    assert isinstance(connection, HttpConnection)
    if not turns.has_room(connection.source):
        message = f"cannot GET {request.path}: other such requests are being served; try again in a second"
        count_busy_refusal("http")
        return error_response(503, Code.BUSY, message)
    async with turns.turn(connection.source):
        if request.transport is None:  # the client has disconnected
            raise ConnectionResetError
        return await _build(request.app[NODE_API], engine_id, COST_FACTOR, MAX_SHARED_BUILD_S)


async def _build(
    node: NodeApi, engine_id: EngineId | None, pause_factor: float, max_build_s: float
) -> web.Response:
    """Build the response. After each step, pause for `pause_factor` times as long as it took."""
    loop = asyncio.get_running_loop()
    started = step_started = loop.time()
    listing = node.topologies(engine_id)
    built: list[msgspec.Raw] = []
    num_bytes, num_left_out = 0, 0
    for topology in listing.steps if listing.num_topologies else ():
        if topology is not None:
            encoded = msgspec.json.encode(topology)
            built.append(msgspec.Raw(encoded))
            num_bytes += len(encoded)
        now = loop.time()
        if num_bytes >= MAX_BYTES or now - started > max_build_s:
            num_left_out = max(0, listing.num_topologies - len(built))
            break
        await asyncio.sleep((now - step_started) * pause_factor)
        step_started = loop.time()
    if engine_id is not None and not built and not num_left_out:
        message = (
            f"cannot show the topology of engine {engine_id!r}: no local rank knows it; a rank does once it "
            "has planned a pull from it; 'kvxferd engines --topology' shows those that are known"
        )
        return error_response(404, Code.ENGINE_UNKNOWN, message)
    return json_response({"topology": built, "num_left_out": num_left_out})
