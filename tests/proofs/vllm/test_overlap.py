"""Both engines are asked at once: caches are read chunk by chunk while they are computed."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.nodes.processes import stopped
from tests.support.nodes.waiting import wait_until
from tests.support.site_fixtures import NewPrompt
from tests.support.vllm_servers.completions import ASK_FOR_PREFILL, Asked, complete, prefill
from tests.support.vllm_servers.engines import Engine, Served, kvxferd_connector
from tests.support.vllm_servers.router_process import RouterProcess
from tests.support.vllm_servers.site import LEASE_S, Nodes, Site, num_external_tokens, wait_until_settled

# Four requests advance by 64 tokens a step, and 52 blocks of 32 tokens do not hold four long prompts.
CHUNKS = ("--max-num-batched-tokens=256", "--long-prefill-token-threshold=64")
SMALL_CACHE = 52


class Overlap:
    """A prefill and a decode engine that move caches early, and one alone. `ask` is the router."""

    def __init__(self, site: Site, nodes: Nodes) -> None:
        model = site.model("llama")
        self.nodes = nodes
        into_prefill = kvxferd_connector(
            nodes.prefill.worker_socket, "kv_producer", lease_s=LEASE_S, progressive=True
        )
        into_decode = kvxferd_connector(
            nodes.decode.worker_socket, "kv_consumer", "recompute", progressive=True
        )
        flags = (*CHUNKS, "--no-scheduler-reserve-full-isl", "--max-model-len=1500")
        self.alone = site.engine("early-alone", Served(model))
        self.prefill = site.engine(
            "early-prefill", Served(model, into_prefill, num_blocks=SMALL_CACHE, flags=flags)
        )
        self.decode = site.engine("early-decode", Served(model, into_decode))
        for engine in self.all:
            engine.wait()
        self._known: dict[str, Any] = prefill(self.prefill.url, [5] * 40)["kvxferd"]

    @property
    def all(self) -> tuple[Engine, Engine, Engine]:
        return self.alone, self.prefill, self.decode

    def send_request(self, prompt: list[int], max_tokens: int = 12) -> tuple[Asked, Asked]:
        """Ask the decode engine, then the prefill engine."""
        names = {"transfer_id": secrets.token_hex(8), "nonce": secrets.token_hex(16)}
        shared = {"kvxferd": self._known | names, "kvxferd_overlap": True}
        early = {"do_remote_prefill": True, "do_remote_decode": False} | shared
        decoding = Asked(self.decode.url, prompt, max_tokens, kv_transfer_params=early)
        return decoding, Asked(self.prefill.url, prompt, 1, kv_transfer_params=ASK_FOR_PREFILL | shared)


@pytest.fixture(scope="module")
def shared_overlap(site: Site, nodes: Nodes) -> Iterator[Overlap]:
    overlap = Overlap(site, nodes)
    yield overlap
    site.end(*overlap.all)


@pytest.fixture
def overlap(shared_overlap: Overlap) -> Iterator[Overlap]:
    yield shared_overlap
    wait_until_settled(shared_overlap.nodes, shared_overlap.prefill, shared_overlap.decode)


@pytest.mark.parametrize("length", [50, 64, 65, 700, 1400])
def test_the_tokens_are_one_engine_s(overlap: Overlap, new_prompt: NewPrompt, length: int) -> None:
    prompt = new_prompt(length)
    before = num_external_tokens(overlap.decode)
    with stopped(overlap.prefill.workers()):
        decoding, prefilling = overlap.send_request(prompt)
        wait_until(lambda: overlap.nodes.num_pulls() == 1, overlap.nodes.what_moves)
    prefilling.answer()
    assert decoding.answer().tokens == overlap.alone.tokens(prompt)
    assert num_external_tokens(overlap.decode) - before in (length - 1, length)


def test_a_beginning_that_both_engines_have(overlap: Overlap, new_prompt: NewPrompt) -> None:
    beginning = new_prompt(320)
    for prompt in (beginning + new_prompt(400), beginning + new_prompt(300)):
        decoding, prefilling = overlap.send_request(prompt)
        prefilling.answer()
        assert decoding.answer().tokens == overlap.alone.tokens(prompt)


def test_preempted_prompts_are_computed_by_the_decode_engine(overlap: Overlap, new_prompt: NewPrompt) -> None:
    prompts = [new_prompt(900 + number) for number in range(4)]
    right = [overlap.alone.tokens(prompt) for prompt in prompts]
    before = overlap.prefill.metric("vllm:num_preemptions_total")
    requested = [overlap.send_request(prompt) for prompt in prompts]
    for decoding, tokens in zip([one for one, _ in requested], right, strict=True):
        assert decoding.answer().tokens == tokens
    for _, prefilling in requested:
        prefilling.answer()
    assert overlap.prefill.metric("vllm:num_preemptions_total") > before


def test_a_client_that_leaves_both(overlap: Overlap, new_prompt: NewPrompt) -> None:
    with stopped(overlap.prefill.workers()):
        decoding, prefilling = overlap.send_request(new_prompt(1400))
        wait_until(lambda: overlap.nodes.num_pulls() == 1, overlap.nodes.what_moves)
        decoding.hang_up()
        prefilling.hang_up()
        for engine in (overlap.decode, overlap.prefill):
            engine.await_unanswered(0)
    prompt = new_prompt(300)
    decoding, prefilling = overlap.send_request(prompt)
    assert decoding.answer().tokens == overlap.alone.tokens(prompt)
    prefilling.answer()


def test_through_the_example_router(overlap: Overlap, new_prompt: NewPrompt) -> None:
    router = RouterProcess(overlap.prefill.url, overlap.decode.url, "--overlap")
    try:
        for length in (70, 900, 1300):
            prompt = new_prompt(length)
            before = num_external_tokens(overlap.decode)
            assert complete(router.url, prompt, 12).tokens == overlap.alone.tokens(prompt)
            assert num_external_tokens(overlap.decode) - before in (length - 1, length)
        requested = Asked(router.url, new_prompt(1400), 40)
        overlap.decode.await_unanswered(1)
        requested.hang_up()
        for engine in (overlap.decode, overlap.prefill):
            engine.await_unanswered(0)
    finally:
        router.stop()
