"""A minimal router for prefill and decode engines, for trying things out.

    python examples/pd_router.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

Each completion goes to a prefill engine for one token, and then, with the `kv_transfer_params` of its
reply, to a decode engine. It does not depend on kvxferd: the contract is vLLM's own for KV connectors.
Several engines of a kind take turns. Both engines get the same X-Request-Id, and the client's traceparent
where it sent one: as a header, and for kvxferd with the parameters. When a client disconnects, its requests
are cancelled.
"""

from __future__ import annotations

import argparse
import itertools
import uuid
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
# Of a prefill of one token, which vLLM would refuse with them.
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens")
# Of W3C Trace Context.
TRACE_HEADERS = ("traceparent", "tracestate")
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
            headers = headers_for_engines(request)
            status, prefilled = await self._request_prefill(request.path, asked, headers)
            if status != 200:
                return web.json_response(prefilled, status=status)
            asked["kv_transfer_params"] = with_trace(prefilled.get("kv_transfer_params"), headers)
            return await self._stream_decode(request, asked, headers)
        except aiohttp.ClientError as error:
            said = f"an engine cannot be reached: {type(error).__name__}: {error}"
            return web.json_response({"error": {"message": said, "code": 502}}, status=502)

    async def _request_prefill(
        self, path: str, asked: dict[str, Any], headers: dict[str, str]
    ) -> tuple[int, Any]:
        params = with_trace(PREFILL_ONLY, headers)
        wanted = asked | {"max_tokens": 1, "stream": False, "kv_transfer_params": params}
        for name in NOT_FOR_PREFILL:
            wanted.pop(name, None)
        if "max_completion_tokens" in asked:
            wanted["max_completion_tokens"] = 1
        async with self._session.post(next(self._prefill) + path, json=wanted, headers=headers) as answer:
            return answer.status, await answer.json()

    async def _stream_decode(
        self, request: web.Request, asked: dict[str, Any], headers: dict[str, str]
    ) -> web.StreamResponse:
        url = next(self._decode) + request.path
        async with self._session.post(url, json=asked, headers=headers) as answer:
            passed = web.StreamResponse(status=answer.status)
            passed.content_type = answer.content_type
            await passed.prepare(request)
            async for part in answer.content.iter_any():
                await passed.write(part)
            await passed.write_eof()
            return passed


def headers_for_engines(request: web.Request) -> dict[str, str]:
    """Return the headers that both engines get."""
    headers = {"X-Request-Id": request.headers.get("X-Request-Id") or str(uuid.uuid4())}
    for name in ("Authorization", *TRACE_HEADERS):
        if name in request.headers:
            headers[name] = request.headers[name]
    return headers


def with_trace(params: dict[str, Any] | None, headers: dict[str, str]) -> dict[str, Any] | None:
    """Return the parameters with the traceparent. vLLM reads the header only while it exports traces."""
    if params is None or "traceparent" not in headers:
        return params
    return params | {"traceparent": headers["traceparent"]}


def make_app(prefill: list[str], decode: list[str]) -> web.Application:
    """Return the application with its routes."""
    router = Router(prefill, decode)
    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(router.session_context)
    app.router.add_post("/v1/completions", router.handle_completion)
    app.router.add_post("/v1/chat/completions", router.handle_completion)
    return app


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    return parser


def main() -> None:
    """Serve until interrupted."""
    options = make_parser().parse_args()
    app = make_app(options.prefill, options.decode)
    # A handler is cancelled when its client disconnects, so that the engines' requests end too.
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
