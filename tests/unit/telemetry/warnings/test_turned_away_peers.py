"""Peers that are turned away are named for a minute, with the settings that would admit them."""

from __future__ import annotations

import re

from kvxferd.telemetry.warnings.turned_away_peers import TURNED_AWAY_FOR_S, TurnedAwayPeers


def test_a_peer_that_is_turned_away_is_named_while_it_tries_again() -> None:
    peers = TurnedAwayPeers()
    assert peers.findings(0.0) == []
    peers.record("10.0.0.9", "its address is not in peer.allowed_addresses", 1.0)
    (finding,) = peers.findings(2.0)
    assert "10.0.0.9, its address is not in peer.allowed_addresses" in finding.message
    for setting in ("curve_allowed_keys", "curve_allowed_keys_file", "allowed_addresses"):
        assert re.search(rf"peer\.{setting}\b", finding.remedy)
    assert peers.findings(1.1 + TURNED_AWAY_FOR_S) == []
