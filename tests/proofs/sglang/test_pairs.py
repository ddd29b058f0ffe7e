"""Real pairs: the decode engine's tokens are those of an engine alone, whatever its prefill engine is."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.support.sglang_servers.engines import STAND_INS, Pair, abort, generate, tokens_of
from tests.support.sglang_servers.pairs import CHUNKS, Llama, in_use
from tests.support.site_fixtures import NewPrompt

Request = Callable[[list[int]], Any]
LIMIT_S = 120.0  # within which every request has ended
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def check(llama: Llama, pair: Pair, prompts: Sequence[Sequence[int]], at_a_time: int = 1) -> None:
    right = [llama.right_tokens(prompt) for prompt in prompts]
    with ThreadPoolExecutor(at_a_time) as pool:
        assert list(pool.map(pair.tokens, prompts)) == right


@pytest.mark.parametrize("length", [1, 7, 16, 50, 200, 900, 1500])
def test_of_any_length_and_in_chunks(llama: Llama, new_prompt: NewPrompt, length: int) -> None:
    check(llama, llama.pair, [new_prompt(length)])


def test_a_prefix_that_the_prefill_engine_has(llama: Llama, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(400)
    check(llama, llama.pair, [prompt])
    first, second = llama.pair.send(prompt + new_prompt(40))
    assert tokens_of(second.result(LIMIT_S))
    assert first.result(LIMIT_S)["meta_info"]["cached_tokens"] >= 384
    check(llama, llama.pair, [prompt])


def test_eight_at_a_time(llama: Llama, new_prompt: NewPrompt) -> None:
    shared = new_prompt(300)
    prompts = [new_prompt(1 + 29 * number % 600) for number in range(16)]
    prompts += [shared[: 20 * number] + new_prompt(50) for number in range(8)]
    check(llama, llama.pair, prompts, at_a_time=8)


def outcome(llama: Llama, drawn: random.Random, prompt: Sequence[int], number: int) -> str:
    """Send a request, which half of the time is aborted somewhere, and return how it has ended."""
    right, rid, began = llama.right_tokens(prompt), f"random-{number}", time.monotonic()
    first, second = llama.pair.send(prompt, rid=rid)
    sides = drawn.choice(((), (), (), (llama.prefill,), (llama.decode,), (llama.prefill, llama.decode)))
    if sides:
        for _ in range(drawn.randrange(12)):  # so that it comes in each state
            in_use(llama.prefill)
        for engine in sides:
            abort(engine.url, rid)
    try:
        reply = second.result(LIMIT_S)
        ended = reply["meta_info"]["finish_reason"]["type"]
        tokens = tuple(reply["output_ids"])
    except HTTPError:
        ended, tokens = "abort", ()
    with suppress(HTTPError):
        first.result(LIMIT_S)
    if time.monotonic() - began > LIMIT_S:
        return "hung"
    if ended == "abort":
        return "aborted" if sides else "failed"
    return "right" if tokens == right else "different"


def test_two_hundred_random_requests_with_aborts(llama: Llama) -> None:
    drawn = random.Random(20261128)
    shared = [drawn.randrange(3, 512) for _ in range(300)]
    prompts = []
    for _ in range(200):
        own = [drawn.randrange(3, 512) for _ in range(drawn.randrange(1, 500))]
        prompts.append(shared[: drawn.randrange(300)] + own if drawn.random() < 0.3 else own)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(llama.right_tokens, prompts))
        ended = Counter(pool.map(lambda n: outcome(llama, drawn, prompts[n], n), range(len(prompts))))
    print(f"200 requests: {dict(ended)}")
    assert set(ended) <= {"right", "aborted"}
    assert min(ended["right"], ended["aborted"]) >= 40
    llama.settle()


def test_requests_that_the_decode_engine_takes_back(llama: Llama, new_prompt: NewPrompt) -> None:
    """Its pool has room for half of them, so it puts some aside, and goes on with them later."""
    flags = ("--num-reserved-decode-tokens=16",)
    small = llama.start("decode", "decode-small", max_tokens=1024, flags=flags).wait()
    pair = Pair(llama.prefill, small)
    prompts = [new_prompt(40 + 10 * number) for number in range(8)]
    right = [llama.right_tokens(prompt, 200) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: pair.tokens(prompt, 200), prompts)) == right
    assert small.said("Retract requests")
    llama.settle(small)
    pair.close()
    llama.site.end(small)


def test_a_pull_that_is_dropped_gives_other_tokens(llama: Llama, new_prompt: NewPrompt) -> None:
    """The negative control: equal tokens come of the cache that is moved, and of nothing else."""
    path = {"PYTHONPATH": f"{STAND_INS.parent / 'dropped_pull'}:{STAND_INS}"}
    dropping = llama.start("decode", "dropping", environ=path).wait()
    pair = Pair(llama.prefill, dropping)
    prompts = [new_prompt(200) for _ in range(4)]
    right = [llama.right_tokens(prompt) for prompt in prompts]
    tokens = [pair.tokens(prompt) for prompt in prompts]
    pair.close()
    llama.site.end(dropping)
    assert all(dropped != whole for dropped, whole in zip(tokens, right, strict=True))


def abort_some(pair: Pair, new_prompt: NewPrompt) -> None:
    """Abort eight requests at once, and return when all have ended."""
    sent = [(f"some-{pair.new_room()}", new_prompt(300)) for _ in range(8)]
    halves = [pair.send(prompt, rid=rid) for rid, prompt in sent]
    for number, (rid, _) in enumerate(sent):
        for engine in (pair.prefill, pair.decode)[number % 2 :]:
            abort(engine.url, rid)
    for half in (half for both in halves for half in both):
        with suppress(HTTPError):
            half.result(LIMIT_S)


def test_tensor_parallel_sizes_need_not_be_equal(llama: Llama, new_prompt: NewPrompt) -> None:
    wide = [
        llama.start("prefill", "prefill-tp2", flags=("--tp-size=2", *CHUNKS), environ=CORES),
        llama.start("decode", "decode-tp2", flags=("--tp-size=2",), environ=CORES),
    ]
    prefill, decode = (engine.wait() for engine in wide)
    for pair in (Pair(prefill, llama.decode), Pair(llama.prefill, decode), Pair(prefill, decode)):
        check(llama, pair, [new_prompt(length) for length in (1, 50, 500)])
        check(llama, pair, [new_prompt(60 * number + 1) for number in range(8)], at_a_time=8)
        abort_some(pair, new_prompt)
        pair.close()
    llama.settle(*wide)
    llama.site.end(*wide)


def test_pipeline_stages_of_the_prefill_engine(llama: Llama, new_prompt: NewPrompt) -> None:
    staged = llama.start("prefill", "prefill-pp2", flags=("--pp-size=2", *CHUNKS), environ=CORES).wait()
    pair = Pair(staged, llama.decode)
    check(llama, pair, [new_prompt(length) for length in (1, 50, 500)])
    check(llama, pair, [new_prompt(60 * number + 1) for number in range(8)], at_a_time=8)
    abort_some(pair, new_prompt)
    pair.close()
    llama.settle(staged)
    llama.site.end(staged)


@pytest.fixture(scope="module")
def one_token_pages(shared_llama: Llama) -> Iterator[Pair]:
    engines = [
        shared_llama.start(role, f"{role}-page1", page_tokens=1, flags=flags)
        for role, flags in (("prefill", CHUNKS), ("decode", ()))
    ]
    pair = Pair(*(engine.wait() for engine in engines))
    yield pair
    shared_llama.settle(*engines)
    pair.close()
    shared_llama.site.end(*engines)


@pytest.mark.parametrize("length", [1, 17, 300])
def test_pages_of_one_token(llama: Llama, one_token_pages: Pair, new_prompt: NewPrompt, length: int) -> None:
    check(llama, one_token_pages, [new_prompt(length)])


def test_what_it_takes_beside_an_engine_alone(llama: Llama, new_prompt: NewPrompt) -> None:
    """The same first tokens; the figures have no limit: time to first token, and requests a second."""

    def first_tokens(name: str, request: Request, prompts: list[list[int]], at_a_time: int) -> list[Any]:
        each = []

        def timed(prompt: list[int]) -> Any:
            start = time.monotonic()
            token = request(prompt)
            each.append(time.monotonic() - start)
            return token

        began = time.monotonic()
        with ThreadPoolExecutor(at_a_time) as pool:
            tokens = list(pool.map(timed, prompts))
        first_s, per_second = sorted(each)[len(each) // 2], len(each) / (time.monotonic() - began)
        print(f"{name}, {at_a_time} at a time: first token {first_s:.3f} s, {per_second:.2f} a second")
        return tokens

    def alone(prompt: list[int]) -> Any:
        return tokens_of(generate(llama.alone.url, prompt, 1))

    for at_a_time in (1, 8):
        prompts = [new_prompt(256) for _ in range(24)]
        expected = first_tokens("alone", alone, prompts, at_a_time)
        found = first_tokens("pair", lambda prompt: llama.pair.tokens(prompt, 1), prompts, at_a_time)
        assert found == expected
