"""One request to a vLLM server: token ids in, token ids out; and prompts that nobody else has."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LIMIT_S = 90.0
VOCABULARY = 512

# What a router sends to the prefill engine, as routers for the connector inside vLLM send it.
ASK_FOR_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class RequestFailed(Exception):
    """The server answered with an error, or not at all: `status` 0 is a connection that broke."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said[:500]}")
        self.status = status


@dataclass(frozen=True)
class Completion:
    """An answer. `first_token_s` is set where it was streamed."""

    tokens: tuple[int, ...]
    kv_transfer_params: dict[str, Any] | None
    finish_reason: str
    first_token_s: float | None = None


def prompt_of(length: int, seed: int) -> list[int]:
    """`length` token ids that depend on `seed`; equal seeds share their beginnings."""
    drawn = random.Random(seed)
    return [drawn.randrange(3, VOCABULARY) for _ in range(length)]


class Asked:
    """A request on its way: `answer` waits for it, `hang_up` leaves as an impatient client does."""

    def __init__(self, url: str, prompt: Sequence[int], max_tokens: int, **fields: Any) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LIMIT_S)
        requested = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        self._streams = bool(fields.get("stream"))
        self._started = time.monotonic()
        try:
            self._connection.request(
                "POST", "/v1/completions", json.dumps(requested), {"Content-Type": "application/json"}
            )
        except OSError as error:
            self.hang_up()
            raise RequestFailed(0, str(error)) from error

    def answer(self) -> Completion:
        """Return the answer. Raises RequestFailed where it is an error or the connection breaks."""
        try:
            response = self._connection.getresponse()
            if response.status != 200:
                raise RequestFailed(response.status, response.read().decode(errors="replace"))
            if self._streams:
                return self._streamed(response)
            return _completion(json.loads(response.read()))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RequestFailed(0, f"{type(error).__name__}: {error}") from error
        finally:
            self.hang_up()

    def wait_for_a_token(self) -> None:
        """Return when the first part of a streamed answer is there."""
        assert self._streams
        response = self._connection.getresponse()
        assert response.status == 200, response.read()
        assert response.readline()

    def hang_up(self) -> None:
        """Close the connection, whatever has come so far."""
        self._connection.close()

    def _streamed(self, response: http.client.HTTPResponse) -> Completion:
        tokens: list[int] = []
        first_token_s, reason, params = None, "", None
        for line in response:
            said = line.decode().strip().removeprefix("data: ")
            if not said or said == "[DONE]":
                continue
            chunk = json.loads(said)
            if "error" in chunk:
                raise RequestFailed(int(chunk["error"].get("code") or 500), said)
            params = chunk.get("kv_transfer_params") or params
            for choice in chunk["choices"]:
                if choice.get("token_ids") and first_token_s is None:
                    first_token_s = time.monotonic() - self._started
                tokens += choice.get("token_ids") or []
                reason = choice.get("finish_reason") or reason
        return Completion(tuple(tokens), params, reason, first_token_s)


def complete(url: str, prompt: Sequence[int], max_tokens: int = 12, **fields: Any) -> Completion:
    """Ask and wait for the answer."""
    return Asked(url, prompt, max_tokens, **fields).answer()


def prefill(url: str, prompt: Sequence[int]) -> dict[str, Any]:
    """Have a prefill engine compute a prompt's cache; return what a decode engine is to be given."""
    reply = complete(url, prompt, 1, kv_transfer_params=dict(ASK_FOR_PREFILL))
    assert reply.kv_transfer_params, "the prefill engine named no kv_transfer_params"
    return reply.kv_transfer_params


def decode(
    url: str, prompt: Sequence[int], params: Mapping[str, Any], max_tokens: int = 12, **fields: Any
) -> Completion:
    """Have a decode engine go on from a cache that was computed elsewhere."""
    return complete(url, prompt, max_tokens, kv_transfer_params=dict(params), **fields)


def _completion(said: Mapping[str, Any]) -> Completion:
    choice = said["choices"][0]
    return Completion(tuple(choice["token_ids"]), said.get("kv_transfer_params"), choice["finish_reason"])
