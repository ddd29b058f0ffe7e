"""docs/concepts.md defines each word once, and names settings, metrics and events that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvxferd import client
from kvxferd.config import SETTINGS
from kvxferd.telemetry.gauges import gauges_of
from tests.support.node_samples import node_snapshot

TEXT = (Path(__file__).parents[3] / "docs" / "concepts.md").read_text()
WORDS = (
    *("engine", "rank", "worker", "region", "cache tensor", "group", "block", "layout", "manifest"),
    *("plan", "run", "transfer", "publish", "pull", "lease", "grant", "fence word", "generation"),
    *("incarnation", "home and member", "mover", "forkserver", "staging", "covering read"),
    *("quarantine", "quiesce", "suspend", "drain", "progressive pull"),
    *("ticket", "prepared grant", "tombstone", "delivery socket", "peer", "registry of remote engines"),
)


def test_each_word_is_defined_once() -> None:
    defined = [word.lower() for word in re.findall(r"^\*\*([^*]+)\.\*\*", TEXT, re.MULTILINE)]
    assert sorted(defined) == sorted(WORDS)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:transfer|drain|worker|peer)\.\w+)`", TEXT))))
def test_a_setting_is_there(name: str) -> None:
    assert name in SETTINGS


def test_metrics_and_events_are_there() -> None:
    metrics = set(re.findall(r"`(kvxferd_\w+)`", TEXT))
    assert metrics <= {family.name for family in gauges_of(node_snapshot())}
    events = set(re.findall(r"`([A-Z][a-z]+)`", TEXT))
    assert events
    assert all(hasattr(client, name) for name in events)
