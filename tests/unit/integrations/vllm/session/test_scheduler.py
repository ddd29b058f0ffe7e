"""Which tokens a prefill engine leaves to the decode engine."""

from __future__ import annotations

import pytest

from kvxferd.integrations.vllm.layout.facts import CacheGroup, CacheKind
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.session.scheduler import ConnectorScheduler
from tests.support.connector_harness import GROUPS, Request

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
