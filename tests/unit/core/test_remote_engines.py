"""A local rank's registry in a running node: two homes of one id, restarts, expiry, what a hold keeps."""

from __future__ import annotations

import pytest

from kvxferd.core import Settings
from kvxferd.core.snapshot import TopologyRecord
from kvxferd.wire import worker as wk
from tests.support.simulation import World

IDS, TOKENS = [3, 1, 2], 11


@pytest.fixture
def world() -> World:
    return World(settings=Settings(max_hold_s=60.0))


def test_two_homes_that_name_one_engine_id_neither_refuse_nor_evict_each_other(world):
    """Their blocks have 4 and 8 tokens: 11 tokens are 3 blocks of the one and 2 of the other."""
    sources = [
        (world.engine(world.host("p"), "prefill")[0], IDS),
        (world.engine(world.host("q"), "prefill", block_tokens=8)[0], IDS[:2]),
    ]
    (sink,) = world.engine(world.host("d"), "decode")
    for turn in range(2):
        for number, (source, ids) in enumerate(sources):
            source.fill(ids, TOKENS, seed=number)
            ticket = sink.pull(source.publish(f"t{turn}-{number}", ids, TOKENS), IDS, TOKENS)
            assert isinstance(sink.ended(ticket), wk.Delivered), sink.ended(ticket)
            assert sink.num_wrong(IDS, TOKENS, seed=number) == 0
    topology = sink.host.node.sessions[sink.session].rank.topology
    homes = [source.host.endpoint for source, _ in sources]
    assert [(e.engine_id, e.home) for e in topology.engines()] == [("prefill", home) for home in homes]
    sizes = [topology.get_engine_info("prefill", home=home).remote_block_size for home in homes]
    assert sizes == [4, 8]
    assert topology.find("prefill").home == homes[1]  # the last used
    assert len([r for r in sink.host.records if isinstance(r, TopologyRecord)]) == 2  # none is planned again
