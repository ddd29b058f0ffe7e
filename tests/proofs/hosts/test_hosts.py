"""Daemons at different addresses: the cable comes out and goes in again, and addresses change hands."""

from __future__ import annotations

import time

import pytest

from tests.proofs.hosts.pair import NUM_BYTES, Pair

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(240)]


def test_bytes_go_over_the_cable_and_arrive_whole(pair: Pair) -> None:
    before = pair.cable.far.received_bytes()
    for _ in range(5):
        pair.deliver()
    assert pair.cable.far.received_bytes() - before >= 5 * NUM_BYTES


def test_a_cable_pulled_out_during_transfers_ends_them_in_time_and_put_in_again_works(pair: Pair) -> None:
    pair.deliver()
    for state_s in (0.2, 3.0):  # shorter and longer than the deadline
        pulls = [pair.pull(2.0) for _ in range(4)]
        pair.cable.near.link("down")
        time.sleep(state_s)  # nothing is told of a cable that is out
        pair.cable.near.link("up")
        for outcome in pair.outcomes(pulls, 8.0):
            assert outcome in ("delivered", "deadline", "transport", "released", "peer-unreachable")
        pair.deliver_again()


@pytest.mark.parametrize("losing", ["source", "sink"])
def test_one_way_loss_ends_pulls_in_time_and_heals(pair: Pair, losing: str) -> None:
    pair.deliver()
    near, far = pair.cable.near, pair.cable.far
    host, other = (near, far) if losing == "source" else (far, near)
    pulls = [pair.pull(2.0) for _ in range(3)]
    host.lose_what_is_sent_to(other)
    pulls.append(pair.pull(2.0))
    assert pair.outcomes(pulls, 8.0)[-1] != "delivered"
    host.find_again(other)
    pair.deliver_again()


def test_a_new_daemon_at_an_old_ones_address_is_not_taken_for_it(pair: Pair) -> None:
    pair.deliver()
    old = pair.publish()
    pair.replace_source()
    (outcome,) = pair.outcomes([pair.pull(5.0, old)], 10.0)
    assert outcome in ("generation-stale", "engine-unknown", "transfer-unknown", "released")
    pair.deliver_again()
