"""Storms of small size: how many messages each peer and process sends is bounded."""

from __future__ import annotations

import pytest

from tests.property.simulation.scenarios import lost_node, restarted_daemon

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("is_killed", [True, False])
def test_peers_that_lose_a_prefill_node_send_a_bounded_number_of_messages(is_killed):
    few, many = (lost_node(1, peers, is_killed) for peers in (4, 12))
    for report in (few, many):  # for 60 s: a greeting a second, and what each of four pulls repeats
        assert report["away"]["per_node_max"] <= 250
        assert report["back"]["per_node_max"] <= 60
        assert report["back"]["last_at_s"] <= 30.0
    assert many["away"]["total"] <= 5 * few["away"]["total"]


def test_a_restarted_daemon_gets_a_bounded_number_of_messages():
    report = restarted_daemon(1, 8, num_sources=8)
    assert report["worker"]["per_node_max"] <= 30
    assert report["peer"]["per_node_max"] <= 60
