"""vLLM's HTTP server around the connector, without vLLM: for tests of routers.

Requests are checked as vLLM checks them, and go through the connector's scheduler and worker on a real
daemon. A prompt's "cache" is one byte value, which the prefill engine writes into the request's blocks; the
decode engine answers with the values that it finds in its own blocks.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.connector_harness import BLOCK_TOKENS, NUM_BLOCKS, TOKEN_BYTES, EngineUnderTest
from tests.support.router_protocols import Answer, HttpService, error

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Served:
    """A request as the engine got it, and how many of its tokens came from another engine."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    num_pulled: int = 0


def prompt_of(path: str, body: Mapping[str, Any]) -> list[int]:
    """Return a prompt's tokens; a chat's are its characters."""
    if path == CHAT:
        return [ord(character) for message in body["messages"] for character in message["content"]]
    return list(body["prompt"])


def content_of(prompt: list[int]) -> int:
    """Return the byte that is a prompt's cache."""
    return sum(prompt) % 250 + 1


def why_refused(body: Mapping[str, Any]) -> str:
    """Return why vLLM refuses a request with status 400; "" if it does not."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    if body.get("stream_options") and not body.get("stream"):
        return "stream options can only be defined when stream is true"
    if (body.get("min_tokens") or 0) > limit:
        return f"min_tokens must be less than or equal to max_tokens={limit}"
    return ""


class HttpEngine(HttpService):
    """An engine on a daemon, with the two routes of vLLM that routers use."""

    def __init__(self, engine: EngineUnderTest) -> None:
        self.engine = engine
        self.served: list[Served] = []
        self._lock = threading.Lock()  # vLLM's engine is one thread
        self._blocks = itertools.cycle(range(1, NUM_BLOCKS - 4))  # 0 is vLLM's null block
        self._names = itertools.count(1)
        super().__init__()

    def handle(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> Answer:
        """Prefill, decode from a cache that was moved, or compute all of it here."""
        if why := why_refused(body):
            return error(400, why)
        prompt = prompt_of(path, body)
        name = (
            f"{'chatcmpl' if path == CHAT else 'cmpl'}-{headers.get('x-request-id', '')}-{next(self._names)}"
        )
        with self._lock:
            first = next(self._blocks)
            ids = list(range(first, first + -(-len(prompt) // BLOCK_TOKENS)))
            params = body.get("kv_transfer_params") or {}
            if params.get("do_remote_decode"):
                given = {key: value for key, value in params.items() if key.startswith("kvxferd")}
                found = self.engine.prefill(name, len(prompt), ids, content_of(prompt), **given)
                num_pulled, values = 0, []
            else:
                found, (num_pulled, values) = None, self._decode(name, prompt, ids, params)
            self.served.append(Served(path, body, headers, num_pulled))
        return answer(path, body, values, found)

    def wait_until_released(self, num_requests: int) -> None:
        """Return once that many published requests have their blocks back."""
        with self._lock:
            self.engine.step_until(lambda results: len(results.sent) >= num_requests, "blocks come back")

    def _decode(
        self, name: str, prompt: list[int], ids: list[int], params: dict[str, Any]
    ) -> tuple[int, list[int]]:
        self.engine.bytes[ids] = 0
        self.engine.decode(name, len(prompt), ids, params)
        num_pulled = 0
        if self.engine.scheduler._pulling:
            results = self.engine.step_until(lambda results: name in results.received, "the pull is over")
            num_pulled = 0 if results.failed else len(prompt)
        if not num_pulled:
            self.engine.bytes[ids] = content_of(prompt)  # it is computed here
        tokens = self.engine.bytes[ids].reshape(-1, TOKEN_BYTES)[: len(prompt)]
        return num_pulled, sorted({int(value) for value in tokens.flat})


def answer(path: str, body: Mapping[str, Any], values: list[int], params: Any) -> Answer:
    """Return the response, streamed where that was asked for, in two parts."""
    whole = {"object": path.rpartition("/")[0], "kv_transfer_params": params}
    if not body.get("stream"):
        choice = {"index": 0, "token_ids": values, "finish_reason": "length"}
        return Answer(200, "application/json", json.dumps(whole | {"choices": [choice]}))
    parts = [{"index": 0, "token_ids": values}, {"index": 0, "token_ids": [], "finish_reason": "length"}]
    lines = [f"data: {json.dumps(whole | {'choices': [part]})}\n\n" for part in parts]
    return Answer(200, "text/event-stream", "".join(lines) + "data: [DONE]\n\n")
