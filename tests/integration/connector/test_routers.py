"""Routers of others, and ours, before two engines: caches move, whatever a client asks for.

The engines are the connector's two sides on a real daemon behind HTTP; the routers are the example router as
a process, and stand-ins that send what vLLM's proxy and llm-d's sidecar send.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvxferd.integrations.vllm.session.early_pulls import EarlyPullLimits
from tests.support.connector_harness import engines_on
from tests.support.http_engine import CHAT, COMPLETIONS, HttpEngine, content_of, prompt_of
from tests.support.nodes.fleet import Fleet
from tests.support.router_protocols import (
    PREFILLER_HEADER,
    Answer,
    LlmdSidecar,
    VllmProxy,
    error,
    post,
)
from tests.support.vllm_servers.router_process import RouterProcess


class Engines:
    """Two prefill engines and a decode engine on one daemon, another that fails, and the ways to them."""

    def __init__(self, fleet: Fleet, stack: ExitStack) -> None:
        make = stack.enter_context(engines_on(fleet.shared("node")))

        def engine(name: str, **facts: Any) -> HttpEngine:
            served = HttpEngine(make(name, **facts))
            stack.callback(served.close)
            return served

        def router(decode: HttpEngine, *options: str) -> str:
            made = RouterProcess(self.prefill[0].url, decode.url, *options)
            stack.callback(made.stop)
            return made.url

        self.prefill = [engine(f"prefill-{number}", publishes=True) for number in range(2)]
        self.decode = engine("decode", early=EarlyPullLimits(num_requests=8, num_blocks=64))
        self.failing = engine("failing-decode")
        proxy = VllmProxy([one.url for one in self.prefill], [self.decode.url])
        stack.callback(proxy.close)
        sidecar = LlmdSidecar(self.decode.url)
        stack.callback(sidecar.close)
        self._urls = {
            "proxy": proxy.url,
            "sidecar": sidecar.url,
            "router": router(self.decode),
            "with two": router(self.decode, "--decode", self.failing.url),
            "overlapping": router(self.decode, "--overlap"),
        }

    def send(self, router: str, body: dict[str, Any], path: str = COMPLETIONS) -> Answer:
        """Send a request through a router; to llm-d's sidecar with the header that its scheduler sets."""
        headers = {PREFILLER_HEADER: self.prefill[1].host_port} if router == "sidecar" else {}
        return post(self._urls[router], path, body, headers)

    def start_over(self) -> None:
        for one in (*self.prefill, self.decode):
            one.served.clear()


@pytest.fixture(scope="module")
def shared_engines(module_fleet: Fleet) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(module_fleet, stack)


@pytest.fixture
def engines(shared_engines: Engines) -> Engines:
    shared_engines.start_over()
    return shared_engines


ROUTERS = ["proxy", "sidecar", "router"]
PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
REQUESTS = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 40},
    CHAT: {"messages": [{"role": "user", "content": "move it"}], "max_completion_tokens": 40},
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_cache_moves(engines: Engines, router: str, path: str, stream: bool) -> None:
    body: dict[str, Any] = dict(REQUESTS[path])
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = engines.send(router, body, path)

    prompt = prompt_of(path, body)
    assert (reply.status, reply.content_type == "text/event-stream") == (200, stream)
    assert reply.chunks[0]["choices"][0]["token_ids"] == [content_of(prompt)]
    assert reply.chunks[-1]["choices"][0]["finish_reason"] == "length"

    (prefilled,) = [served for one in engines.prefill for served in one.served]
    (decoded,) = engines.decode.served
    assert (prefilled.path, decoded.path) == (path, path)
    assert decoded.num_pulled == len(prompt)
    assert prefilled.body["max_tokens"] == 1
    assert prefilled.body.get("max_completion_tokens", 1) == 1
    assert not prefilled.body["stream"]
    assert {name: decoded.body.get(name) for name in body} == body
    assert prefilled.headers["x-request-id"] == decoded.headers["x-request-id"]
    for one in engines.prefill:
        if one.served:
            one.wait_until_released(1)


def test_min_tokens_go_to_the_decode_engine_alone(engines: Engines) -> None:
    assert engines.send("router", {"prompt": PROMPT, "max_tokens": 40, "min_tokens": 20}).status == 200
    (prefilled,) = [served for one in engines.prefill for served in one.served]
    (decoded,) = engines.decode.served
    assert "min_tokens" not in prefilled.body
    assert (decoded.body["min_tokens"], decoded.num_pulled) == (20, len(PROMPT))


@pytest.mark.parametrize("router", ROUTERS)
def test_a_prefill_without_parameters_is_computed_by_the_decode_engine(
    engines: Engines, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the daemon of the prefill node is away: routers send null, or nothing at all."""
    for one in engines.prefill:
        monkeypatch.setattr(one.engine, "prefill", lambda *_: None)
    assert engines.send(router, REQUESTS[COMPLETIONS]).status == 200
    assert engines.decode.served[0].num_pulled == 0


@pytest.mark.parametrize("router", ROUTERS)
def test_a_prefill_that_fails_reaches_the_client_and_no_decode_engine(
    engines: Engines, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in engines.prefill:
        monkeypatch.setattr(one, "handle", lambda *_: error(503, "the engine is dead"))
    assert engines.send(router, REQUESTS[COMPLETIONS]).status in (500, 503)
    assert engines.decode.served == []


@pytest.mark.parametrize("how", ["status", "connection"])
def test_a_decode_engine_that_fails_leaves_the_request_to_the_next(
    engines: Engines, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pull fails, and the router sends the request, with the same reference, to the other one."""

    def fails(path: str, body: dict[str, Any], headers: Any) -> Answer:
        engine = engines.failing.engine
        params = json.loads(json.dumps(body["kv_transfer_params"]))
        engine.decode("d-1", len(PROMPT), [1, 2], params)  # too few blocks
        results = engine.step_until(lambda results: bool(results.received), "the pull is over")
        assert results.failed
        if how == "connection":
            raise ConnectionResetError("it is killed")
        return error(500, "its cache did not come")

    monkeypatch.setattr(engines.failing, "handle", fails)
    for _ in range(2):  # engines take turns
        reply = engines.send("with two", REQUESTS[COMPLETIONS])
        assert (reply.status, reply.chunks[0]["choices"][0]["token_ids"]) == (200, [content_of(PROMPT)])
        assert engines.decode.served[-1].num_pulled == len(PROMPT)
    engines.prefill[0].wait_until_released(2)


@pytest.mark.parametrize("stream", [False, True])
def test_the_overlapping_router_gives_both_engines_one_reference(engines: Engines, stream: bool) -> None:
    body = REQUESTS[COMPLETIONS] | {"stream": stream}
    for _ in range(2):  # the first learns the engine, where no test before did
        reply = engines.send("overlapping", body)
        assert (reply.status, reply.chunks[0]["choices"][0]["token_ids"]) == (200, [content_of(PROMPT)])
    prefilled, decoded = engines.prefill[0].served[-1], engines.decode.served[-1]
    assert decoded.num_pulled == len(PROMPT)
    given = prefilled.body["kv_transfer_params"]
    assert given["kvxferd_overlap"] is True
    assert decoded.body["kv_transfer_params"]["kvxferd"] == given["kvxferd"]
    engines.prefill[0].wait_until_released(2)


def test_a_prefill_that_fails_ends_the_decode_engine_s_request(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.send("overlapping", REQUESTS[COMPLETIONS])
    monkeypatch.setattr(engines.prefill[0], "handle", lambda *_: error(503, "the engine is dead"))
    monkeypatch.setattr(engines.decode, "handle", lambda *_: error(500, "its cache did not come"))
    assert engines.send("overlapping", REQUESTS[COMPLETIONS]).status == 503


def test_a_cache_by_another_reference_is_decoded_by_that(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill engine has been restarted, or has taken the first back."""
    engines.send("overlapping", REQUESTS[COMPLETIONS])
    publish, decode = engines.prefill[0].engine.prefill, engines.decode.handle
    monkeypatch.setattr(engines.prefill[0].engine, "prefill", lambda *what, **_: publish(*what))

    def handle(path: str, body: dict[str, Any], headers: Any) -> Answer:
        if "kvxferd_overlap" in body["kv_transfer_params"]:
            return error(500, "its cache did not come")
        return decode(path, body, headers)

    monkeypatch.setattr(engines.decode, "handle", handle)
    reply = engines.send("overlapping", REQUESTS[COMPLETIONS])
    assert reply.chunks[0]["choices"][0]["token_ids"] == [content_of(PROMPT)]
    assert engines.decode.served[-1].num_pulled == len(PROMPT)
