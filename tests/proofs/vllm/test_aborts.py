"""Clients that leave, at every stage: blocks come back on both sides, and the next request is right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.nodes.processes import stopped
from tests.support.nodes.waiting import wait_until
from tests.support.site_fixtures import NewPrompt
from tests.support.vllm_servers.completions import ASK_FOR_PREFILL, Asked, RequestFailed, decode, prefill
from tests.support.vllm_servers.router_process import RouterProcess
from tests.support.vllm_servers.site import Llama, through


@pytest.fixture
def next_one_is_right(llama: Llama, new_prompt: NewPrompt) -> Iterator[None]:
    """After the test: all blocks free, and a request through both engines right."""
    yield
    llama.settle()
    prompt = new_prompt(220)
    assert through(llama.prefill, llama.decode, prompt).tokens == llama.right_tokens(prompt)


pytestmark = pytest.mark.usefixtures("next_one_is_right")


def test_while_the_prompt_is_computed(llama: Llama, new_prompt: NewPrompt) -> None:
    with stopped(llama.prefill.workers()):
        requested = Asked(llama.prefill.url, new_prompt(1500), 1, kv_transfer_params=dict(ASK_FOR_PREFILL))
        llama.prefill.await_unanswered(1)
        requested.hang_up()
        llama.prefill.await_unanswered(0)


def test_while_several_wait_for_their_caches_and_one_leaves(llama: Llama, new_prompt: NewPrompt) -> None:
    prompts = [new_prompt(300 + 10 * n) for n in range(4)]
    params = [prefill(llama.prefill.url, prompt) for prompt in prompts]
    with stopped(llama.nodes.decode.movers()):
        requested = [
            Asked(llama.decode.url, p, 12, kv_transfer_params=kv)
            for p, kv in zip(prompts, params, strict=True)
        ]
        wait_until(lambda: llama.nodes.num_pulls() == len(prompts), llama.nodes.what_moves)
        requested[1].hang_up()
        llama.decode.await_unanswered(3)
    for number in (0, 2, 3):
        assert requested[number].answer().tokens == llama.right_tokens(prompts[number]), number


def test_while_tokens_come(llama: Llama, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(500)
    params = prefill(llama.prefill.url, prompt)
    requested = Asked(llama.decode.url, prompt, 1400, kv_transfer_params=params, stream=True)
    requested.wait_for_a_token()
    requested.hang_up()
    llama.decode.await_unanswered(0)


def test_through_a_router(llama: Llama, new_prompt: NewPrompt, router: RouterProcess) -> None:
    requested = Asked(router.url, new_prompt(700), 1200, stream=True)
    requested.wait_for_a_token()
    requested.hang_up()
    llama.decode.await_unanswered(0)


def test_a_request_that_the_decode_engine_refuses(llama: Llama, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(250)
    params: dict[str, Any] = prefill(llama.prefill.url, prompt)
    with pytest.raises(RequestFailed) as refusal:
        decode(llama.decode.url, prompt, params, max_tokens=5000)  # more than the model's length
    assert refusal.value.status == 400
