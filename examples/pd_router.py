"""A minimal router for prefill and decode engines, for trying things out.

    python examples/pd_router.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

Each completion goes to a prefill engine for one token, and then, with the `kv_transfer_params` of its
reply, to a decode engine. It does not depend on kvxferd: the contract is vLLM's own for KV connectors.
Several engines of a kind take turns. When a client disconnects, its requests are cancelled.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import aiohttp
from aiohttp import web

# A producer computes the cache and keeps it for the engine that receives the reply's parameters.
PREFILL_ONLY: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ENGINE_TIMEOUT = aiohttp.ClientTimeout(total=600)


class Router:
    """Forwards completions. `prefill` and `decode` are the engines' addresses."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self._prefill: Iterator[str] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)

    async def session_context(self, _: web.Application) -> Any:
        """Keep the session with the engines open while the application runs."""
        unlimited = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=ENGINE_TIMEOUT, connector=unlimited) as self._session:
            yield

    async def handle_completion(self, request: web.Request) -> web.StreamResponse:
        """Handle one completion, streamed or not, with the decode engine's response."""
        asked = await request.json()
        try:
            status, prefilled = await self._request_prefill(request.path, asked)
            if status != 200:
                return web.json_response(prefilled, status=status)
            asked["kv_transfer_params"] = prefilled.get("kv_transfer_params")
            return await self._stream_decode(request, asked)
        except aiohttp.ClientError as error:
            said = f"an engine cannot be reached: {type(error).__name__}: {error}"
            return web.json_response({"error": {"message": said, "code": 502}}, status=502)

    async def _request_prefill(self, path: str, asked: dict[str, Any]) -> tuple[int, Any]:
        wanted = asked | {"max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL_ONLY}
        wanted.pop("stream_options", None)
        if "max_completion_tokens" in asked:
            wanted["max_completion_tokens"] = 1
        async with self._session.post(next(self._prefill) + path, json=wanted) as answer:
            return answer.status, await answer.json()

    async def _stream_decode(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        async with self._session.post(next(self._decode) + request.path, json=asked) as answer:
            passed = web.StreamResponse(status=answer.status)
            passed.content_type = answer.content_type
            await passed.prepare(request)
            async for part in answer.content.iter_any():
                await passed.write(part)
            await passed.write_eof()
            return passed


def make_app(prefill: list[str], decode: list[str]) -> web.Application:
    """Return the application with its routes."""
    router = Router(prefill, decode)
    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(router.session_context)
    app.router.add_post("/v1/completions", router.handle_completion)
    app.router.add_post("/v1/chat/completions", router.handle_completion)
    return app


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    app = make_app(options.prefill, options.decode)
    # A handler is cancelled when its client disconnects, so that the engines' requests end too.
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
