"""Daemons and engines killed between and during requests: right tokens or a clean error, then recovery.

Every request is also sent to an engine whose policy is `fail`: there a cache that cannot be had ends
the request with status 500, never with other tokens. Under `recompute` the tokens are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.support.nodes.processes import stopped
from tests.support.nodes.waiting import wait_until
from tests.support.site_fixtures import EACH_VICTIM, VICTIMS, NewPrompt
from tests.support.vllm_servers.completions import Asked, RequestFailed, prefill
from tests.support.vllm_servers.engines import Engine
from tests.support.vllm_servers.site import Llama, num_external_tokens, through

RECOVERY_S = 60.0


def check(replied: Callable[[], Sequence[int]], right: Sequence[int], may_fail: tuple[int, ...] = ()) -> None:
    """The answer is right, or an error with one of the statuses. 0: the connection broke."""
    try:
        tokens = replied()
    except RequestFailed as error:
        if error.status not in may_fail:
            raise
        return
    assert tuple(tokens) == tuple(right)


def check_recovery(llama: Llama, new_prompt: NewPrompt) -> None:
    """With everything started again caches move again, to both decode engines; no answer is wrong."""
    llama.heal()

    def moves_to(engine: Engine, may_fail: tuple[int, ...]) -> bool:
        prompt = new_prompt(130)
        before = num_external_tokens(engine)
        right = llama.right_tokens(prompt)
        check(lambda: through(llama.prefill, engine, prompt).tokens, right, may_fail)
        return num_external_tokens(engine) - before >= 129

    wait_until(lambda: moves_to(llama.decode, ()), "a cache moves to the decode engine", RECOVERY_S)
    wait_until(lambda: moves_to(llama.strict, (500,)), "a cache moves to the strict engine", RECOVERY_S)


@EACH_VICTIM
def test_killed_between_prefill_and_decode(llama: Llama, new_prompt: NewPrompt, victim: str) -> None:
    prompts = [new_prompt(260), new_prompt(260)]
    params = [prefill(llama.prefill.url, prompt) for prompt in prompts]
    right = [llama.right_tokens(prompt) for prompt in prompts]
    VICTIMS[victim](llama)

    def reply(engine: Engine, number: int) -> Sequence[int]:
        return Asked(engine.url, prompts[number], 12, kv_transfer_params=params[number]).answer().tokens

    check(lambda: reply(llama.decode, 0), right[0], may_fail=(0,) if victim == "the-decode-engine" else ())
    check(lambda: reply(llama.strict, 1), right[1], may_fail=(500,))
    check_recovery(llama, new_prompt)


@EACH_VICTIM
def test_killed_while_caches_are_pulled(llama: Llama, new_prompt: NewPrompt, victim: str) -> None:
    prompts = [new_prompt(260 + 40 * number) for number in range(4)]
    params = [prefill(llama.prefill.url, prompt) for prompt in prompts]
    right = [llama.right_tokens(prompt) for prompt in prompts]
    engines = [llama.decode, llama.strict, llama.decode, llama.strict]
    with stopped(llama.nodes.decode.movers()):
        requested = [
            Asked(engine.url, prompt, 12, kv_transfer_params=kv)
            for engine, prompt, kv in zip(engines, prompts, params, strict=True)
        ]
        wait_until(lambda: llama.nodes.num_pulls() == len(prompts), llama.nodes.what_moves)
        VICTIMS[victim](llama)
    with ThreadPoolExecutor(len(requested)) as pool:
        replies = [pool.submit(one.answer) for one in requested]
    for engine, reply, tokens in zip(engines, replies, right, strict=True):
        may_fail = (500,) if engine is llama.strict else (0,) if victim == "the-decode-engine" else ()
        check(lambda reply=reply: reply.result().tokens, tokens, may_fail)
    check_recovery(llama, new_prompt)


@EACH_VICTIM
def test_killed_while_eight_requests_are_on_their_way(
    llama: Llama, new_prompt: NewPrompt, victim: str
) -> None:
    prompts = [new_prompt(100 + 60 * number) for number in range(8)]
    right = [llama.right_tokens(prompt, 60) for prompt in prompts]
    engines = [llama.decode, llama.strict] * 4
    before = llama.decode.num_unanswered()
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = [
            pool.submit(through, llama.prefill, engine, prompt, 60)
            for engine, prompt in zip(engines, prompts, strict=True)
        ]
        wait_until(lambda: llama.decode.num_unanswered() > before, "the first is being decoded")
        VICTIMS[victim](llama)
    for engine, reply, tokens in zip(engines, replies, right, strict=True):
        may_fail = (500,) if engine is llama.strict else ()
        may_fail += (0,) if "engine" in victim else ()
        check(lambda reply=reply: reply.result().tokens, tokens, may_fail)
    check_recovery(llama, new_prompt)


def test_a_prefill_engine_without_its_daemon_still_answers(llama: Llama, new_prompt: NewPrompt) -> None:
    llama.nodes.prefill.kill()
    prompt = new_prompt(180)
    assert through(llama.prefill, llama.decode, prompt).tokens == llama.right_tokens(prompt)
    check_recovery(llama, new_prompt)
