"""Blocks that a source's movers may pack: sent before a grant's reply, taken back after the last grant."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from kvxferd.core import gather_grants
from kvxferd.core.settings import Settings
from kvxferd.errors import Code
from kvxferd.ids import GrantId, Rank
from kvxferd.layout import areas, unpack_ids
from kvxferd.wire import peer
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Versions
from tests.support.simulation import IDS, SINK_IDS, TOKENS, World


@pytest.fixture
def world() -> World:
    world = World(settings=Settings(gathers=True))
    world.gathers = True
    return world


def pair(world: World, num_readers: int = 1):
    source = world.engine(world.host("p"), "prefill")[0]
    sinks = [world.engine(world.host(f"d{n}"), f"decode{n}", layout="NHD")[0] for n in range(num_readers)]
    source.fill(IDS, TOKENS, seed=1)
    return source, sinks, source.publish("t1", IDS, TOKENS, num_readers=num_readers)


def mover_of(world: World, worker):
    return next(m for host in world.hosts.values() for m in host.movers.values() if m.worker is worker)


def test_the_mover_has_exactly_the_transfers_blocks_while_it_is_read(world):
    source, (sink,), ref = pair(world)
    mover, reader = mover_of(world, source), mover_of(world, sink)
    assert not mover.granted
    reader.hold = True
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    ((word, message),) = mover.granted.items()
    assert word == bytes(source.fence[:16])
    assert {name: list(unpack_ids(b.ids)) for name, b in message.blocks.items()} == {"full": IDS}
    assert all(area.group == "full" for area in message.areas)
    (start,) = reader.started
    assert start.gathers == tuple(one.rank for one in start.sources)
    reader.hold = False
    reader.copy()
    reader.finish()
    assert isinstance(sink.ended(ticket), wk.Delivered)
    assert not mover.granted


def test_the_last_grant_takes_the_blocks_back(world):
    source, sinks, ref = pair(world, 2)
    mover = mover_of(world, source)
    readers = [mover_of(world, sink) for sink in sinks]
    for sink, reader in zip(sinks, readers, strict=True):
        reader.hold = True
        sink.pull(ref, SINK_IDS, TOKENS)
    assert len(mover.granted) == 1
    for left, reader in ((1, readers[0]), (0, readers[1])):
        reader.copy()
        reader.finish()
        assert len(mover.granted) == left


def test_a_peer_that_asks_and_releases_in_turn_has_the_blocks_sent_a_few_times(world):
    source, _, _ = pair(world)
    node = source.host.node
    (transfer,), rank = node.published.table.live.values(), node.sessions[source.session].rank
    packing = []
    for number in range(gather_grants.MAX_SENDS + 5):
        packing.append(node.published.gather_grants.grant(GrantId(f"g{number}"), transfer, [rank]))
        node.published.gather_grants.end(GrantId(f"g{number}"))
    assert [len(ranks) for ranks in packing] == [1] * gather_grants.MAX_SENDS + [0] * 5


def test_each_rank_has_its_areas_worked_out_once(world, monkeypatch):
    """That takes 15 ms for 2,048 tensors. Those of 64 layouts were kept, and a node has more ranks."""
    source, _, _ = pair(world)
    node = source.host.node
    (transfer,), rank = node.published.table.live.values(), node.sessions[source.session].rank
    ranks = [dataclasses.replace(rank, layout=copy.copy(rank.layout)) for _ in range(100)]
    num_calls = 0

    def counting(layout):
        nonlocal num_calls
        num_calls += 1
        return areas.block_areas(layout)

    monkeypatch.setattr(gather_grants, "block_areas", counting)
    for number, one in enumerate(2 * ranks):
        transfer.num_block_sends.clear()
        assert node.published.gather_grants.grant(GrantId(f"g{number}"), transfer, [one])
        node.published.gather_grants.end(GrantId(f"g{number}"))
    assert num_calls == len(ranks)


def test_a_release_takes_the_blocks_back(world):
    source, (sink,), ref = pair(world)
    mover_of(world, sink).hold = True
    sink.pull(ref, SINK_IDS, TOKENS)
    source.say(wk.Unpublish(transfer_id="t1"))
    assert not mover_of(world, source).granted
    assert [one.why for one in source.heard(wk.Released)] == [Code.UNPUBLISHED]


def test_a_mover_that_does_not_gather_is_sent_nothing():
    world = World(settings=Settings(gathers=True))
    source, (sink,), ref = pair(world)
    mover_of(world, sink).hold = True
    sink.pull(ref, SINK_IDS, TOKENS)
    assert not mover_of(world, source).granted
    assert not mover_of(world, sink).started[0].gathers


def test_no_blocks_are_sent_for_a_reader_that_has_not_said_that_it_gathers():
    """One of the last version cannot decode a reply that names ranks."""
    world = World()
    world.gathers = True
    source, (sink,), ref = pair(world)
    mover_of(world, sink).hold = True
    sink.pull(ref, SINK_IDS, TOKENS)
    assert not mover_of(world, source).granted
    assert not mover_of(world, sink).started[0].gathers


def test_of_the_ranks_that_a_source_names_those_that_are_read_are_kept(world):
    """It may name 4,096 in each grant, and has nothing charged for them."""
    source, (sink,), ref = pair(world)
    mover_of(world, sink).hold = True
    source.host.node.published.gather_grants.grant = lambda *_: tuple(Rank(0, n) for n in range(4096))
    sink.pull(ref, SINK_IDS, TOKENS)
    ((held,),) = (kept.values() for kept in sink.host.node.grant_client._held.values())
    assert len(held.granted.gathers) == len(held.plan.sources) == 1
    assert mover_of(world, sink).started[0].gathers == tuple(held.plan.sources)


def test_a_hello_of_the_last_version_does_not_gather():
    older = encode(peer.PeerHello(request=1, versions=Versions(1, 2), boot="b", endpoint="tcp://x:1"))
    assert b"gathers" not in older
    assert not PEER_MESSAGES.decode(older).gathers
    granted = peer.Granted(
        request=1,
        grant="g",
        blocks={},
        num_tokens=1,
        lease_s=1.0,
        fence_agent="a",
        fence_address=1,
        fence_word=b"",
        fence_metadata=b"",
    )
    assert b"gathers" not in encode(granted)


def test_a_dead_mover_is_sent_nothing_and_forgotten(world):
    source, (sink,), ref = pair(world)
    mover_of(world, sink).hold = True
    sink.pull(ref, SINK_IDS, TOKENS)
    mover = mover_of(world, source)
    mover.die()
    source.host.node.check_integrity()
    source.say(wk.Unpublish(transfer_id="t1"))
    assert mover.granted, "nothing reaches a dead mover"
    source.host.node.check_integrity()


def test_a_transfer_of_too_many_blocks_is_not_gathered(world, monkeypatch):
    monkeypatch.setattr(gather_grants, "MAX_BLOCKS", len(IDS) - 1)
    source, (sink,), ref = pair(world)
    mover_of(world, sink).hold = True
    sink.pull(ref, SINK_IDS, TOKENS)
    assert not mover_of(world, source).granted
    assert not mover_of(world, sink).started[0].gathers
