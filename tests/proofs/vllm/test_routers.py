"""What routers of others send, before real engines.

The tests' model has no tokenizer, and so no chat; tests/integration/connector/test_routers.py has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.router_protocols import PREFILLER_HEADER, LlmdSidecar, VllmProxy, post
from tests.support.site_fixtures import NewPrompt
from tests.support.vllm_servers.completions import complete
from tests.support.vllm_servers.site import Llama, num_external_tokens

PATH = "/v1/completions"


@pytest.fixture
def proxy(llama: Llama) -> Iterator[VllmProxy]:
    proxy = VllmProxy([llama.prefill.url], [llama.decode.url])
    yield proxy
    proxy.close()


@pytest.fixture
def sidecar(llama: Llama) -> Iterator[LlmdSidecar]:
    sidecar = LlmdSidecar(llama.decode.url)
    yield sidecar
    sidecar.close()


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"min_tokens": 16}])
def test_vllms_proxy(llama: Llama, new_prompt: NewPrompt, proxy: VllmProxy, fields: dict[str, Any]) -> None:
    prompt = new_prompt(200)
    before = num_external_tokens(llama.decode)
    right = complete(llama.alone.url, prompt, 16, **fields)  # `min_tokens` keeps out token 2, the end
    assert complete(proxy.url, prompt, 16, **fields).tokens == right.tokens
    assert num_external_tokens(llama.decode) - before in (199, 200)


def through(llama: Llama, sidecar: LlmdSidecar, prompt: list[int], **fields: Any) -> Any:
    """Return the response to a completion that llm-d's scheduler sends to the sidecar."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    headers = {PREFILLER_HEADER: llama.prefill.url.removeprefix("http://")}
    return post(sidecar.url, PATH, body | {"return_token_ids": True} | fields, headers)


@pytest.mark.parametrize("stream", [False, True])
def test_llm_ds_sidecar(llama: Llama, new_prompt: NewPrompt, sidecar: LlmdSidecar, stream: bool) -> None:
    prompt = new_prompt(200)
    before = num_external_tokens(llama.decode)
    reply = through(llama, sidecar, prompt, stream=stream)
    assert reply.status == 200
    tokens = [token for chunk in reply.chunks for token in chunk["choices"][0].get("token_ids") or []]
    assert tuple(tokens) == tuple(llama.right_tokens(prompt, 16))
    assert num_external_tokens(llama.decode) - before in (199, 200)


def test_llm_ds_sidecar_and_min_tokens(llama: Llama, new_prompt: NewPrompt, sidecar: LlmdSidecar) -> None:
    assert through(llama, sidecar, new_prompt(64), min_tokens=16).status == 400
