"""Storms of small size: how many messages each peer's daemon sends and gets is bounded."""

from __future__ import annotations

import pytest

from tests.simulation.storms import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", ["killed", "cut-off", "restarted"])
def test_peers_of_a_node_that_fails_send_a_bounded_number_of_messages(how):
    few, many = (run(how, peers) for peers in (3, 9))
    for report in (few, many):  # in 30 s and more: pulls of each peer five times a second, and their retries
        assert report["back"]["most_of_a_peer"] <= 120
        assert report.get("away", {}).get("most_of_a_peer", 0) <= 60
    assert many["back"]["messages"] <= 4 * few["back"]["messages"]
