"""What the connector's settings may be, and its figures."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from kvxferd.errors import Code, EngineError
from kvxferd.integrations.vllm.options import read_options
from kvxferd.integrations.vllm.session import stats

ROOT = Path(__file__).parents[4]
OF_VLLM_0_33 = {"msgspec", "numpy", "pyzmq", "torch"}  # from its metadata; it names no nixl


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"sockett": "/run/x"}, "sockett"),
        ({"socket": 7}, "socket"),
        ({"pull_deadline_s": 0}, "pull_deadline_s"),
        ({"lease_s": float("inf")}, "lease_s"),
        ({"connect_timeout_s": "soon"}, "connect_timeout_s"),
        ({"num_readers": 0}, "num_readers"),
        ({"progressive_requests": 0}, "progressive_requests"),
        ({"progressive_blocks": 1.5}, "progressive_blocks"),
        ({"progressive_blocks": float("nan")}, "progressive_blocks"),
        ({"kv_cache_layout": "HND"}, "kv_cache_layout"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineError, match=named) as caught:
        read_options(given)
    assert caught.value.code is Code.CONFIG_INVALID


@pytest.mark.parametrize(
    ("given", "of_heads", "of_latents"),
    [
        ({}, "LBHNC", None),
        ({"kv_cache_layout": "auto"}, "LBHNC", None),
        ({"kv_cache_layout": "BLHNC"}, "BLHNC", "BLHNC"),  # named: asked for, latents too
        ({"kv_cache_layout": "engine"}, None, None),
    ],
)
def test_which_layout_is_asked_of_vllm(
    given: dict[str, Any], of_heads: str | None, of_latents: str | None
) -> None:
    options = read_options(given)
    assert options.preferred_layout(has_latents=False) == of_heads
    assert options.preferred_layout(has_latents=True) == of_latents


def test_intervals_of_several_ranks_add_up() -> None:
    first, second = stats.ConnectorStats(), stats.ConnectorStats()
    first.record_pull(0.010, 0.004, 1 << 20, 3)
    first.record_failed_pull(Code.DEADLINE)
    second.record_pull(0.030, 0.009, 3 << 20, 5)
    second.record_failed_pull(Code.DEADLINE)
    total = first.collect()
    more = second.collect()
    assert total is not None
    assert more is not None
    stats.add(total, more)
    assert total["pulls_failed"] == {"deadline": 2}
    assert stats.summary(total) == {
        "Num pulls": 2,
        "Median pull (ms)": 30.0,
        "Slowest pull (ms)": 30.0,
        "MiB per pull": 2.0,
        "Num failed pulls": 2,
        "Num failed publishes": 0,
        "Num released unread": 0,
    }
    assert first.collect() is None, "an interval in which nothing happened is not reported"


def test_a_cache_in_host_memory_asks_for_nothing_that_vllm_lacks() -> None:
    """Of what the extra `engine` brings into vLLM's environment with the base."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    assert {Requirement(line).name for line in lines} <= OF_VLLM_0_33
