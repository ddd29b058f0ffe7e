"""A router asks both engines at once: what the prefill engine publishes with each step, and takes back.

The cache holds poison where it is not written; blocks that the connector keeps are those of vLLM's pool.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvxferd.integrations.vllm.session.early_pulls import EarlyPullLimits
from kvxferd.integrations.vllm.session.step_metadata import StepMetadata, WrittenSpec
from tests.support.connector_harness import BLOCK_TOKENS, EngineUnderTest, Request, Status, engines_on
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.waiting import wait_until

LIMITS = EarlyPullLimits(num_requests=2, num_blocks=8)
POISON, CONTENT = 99, 7
NUM_TOKENS = 14  # of three whole blocks and a half
IDS = [3, 4, 5, 6]
INTO = [9, 10, 11, 12]


class Overlap:
    """Two engines, and the reference of a request that neither has yet."""

    def __init__(self, daemon: Daemon, engine: Callable[..., EngineUnderTest]) -> None:
        self.daemon = daemon
        self.asked: list[Request] = []
        self.prefill = engine("prefill", publishes=True, early=LIMITS)
        self.plain = engine("plain", publishes=True)
        self.decode = engine("decode", early=LIMITS)
        known = self.prefill.prefill("learn", 1, [1], fill=1)  # as the router learns the engine's names
        assert known is not None
        self._engine: dict[str, Any] = known["kvxferd"]
        assert self.prefill.publisher is not None
        self.prefill.publisher.unpublish(self._engine)
        self.prefill.step_until(lambda r: "learn" in r.sent, "its blocks come back")
        self.prefill.bytes[:] = POISON

    def ref(self) -> dict[str, Any]:
        return self._engine | {"transfer_id": f"t-{secrets.token_hex(4)}", "nonce": secrets.token_hex(16)}

    def add(self, ref: dict[str, Any], engine: EngineUnderTest, name: str = "p-1") -> Request:
        """Give the request to a prefill engine."""
        params = {"do_remote_decode": True, "kvxferd": ref, "kvxferd_overlap": True}
        request = Request(name, NUM_TOKENS, params)
        engine.scheduler.request_added(request)
        engine.pool.give(name, IDS)
        self.asked.append(request)
        return request

    def start_prefill(self, ref: dict[str, Any], name: str = "p-1") -> Request:
        """Schedule a request's first chunk."""
        request = self.add(ref, self.prefill, name)
        self.prefill.step([name])
        return request

    def compute(self, request: Request, num_tokens: int, engine: EngineUnderTest | None = None) -> None:
        """Run the forward passes of the steps up to `num_tokens`, and schedule the next."""
        engine = engine or self.prefill
        written = engine.bytes.reshape(-1, 64)
        for token in range(request.num_computed_tokens, num_tokens):
            written[IDS[token // BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS] = CONTENT
        request.num_computed_tokens = num_tokens
        engine.step([request.request_id])

    def start_half_a_prefill(self) -> tuple[dict[str, Any], Request]:
        """Publish a request, and return its reference and it once two blocks of it are reported."""
        ref = self.ref()
        request = self.start_prefill(ref)
        self.compute(request, 2 * BLOCK_TOKENS)
        assert self.prefill.pool.kept == IDS[:2]
        return ref, request

    def end_prefill(
        self, request: Request, engine: EngineUnderTest | None = None
    ) -> tuple[bool, dict[str, Any] | None]:
        engine = engine or self.prefill
        self.compute(request, NUM_TOKENS, engine)
        request.status = Status.FINISHED_LENGTH_CAPPED
        return engine.scheduler.request_ended(request, (IDS,))

    def start_decode(self, ref: dict[str, Any], name: str = "d-1", cached: int = 0) -> Request:
        params = {"do_remote_prefill": True, "kvxferd": ref, "kvxferd_overlap": True}
        self.asked.append(self.decode.decode(name, NUM_TOKENS, INTO, params, cached=cached))
        return self.asked[-1]

    def is_published(self, ref: dict[str, Any]) -> bool:
        listed = self.daemon.control.get("/v1/transfers")["transfers"]
        return ref["transfer_id"] in [one["transfer_id"] for one in listed]

    def settle(self) -> None:
        """Let the test's requests leave, and return once nothing is published or pulled."""
        for engine in (self.prefill, self.plain, self.decode):
            for request in self.asked:
                if request.status is not Status.FINISHED_LENGTH_CAPPED:
                    request.status = Status.FINISHED_ABORTED
                    engine.scheduler.request_ended(request, (IDS,))
        self.asked.clear()

        def is_at_rest() -> bool:
            for engine in (self.prefill, self.plain, self.decode):
                engine.step()
            moving = self.daemon.control.get("/v1/transfers")
            return not (moving["transfers"] or moving["pulls"] or self.prefill.pool.kept)

        wait_until(is_at_rest, "nothing is published or pulled")

    def check_delivered(self, name: str = "d-1") -> None:
        results = self.decode.step_until(lambda r: name in r.received, "the pull is over")
        assert results.failed == set()
        tokens = self.decode.bytes[INTO].reshape(-1, 64)[:NUM_TOKENS]
        assert (tokens == CONTENT).all()


@pytest.fixture(scope="module")
def shared_overlap(module_fleet: Fleet) -> Iterator[Overlap]:
    daemon = module_fleet.shared("node")
    with engines_on(daemon) as engine:
        yield Overlap(daemon, engine)


@pytest.fixture
def overlap(shared_overlap: Overlap) -> Iterator[Overlap]:
    shared_overlap.prefill.bytes[:] = shared_overlap.plain.bytes[:] = POISON
    shared_overlap.decode.bytes[:] = 0
    yield shared_overlap
    shared_overlap.settle()


def extends(engine: EngineUnderTest, *scheduled: str) -> list[WrittenSpec]:
    return engine.scheduler.build_step_metadata(scheduled).written


def test_each_step_reports_what_the_steps_before_it_wrote(overlap: Overlap) -> None:
    ref = overlap.ref()
    overlap.start_decode(ref)
    overlap.decode.step()
    request = overlap.start_prefill(ref)
    wait_until(lambda: overlap.is_published(ref), "published")
    assert overlap.prefill.pool.kept == []
    overlap.compute(request, 6)  # one block, and half of the next, which is written again
    assert overlap.prefill.pool.kept == IDS[:1]
    overlap.compute(request, 12)
    assert overlap.prefill.pool.kept == IDS[:3]
    assert extends(overlap.prefill, "p-1") == []
    keeps, params = overlap.end_prefill(request)
    assert keeps
    assert params is not None
    assert params["kvxferd"] == ref
    assert overlap.prefill.pool.kept == IDS
    overlap.prefill.step()
    overlap.check_delivered()
    sent = overlap.prefill.step_until(lambda r: bool(r.sent), "the blocks come back").sent
    assert sent == {"p-1"}
    assert overlap.prefill.pool.kept == []


def test_a_prefix_hit_is_reported_with_the_second_step(overlap: Overlap) -> None:
    """Another request of the first step may be computing the blocks that it shares."""
    ref = overlap.ref()
    overlap.prefill.bytes[IDS[:2]] = CONTENT
    request = overlap.add(ref, overlap.prefill)
    request.num_computed_tokens = 8
    assert extends(overlap.prefill, "p-1") == []
    assert extends(overlap.prefill, "p-1") == [WrittenSpec(ref["transfer_id"], 8)]
    overlap.start_decode(ref)
    overlap.end_prefill(request)
    overlap.prefill.step()
    overlap.check_delivered()


def test_a_decode_engine_that_has_it_all_frees_what_is_published_later(overlap: Overlap) -> None:
    ref = overlap.ref()
    overlap.start_decode(ref, cached=NUM_TOKENS)
    overlap.decode.step()
    overlap.end_prefill(overlap.start_prefill(ref))  # which keeps its blocks, unless the word came before

    def is_freed() -> bool:
        overlap.decode.step()
        overlap.prefill.step()
        return not overlap.prefill.pool.kept

    wait_until(is_freed, "freed")


def test_a_preempted_request_takes_its_transfer_back_and_keeps_its_blocks_until_then(
    overlap: Overlap,
) -> None:
    ref, request = overlap.start_half_a_prefill()
    overlap.start_decode(ref)
    overlap.decode.step()
    scheduler = overlap.prefill.scheduler
    assert not scheduler.publishing.has_pending_frees()
    request.status, request.num_computed_tokens = Status.PREEMPTED, 0
    assert scheduler.publishing.has_pending_frees(), "vLLM need not preempt another"
    assert overlap.prefill.pool.kept == IDS[:2]
    scheduler.build_step_metadata((), ["p-1"])
    results = overlap.decode.step_until(lambda r: bool(r.received), "the pull has failed")
    assert results.failed == {"d-1"}
    wait_until(
        lambda: scheduler.build_step_metadata() == StepMetadata() and not overlap.prefill.pool.kept, "freed"
    )
    assert not scheduler.publishing.has_pending_frees()
    # It is computed again, and published for whoever asks by the new reference.
    request.status = Status.WAITING
    overlap.prefill.step(["p-1"])
    keeps, params = overlap.end_prefill(request)
    assert keeps
    assert params is not None
    assert params["kvxferd"]["transfer_id"] != ref["transfer_id"]
    overlap.decode.decode("d-2", NUM_TOKENS, INTO, params)
    overlap.prefill.step()
    overlap.check_delivered("d-2")


def test_a_request_that_is_computed_from_an_earlier_token_again_takes_its_transfer_back(
    overlap: Overlap,
) -> None:
    """As where another connector could not load what it had promised."""
    _, request = overlap.start_half_a_prefill()
    request.num_computed_tokens = 2
    assert extends(overlap.prefill, "p-1") == []
    wait_until(lambda: overlap.prefill.step().sent == set() and not overlap.prefill.pool.kept, "freed")


def test_a_reference_of_another_start_of_the_engine_gets_another(overlap: Overlap) -> None:
    ref = overlap.ref() | {"generation": "before"}
    request = overlap.start_prefill(ref)
    assert not overlap.is_published(ref)
    _, params = overlap.end_prefill(request)
    assert params is not None
    assert params["kvxferd"]["generation"] == overlap.prefill.generation
    overlap.asked.append(overlap.decode.decode("d-1", NUM_TOKENS, INTO, params))
    overlap.prefill.step()
    overlap.check_delivered()


def test_an_engine_without_the_setting_publishes_by_the_reference_at_the_end(overlap: Overlap) -> None:
    ref = overlap.ref() | {"engine_id": "plain", "generation": overlap.plain.generation}
    overlap.start_decode(ref)
    overlap.decode.step()
    request = overlap.add(ref, overlap.plain)
    overlap.compute(request, 8, overlap.plain)
    assert not overlap.is_published(ref)
    _, params = overlap.end_prefill(request, overlap.plain)
    assert params is not None
    assert params["kvxferd"] == ref
    overlap.check_delivered()


def test_beyond_the_limits_requests_stay_in_the_queue(overlap: Overlap) -> None:
    refs = [overlap.ref() for _ in range(3)]
    overlap.start_decode(refs[0], "d-0")
    overlap.start_decode(refs[1], "d-1")
    params = {"do_remote_prefill": True, "kvxferd": refs[2], "kvxferd_overlap": True}
    third = Request("d-2", NUM_TOKENS, params)
    assert overlap.decode.scheduler.num_tokens_to_pull(third, 0) is None
    overlap.end_prefill(overlap.start_prefill(refs[0], "p-0"))
    overlap.prefill.step()
    overlap.check_delivered("d-0")
    assert overlap.decode.scheduler.num_tokens_to_pull(third, 0) == NUM_TOKENS
