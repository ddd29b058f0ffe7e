"""Limits that are used up, and lines that the log lost."""

from __future__ import annotations

import re

from kvxferd.telemetry.warnings.limit_checks import (
    DROPPED_FOR_S,
    TURNED_AWAY_FOR_S,
    DroppedLines,
    LimitUse,
    NearLimits,
    TurnedAwayPeers,
)


def test_a_limit_is_named_from_nine_tenths_on_and_until_below_eight() -> None:
    limits = NearLimits()

    def messages(used: int) -> list[str]:
        return [f.message for f in limits.findings([LimitUse("limits.max_sessions", used, 100)])]

    assert messages(89) == []
    assert messages(90) == [
        "limits.max_sessions = 100 is nearly used up: 90, and what is beyond it is refused"
    ]
    assert "is used up" in messages(100)[0]
    assert messages(80)
    assert messages(79) == []
    assert messages(89) == []


def test_a_limit_of_none_is_never_used_up() -> None:
    assert NearLimits().findings([LimitUse("limits.staging_bytes", 0, 0)]) == []


def test_lost_lines_are_counted_since_they_began_and_end_after_a_minute() -> None:
    lines = DroppedLines(dropped=7)
    assert lines.findings(7, 0.0) == []
    assert "loses lines: 3 since" in lines.findings(10, 1.0)[0].message
    assert "loses lines: 5 since" in lines.findings(12, 20.0)[0].message
    assert lines.findings(12, 20.0 + DROPPED_FOR_S)
    assert lines.findings(12, 20.1 + DROPPED_FOR_S) == []
    assert "loses lines: 1 since" in lines.findings(13, 200.0)[0].message


def test_a_peer_that_is_turned_away_is_named_while_it_tries_again() -> None:
    peers = TurnedAwayPeers()
    assert peers.findings(0.0) == []
    peers.record("10.0.0.9", "its address is not in peer.allowed_addresses", 1.0)
    (finding,) = peers.findings(2.0)
    assert "10.0.0.9, its address is not in peer.allowed_addresses" in finding.message
    for setting in ("curve_allowed_keys", "curve_allowed_keys_file", "allowed_addresses"):
        assert re.search(rf"peer\.{setting}\b", finding.remedy)
    assert peers.findings(1.1 + TURNED_AWAY_FOR_S) == []
