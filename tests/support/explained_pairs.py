"""Pairs of engines that are described by presets, and explained without a daemon."""

from __future__ import annotations

from kvxferd.explain.analysis import Explanation, explain_pair
from kvxferd.explain.engine_spec_parser import EngineDescription, parse_engine
from kvxferd.tooling.control_client import ControlClient


def described(text: str) -> EngineDescription:
    """Return an engine that needs no daemon."""

    def no_daemon() -> ControlClient:
        raise AssertionError("nothing here is live")

    return parse_engine(text, no_daemon)


def explained(prefill: str, decode: str) -> Explanation:
    """Return the explanation of a pair that is possible."""
    found = explain_pair(described(prefill), described(decode))
    assert not found.refused
    return found
