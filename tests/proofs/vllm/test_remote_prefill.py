"""Remote prefill: the tokens are those of one engine, and they come from the cache that was moved."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.site_fixtures import NewPrompt
from tests.support.vllm_servers.completions import ASK_FOR_PREFILL, Completion, complete, decode, prefill
from tests.support.vllm_servers.router_process import RouterProcess
from tests.support.vllm_servers.site import Llama, check_moved, num_external_tokens, through

BLOCK = 32


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 200, 700, 1900])
def test_tokens_after_remote_prefill_are_those_of_one_engine(
    llama: Llama, new_prompt: NewPrompt, length: int
) -> None:
    check_moved(llama.prefill, llama.decode, new_prompt(length), llama.right_tokens)


def test_the_cache_of_another_prompt_gives_the_other_prompts_tokens(
    llama: Llama, new_prompt: NewPrompt
) -> None:
    ours, theirs = new_prompt(200), new_prompt(200)
    prefill(llama.prefill.url, ours)
    swapped = decode(llama.decode.url, ours, prefill(llama.prefill.url, theirs))
    assert swapped.tokens != llama.right_tokens(ours)
    # Of our prompt only the last token was looked at: all before it is what the cache says it is.
    assert swapped.tokens == llama.right_tokens([*theirs[:-1], ours[-1]])


def test_what_the_decode_engine_has_cached_is_not_pulled(llama: Llama, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(200)
    complete(llama.decode.url, prompt[:100])  # three whole blocks of it
    before = num_external_tokens(llama.decode)
    moved = through(llama.prefill, llama.decode, prompt)
    assert moved.tokens == llama.right_tokens(prompt)
    assert num_external_tokens(llama.decode) - before in (200 - 3 * BLOCK, 199 - 3 * BLOCK)


def test_a_prompt_seen_before_moves_its_last_block_alone(llama: Llama, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(160)
    first = through(llama.prefill, llama.decode, prompt)
    before = num_external_tokens(llama.decode)
    again = through(llama.prefill, llama.decode, prompt)
    assert first.tokens == again.tokens == llama.right_tokens(prompt)
    assert num_external_tokens(llama.decode) - before <= BLOCK


def test_the_reference_carries_the_trace_of_the_request(llama: Llama, new_prompt: NewPrompt) -> None:
    prompt, traceparent = new_prompt(64), f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    given = ASK_FOR_PREFILL | {"traceparent": traceparent}
    reply = complete(llama.prefill.url, prompt, 1, kv_transfer_params=given)
    assert reply.kv_transfer_params is not None
    assert reply.kv_transfer_params["kvxferd"]["traceparent"] == traceparent
    moved = decode(llama.decode.url, prompt, reply.kv_transfer_params)
    assert moved.tokens == llama.right_tokens(prompt)


def test_a_conversation_goes_on(llama: Llama, new_prompt: NewPrompt) -> None:
    said = new_prompt(90)
    for turn in range(3):
        reply = through(llama.prefill, llama.decode, said, max_tokens=20).tokens
        assert reply == llama.right_tokens(said, 20), f"turn {turn}"
        said = [*said, *reply, *new_prompt(25)]


def test_eight_requests_through_a_router_half_of_them_streamed(
    llama: Llama, new_prompt: NewPrompt, router: RouterProcess
) -> None:
    prompts = [new_prompt(length) for length in (300, 31, 65, 480, 128, 900, 17, 222)]

    def send_request(number: int) -> Completion:
        return complete(router.url, prompts[number], 16, stream=number % 2 == 1)

    before = num_external_tokens(llama.decode)
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(send_request, range(len(prompts))))
    assert [reply.tokens for reply in replies] == [llama.right_tokens(p, 16) for p in prompts]
    moved = num_external_tokens(llama.decode) - before
    assert sum(map(len, prompts)) - len(prompts) <= moved <= sum(map(len, prompts))


def test_the_connector_counts_in_vllms_own_metrics(llama: Llama, new_prompt: NewPrompt) -> None:
    before = llama.decode.metric("vllm:kvxferd_pull_bytes_count")
    through(llama.prefill, llama.decode, new_prompt(64))
    assert llama.decode.metric("vllm:kvxferd_pull_bytes_count") == before + 1
    assert llama.decode.metric("vllm:kvxferd_pull_bytes_sum") >= 64 * 4 * 2 * 4 * 32 * 2


def test_a_request_that_nobody_decodes_is_let_go(llama: Llama, new_prompt: NewPrompt) -> None:
    before = llama.prefill.metric("vllm:kvxferd_released_unread_total")
    prefill(llama.prefill.url, new_prompt(300))
    assert llama.nodes.num_published() == 1
    llama.settle()  # its lease ends, and its blocks are the engine's again
    assert llama.prefill.metric("vllm:kvxferd_released_unread_total") == before + 1


def test_a_reference_that_is_over_is_computed_again(llama: Llama, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(150)
    params = prefill(llama.prefill.url, prompt)
    llama.settle()
    assert decode(llama.decode.url, prompt, params).tokens == llama.right_tokens(prompt)
