"""A request between engines: it is sent to another decode engine, waits there for long, or is given up.

Decode engines have the policy `fail`, vLLM's own: a cache that cannot be had is an error, never a second
prefill that nobody sees.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.nodes.processes import stopped
from tests.support.nodes.waiting import wait_until
from tests.support.site_fixtures import NewPrompt
from tests.support.vllm_servers.completions import Asked, complete, prefill
from tests.support.vllm_servers.engines import Engine
from tests.support.vllm_servers.router_process import RouterProcess
from tests.support.vllm_servers.site import LEASE_S, Llama, Site, num_external_tokens, wait_until_settled

NUM_REQUESTS = 60
AT_A_TIME = 6
MOST_TOKENS, NUM_RUNNING = 1900, 12  # of an answer, and how many of these keep an engine busy
NUM_QUEUED = 6


@dataclass
class Decoders:
    """Two decode engines with one prefill engine. `narrow` runs one request at a time."""

    llama: Llama
    narrow: Engine

    @property
    def wide(self) -> Engine:
        return self.llama.strict

    def num_prefilled(self) -> int:
        """Requests that the prefill engine has answered."""
        return int(self.llama.prefill.metric("vllm:request_success_total"))

    def released(self) -> list[str]:
        """Why each transfer of the prefill engine ended, in this order."""
        records = self.llama.nodes.prefill.history(kind="release")
        return [record["why"] for record in records]

    def heal(self) -> None:
        self.llama.heal()
        if not self.narrow.lives:
            self.narrow.kill()
            self.narrow.start()
        self.narrow.wait()


@pytest.fixture(scope="module")
def shared_decoders(site: Site, shared_llama: Llama) -> Iterator[Decoders]:
    served = shared_llama.nodes.consumer(site.model("llama"), "fail", flags=("--max-num-seqs=1",))
    narrow = site.engine("narrow", served).wait()
    yield Decoders(shared_llama, narrow)
    site.end(narrow)


@pytest.fixture
def decoders(shared_decoders: Decoders) -> Iterator[Decoders]:
    shared_decoders.heal()
    yield shared_decoders
    shared_decoders.heal()
    llama = shared_decoders.llama
    wait_until_settled(llama.nodes, llama.prefill, shared_decoders.wide, shared_decoders.narrow)


@pytest.fixture
def router(decoders: Decoders) -> Iterator[RouterProcess]:
    router = RouterProcess(decoders.llama.prefill.url, decoders.narrow.url, "--decode", decoders.wide.url)
    yield router
    router.stop()


def test_an_engine_that_dies_while_it_reads_leaves_its_requests_to_another(
    decoders: Decoders, router: RouterProcess, new_prompt: NewPrompt
) -> None:
    """The other reads what the first prefill has computed: none is computed twice."""
    llama = decoders.llama
    prompts = [new_prompt(200 + 30 * number) for number in range(4)]
    right = [llama.right_tokens(prompt) for prompt in prompts]
    before = decoders.num_prefilled()
    with ThreadPoolExecutor(len(prompts)) as pool:
        with stopped(llama.nodes.decode.movers()):
            replies = [pool.submit(complete, router.url, prompt, 12) for prompt in prompts]
            wait_until(lambda: decoders.num_prefilled() - before == len(prompts), "all are prefilled")
            wait_until(lambda: decoders.narrow.num_unanswered() == 2, "two are at the engine that dies")
            wait_until(lambda: llama.nodes.num_pulls() >= 3, llama.nodes.what_moves)
            decoders.narrow.kill()
        assert [reply.result().tokens for reply in replies] == right
    assert decoders.num_prefilled() - before == len(prompts)


def test_sixty_requests_and_an_engine_that_dies_in_the_middle(
    decoders: Decoders, router: RouterProcess, new_prompt: NewPrompt
) -> None:
    prompts = [new_prompt(60 + 7 * number) for number in range(NUM_REQUESTS)]
    right = [decoders.llama.right_tokens(prompt) for prompt in prompts]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        replies = [pool.submit(complete, router.url, prompt, 12) for prompt in prompts]
        wait_until(lambda: sum(reply.done() for reply in replies) >= NUM_REQUESTS // 2, "half are answered")
        decoders.narrow.kill()
        assert [reply.result().tokens for reply in replies] == right


@contextmanager
def busy(engine: Engine, new_prompt: NewPrompt) -> Iterator[None]:
    """Keep an engine that runs one request at a time busy: others wait in its queue."""
    running = [Asked(engine.url, new_prompt(40), MOST_TOKENS, stream=True) for _ in range(NUM_RUNNING)]
    try:
        running[0].wait_for_a_token()
        yield
    finally:
        for one in running:
            one.hang_up()


def test_a_queue_of_three_leases(decoders: Decoders, new_prompt: NewPrompt) -> None:
    """Each is read from the first prefill: the policy is `fail`."""
    llama, narrow = decoders.llama, decoders.narrow
    prompts = [new_prompt(100 + number) for number in range(NUM_QUEUED)]
    right = [llama.right_tokens(prompt) for prompt in prompts]
    before = num_external_tokens(narrow)
    with busy(narrow, new_prompt):
        params = [prefill(llama.prefill.url, prompt) for prompt in prompts]
        prefilled = decoders.num_prefilled()
        asked = [
            Asked(narrow.url, prompt, 12, kv_transfer_params=kv)
            for prompt, kv in zip(prompts, params, strict=True)
        ]
        # As the operator of the prefill node sees it.
        wait_until(lambda: held_for(decoders) > 3 * LEASE_S, llama.nodes.what_moves, 9 * LEASE_S)
        assert llama.nodes.num_published() == NUM_QUEUED
    assert [one.answer().tokens for one in asked] == right
    assert decoders.num_prefilled() == prefilled
    expected = sum(map(len, prompts))
    assert expected - NUM_QUEUED <= num_external_tokens(narrow) - before <= expected


def held_for(decoders: Decoders) -> float:
    """The longest time that the prefill node's operator sees an engine hold a transfer."""
    transfers: list[dict[str, Any]] = decoders.llama.nodes.prefill.control.get("/v1/transfers")["transfers"]
    return max((held["held_s"] for one in transfers for held in one["holders"]), default=0.0)


@pytest.mark.parametrize("where", ["in the queue", "while it is read"])
def test_what_is_given_up_is_free_at_once(decoders: Decoders, new_prompt: NewPrompt, where: str) -> None:
    llama, narrow = decoders.llama, decoders.narrow
    prompt = new_prompt(300)
    params = prefill(llama.prefill.url, prompt)
    waits = busy(narrow, new_prompt) if where == "in the queue" else stopped(llama.nodes.decode.movers())
    with waits:
        requested = Asked(narrow.url, prompt, 12, kv_transfer_params=params)
        wait_until(lambda: held_for(decoders) > 0, llama.nodes.what_moves)
        requested.hang_up()
        began = time.monotonic()
        wait_until(lambda: llama.nodes.num_published() == 0, llama.nodes.what_moves)
        print(f"free {(time.monotonic() - began) * 1e3:.0f} ms after the client left, {where}")
    assert decoders.released()[-1] == "abandoned"
