"""Daemons at different addresses: the cable comes out and goes in again, and addresses change hands."""

from __future__ import annotations

import pytest

from tests.support.namespace_pair import FACTS, MAX_TOKENS, Pair

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(240)]

BYTES_PER_TOKEN = 4 * 2 * FACTS["num_kv_heads"] * FACTS["head_dim"] * 2


def read_some(pair: Pair, num: int, deadline_s: float):
    """Publish and pull that many at once."""
    return [pair.read(pair.publish(), deadline_s) for _ in range(num)]


def test_bytes_go_over_the_cable_and_arrive_whole(pair: Pair):
    before = pair.cable.far.received_bytes()
    num_tokens = 0
    for _ in range(5):
        transfer = pair.publish()
        num_tokens += transfer.num_tokens
        assert pair.await_end(pair.read(transfer, 20.0), 25.0) == ["delivered"]
    assert pair.cable.far.received_bytes() - before >= num_tokens * BYTES_PER_TOKEN


def test_a_cable_pulled_out_during_transfers_ends_them_in_time_and_put_in_again_works(pair: Pair):
    pair.deliver()
    for state_s in (0.2, 3.0):  # shorter and longer than the deadline
        reads = read_some(pair, 4, 2.0)
        pair.cable.near.link("down")
        pair.fleet.pump(state_s)
        pair.cable.near.link("up")
        for read in reads:
            (outcome,) = pair.await_end(read, 8.0)
            assert outcome in ("delivered", "deadline", "transport", "released", "peer-unreachable")
        pair.deliver_again()
    assert pair.tally.wrong_items == 0


@pytest.mark.parametrize("losing", ["source", "sink"])
def test_one_way_loss_ends_pulls_in_time_and_heals(pair: Pair, losing):
    pair.deliver()
    near, far = pair.cable.near, pair.cable.far
    host, other = (near, far) if losing == "source" else (far, near)
    reads = read_some(pair, 3, 2.0)
    host.lose_what_is_sent_to(other)
    reads += read_some(pair, 1, 2.0)
    for read in reads:
        pair.await_end(read, 8.0)
    assert "delivered" not in reads[-1].outcomes
    host.find_again(other)
    pair.deliver_again()
    assert pair.tally.wrong_items == 0


def test_a_new_daemon_at_an_old_ones_address_is_not_taken_for_it(pair: Pair):
    pair.deliver()
    old = pair.publish()
    pair.replace_daemon(0, "successor")
    (outcome,) = pair.await_end(pair.read(old, 5.0), 10.0)
    assert outcome in ("generation-stale", "engine-unknown", "transfer-unknown", "released")
    pair.deliver_again()
    assert pair.tally.wrong_items == 0


def test_bytes_of_a_short_transfer_are_enough_to_see_the_cable():
    assert BYTES_PER_TOKEN * MAX_TOKENS == 4 << 20
