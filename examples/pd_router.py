"""A minimal router for prefill and decode engines, for trying things out.

    python examples/pd_router.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

Each completion goes to a prefill engine for one token, and then, with the `kv_transfer_params` of its
reply, to a decode engine. It does not depend on kvxferd: the contract is vLLM's own for KV connectors.
Several engines of a kind take turns. Where a decode engine fails before its response has begun, the request
goes to the next one with the same parameters: the prefill engine keeps the cache until its lease ends. Where
each of them has failed, maybe because one had read the cache before it died, it is prefilled once more. Both
engines get the same X-Request-Id, and the client's traceparent where it sent one: as a header, and for
kvxferd with the parameters. When a client disconnects, its requests are cancelled.

With --overlap a decode engine is asked at the same time, and reads the cache while it is computed: both get
the same reference, with an id and a nonce that are chosen here. Its other fields are those of the prefill
engine's last reply, so the first request of each goes one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import secrets
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
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
# Of a kvxferd reference: what names the prefill engine, and what is chosen for each request.
ENGINE_FIELDS, REQUEST_FIELDS = ("endpoint", "engine_id", "generation"), ("transfer_id", "nonce")
NUM_PREFILLS = 2  # of one request
ENGINE_TIMEOUT = aiohttp.ClientTimeout(total=600)

Reply = tuple[int, Any]


class Router:
    """Forwards completions. `prefill` and `decode` are the engines' addresses."""

    def __init__(self, prefill: list[str], decode: list[str], overlap: bool = False) -> None:
        self._prefill: Iterator[str] = itertools.cycle(prefill)
        self._decode = decode
        self._turns: Iterator[int] = itertools.count()
        self._overlap = overlap
        self._engines: dict[str, dict[str, Any]] = {}  # by address: what names it in a reference

    async def session_context(self, _: web.Application) -> Any:
        """Keep the session with the engines open while the application runs."""
        unlimited = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=ENGINE_TIMEOUT, connector=unlimited) as self._session:
            yield

    async def handle_completion(self, request: web.Request) -> web.StreamResponse:
        """Handle one completion, streamed or not, with the decode engine's response."""
        asked = await request.json()
        url = next(self._prefill)
        try:
            headers = headers_for_engines(request)
            if url in self._engines:
                return await self._overlapped(request, asked, headers, url)
            return await self._prefill_and_decode(request, asked, headers, url)
        except aiohttp.ClientError as error:
            said = f"an engine cannot be reached: {type(error).__name__}: {error}"
            return web.json_response({"error": {"message": said, "code": 502}}, status=502)

    async def _overlapped(
        self, request: web.Request, asked: dict[str, Any], headers: dict[str, str], url: str
    ) -> web.StreamResponse:
        """Ask both engines; ask a decode engine again where the cache is another than it was told to read."""
        ref = self._engines[url] | {"transfer_id": uuid.uuid4().hex, "nonce": secrets.token_hex(16)}
        shared = {"kvxferd": ref, "kvxferd_overlap": True}
        prefill = asyncio.create_task(
            self._request_prefill(url + request.path, asked, headers, PREFILL_ONLY | shared)
        )
        early = with_trace({"do_remote_prefill": True, "do_remote_decode": False} | shared, headers)
        decode = asyncio.create_task(
            self._open_decode(
                self._decode_urls()[0] + request.path, asked | {"kv_transfer_params": early}, headers
            )
        )
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if decode.done() and decode.exception() is None and decode.result()[0].status == 200:
                return await self._pass_on(request, *decode.result())
            status, prefilled = await prefill
            if status != 200:
                return web.json_response(prefilled, status=status)
            self._learn_engine(url, prefilled)
            if not is_of(ref, prefilled):
                return await self._pass_on(
                    request, *await self._find_decode(request, asked, headers, prefilled)
                )
            return await self._pass_on(request, *await decode)
        finally:
            await self._end(decode)
            await self._end(prefill)

    async def _end(self, task: asyncio.Task[Any]) -> None:
        """Have an engine's request end, and its connection, wherever it is."""
        task.cancel()
        with suppress(asyncio.CancelledError, aiohttp.ClientError):
            found = await task
            if isinstance(found[0], aiohttp.ClientResponse):
                found[0].close()

    def _learn_engine(self, url: str, prefilled: Mapping[str, Any]) -> None:
        """Keep what names a prefill engine in references; nothing where it uses another connector."""
        ref = (prefilled.get("kv_transfer_params") or {}).get("kvxferd")
        if self._overlap and isinstance(ref, dict):
            self._engines[url] = {name: ref[name] for name in ENGINE_FIELDS}
        else:
            self._engines.pop(url, None)

    async def _request_prefill(
        self, url: str, asked: dict[str, Any], headers: dict[str, str], params: dict[str, Any]
    ) -> Reply:
        wanted = asked | {"max_tokens": 1, "stream": False, "kv_transfer_params": with_trace(params, headers)}
        for name in NOT_FOR_PREFILL:
            wanted.pop(name, None)
        if "max_completion_tokens" in asked:
            wanted["max_completion_tokens"] = 1
        async with self._session.post(url, json=wanted, headers=headers) as answer:
            return answer.status, await answer.json()

    async def _prefill_and_decode(
        self, request: web.Request, asked: dict[str, Any], headers: dict[str, str], url: str
    ) -> web.StreamResponse:
        """Ask one engine after the other; both once more where no decode engine could go on."""
        answer: aiohttp.ClientResponse | None = None
        for _ in range(NUM_PREFILLS):
            if answer is not None:
                answer.close()
            status, prefilled = await self._request_prefill(url + request.path, asked, headers, PREFILL_ONLY)
            if status != 200:
                return web.json_response(prefilled, status=status)
            self._learn_engine(url, prefilled)
            answer, first = await self._find_decode(request, asked, headers, prefilled)
            if answer.status < 500:
                break
        assert answer is not None
        return await self._pass_on(request, answer, first)

    async def _find_decode(
        self,
        request: web.Request,
        asked: dict[str, Any],
        headers: dict[str, str],
        prefilled: Mapping[str, Any],
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Return the response of the first decode engine that has one, in the end the last engine's error."""
        params = with_trace(prefilled.get("kv_transfer_params"), headers)
        wanted = asked | {"kv_transfer_params": params}
        found: tuple[aiohttp.ClientResponse, bytes] | None = None
        urls = self._decode_urls()
        for url in urls:
            try:
                answered = await self._open_decode(url + request.path, wanted, headers)
            except aiohttp.ClientError:
                if found is None and url is urls[-1]:
                    raise
                continue
            if found is not None:
                found[0].close()
            found = answered
            if found[0].status < 500:
                break
        assert found is not None
        return found

    def _decode_urls(self) -> list[str]:
        """Return the decode engines, the one first whose turn it is, and each once."""
        first = next(self._turns) % len(self._decode)
        return self._decode[first:] + self._decode[:first]

    async def _open_decode(
        self, url: str, asked: dict[str, Any], headers: dict[str, str]
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Return the decode engine's response when its first part is there."""
        answer = await self._session.post(url, json=asked, headers=headers)
        try:
            return answer, await answer.content.readany()
        except BaseException:
            answer.close()
            raise

    async def _pass_on(
        self, request: web.Request, answer: aiohttp.ClientResponse, first: bytes = b""
    ) -> web.StreamResponse:
        async with answer:
            passed = web.StreamResponse(status=answer.status)
            passed.content_type = answer.content_type
            await passed.prepare(request)
            if first:
                await passed.write(first)
            async for part in answer.content.iter_any():
                await passed.write(part)
            await passed.write_eof()
            return passed


def is_of(ref: Mapping[str, Any], prefilled: Mapping[str, Any]) -> bool:
    """Whether the prefill engine has published by the reference that it was given."""
    published = (prefilled.get("kv_transfer_params") or {}).get("kvxferd") or {}
    return all(published.get(name) == ref[name] for name in (*ENGINE_FIELDS[1:], *REQUEST_FIELDS))


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


def make_app(prefill: list[str], decode: list[str], overlap: bool = False) -> web.Application:
    """Return the application with its routes."""
    router = Router(prefill, decode, overlap)
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
    parser.add_argument("--overlap", action="store_true", help="ask both engines at once (kvxferd)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    return parser


def main() -> None:
    """Serve until interrupted."""
    options = make_parser().parse_args()
    app = make_app(options.prefill, options.decode, options.overlap)
    # A handler is cancelled when its client disconnects, so that the engines' requests end too.
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
