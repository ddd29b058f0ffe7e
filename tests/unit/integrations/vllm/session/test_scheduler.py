"""Which tokens a prefill engine leaves to the decode engine, and who decides what becomes of a transfer."""

from __future__ import annotations

import pytest

from kvxferd.client import make_ref
from kvxferd.integrations.vllm.layout.facts import CacheGroup, CacheKind
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.session.request_params import params_for_decode
from kvxferd.integrations.vllm.session.scheduler import ConnectorScheduler
from tests.support.connector_harness import GROUPS, Blocks, Request, Status

STATES = CacheGroups((CacheGroup(0, CacheKind.STATE, 4),), 1)


@pytest.mark.parametrize(
    ("groups", "has_prompt_logprobs", "num_prefilled"),
    [
        (GROUPS, False, 3),
        (STATES, False, 2),
        # Each prompt token's log probability is in the prefill engine's answer alone.
        (STATES, True, 3),
    ],
)
def test_the_last_prompt_token_is_left_unless_its_log_probability_is_asked_for(
    groups: CacheGroups, has_prompt_logprobs: bool, num_prefilled: int
) -> None:
    tokens = [5, 6, 7]
    request = Request(
        "r",
        len(tokens),
        {"do_remote_decode": True},
        prompt_token_ids=list(tokens),
        has_prompt_logprobs=has_prompt_logprobs,
        _all_token_ids=list(tokens),
    )
    ConnectorScheduler(groups).request_added(request)
    assert request.num_prompt_tokens == num_prefilled
    assert request.prompt_token_ids == request._all_token_ids == tokens[:num_prefilled]


@pytest.mark.parametrize(
    ("status", "abandons"), [(Status.FINISHED_ABORTED, True), (Status.FINISHED_ERROR, False)]
)
def test_a_failed_load_leaves_the_transfer_and_an_abort_does_not(status: Status, abandons: bool) -> None:
    """vLLM ends a request whose load has failed before it reports the load as over."""
    ref = make_ref("tcp://10.0.0.1:9441", "e", "g1", "t")
    scheduler, request = ConnectorScheduler(GROUPS), Request("r", 8, params_for_decode(ref))
    scheduler.request_added(request)
    scheduler.blocks_allocated(request, Blocks(([1, 2],)), 8)
    assert scheduler.build_step_metadata().pulls
    request.status = status
    assert scheduler.request_ended(request, [[1, 2]]) == (False, None)
    step = scheduler.build_step_metadata()
    assert (step.cancels, step.abandons) == (["r"], [ref] if abandons else [])
