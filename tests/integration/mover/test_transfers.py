"""Bytes move between movers of two nodes, over CMA and over TCP, and the fence decides."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvxferd.errors import Code
from kvxferd.ids import SessionId
from kvxferd.memory import FencePage
from kvxferd.wire.limits import FENCE_PAGE_BYTES
from kvxferd.wire.mover import FenceMapped, LoadRemote, MapFence, SetPolling, UnmapFence
from tests.support.mover_harness import WORD, Connect, Node, Served, Worker, serve, sink

Make = Callable[..., Worker]


async def test_a_word_that_changed_is_no_delivery(pair: tuple[Node, Node], connect: Connect) -> None:
    there, here = pair
    source, reader = await connect(there, here)
    source.page.write(1, WORD)
    source.page.overwrite(0)
    outcome = await reader.read(source, range(4), range(4))
    assert (outcome.delivered, outcome.finished, outcome.code) == (False, True, Code.RELEASED)
    assert outcome.agent == source.mover.agent
    outcome = await reader.outcome(reader.start([source], source.place(1, WORD), range(4), range(4)))
    assert outcome.delivered


async def test_nothing_to_read_is_delivered_without_a_fence(node: Node, connect: Connect) -> None:
    source, reader = await connect(node, node)
    outcome = await reader.outcome(reader.start([source], source.place(0, WORD), [], []))
    assert (outcome.delivered, outcome.started, outcome.bytes, outcome.runs) == (True, False, 0, 0)


async def test_a_second_fence_page_reaches_readers_that_know_the_agent(
    pair: tuple[Node, Node], connect: Connect
) -> None:
    there, here = pair
    source, reader = await connect(there, here)
    assert (await reader.read(source, range(2), range(2))).delivered
    page = FencePage.create()
    page.write(9, WORD)
    source.mover.send(MapFence(session=SessionId(2), size_bytes=FENCE_PAGE_BYTES), (page.fd,))
    fence = await there.received(source.mover, FenceMapped)
    second = Served(source.worker, there, source.mover, source.bound, page, fence)
    unknown = await reader.outcome(reader.start([source], second.place(9, WORD), range(2), range(2)))
    assert (unknown.delivered, unknown.finished, unknown.code) == (False, True, Code.TRANSPORT)
    reader.know(source.mover.agent, fence.metadata)
    assert (await reader.outcome(reader.start([source], second.place(9, WORD), range(2), range(2)))).delivered
    second.close()


async def test_a_fence_page_that_is_gone_releases_and_harms_nobody(
    pair: tuple[Node, Node], connect: Connect
) -> None:
    there, here = pair
    source, reader = await connect(there, here)
    source.mover.send(UnmapFence(session=SessionId(1)))
    source.mover.send(MapFence(session=SessionId(2), size_bytes=FENCE_PAGE_BYTES), (source.page.fd,))
    fence = await there.received(source.mover, FenceMapped)
    assert fence.address != source.fence.address, "an address is never used twice"
    outcome = await reader.read(source, range(2), range(2))
    assert (outcome.delivered, outcome.finished) == (False, True)
    assert outcome.code in (Code.RELEASED, Code.TRANSPORT)
    again = Served(source.worker, there, source.mover, source.bound, source.page, fence)
    reader.know(source.mover.agent, fence.metadata)
    assert (await reader.outcome(reader.start([source], again.place(0, WORD), range(2), range(2)))).delivered


async def test_a_list_longer_than_a_frame(node: Node, make_worker: Make) -> None:
    """Half a million ids of one token each travel in parts."""
    num = 300_000
    shape = {"blocks": num, "block_tokens": 1, "head_dim": 4, "layers": 1}
    ours, theirs = make_worker("D", **shape), make_worker("P", **shape)
    theirs.fill(3)
    source = await serve(node, theirs)
    reader = await sink(node, ours, [source])
    source.page.write(0, WORD)
    outcome = await reader.outcome(
        reader.start([source], source.place(0, WORD), range(num), range(num), tokens=num)
    )
    assert outcome.delivered, outcome
    assert np.array_equal(ours.array, theirs.array)
    source.close()


async def test_a_source_that_rests_is_read_once_it_attends(node: Node, connect: Connect) -> None:
    source, reader = await connect(node, node)
    source.mover.send(SetPolling(on=False))
    number = reader.start([source], source.place(0, WORD), range(4), range(4))
    source.mover.send(SetPolling(on=True))
    assert (await reader.outcome(number)).delivered


async def test_a_pull_after_a_warmup_reads_what_is_there(pair: tuple[Node, Node], connect: Connect) -> None:
    source, reader = await connect(*pair)
    source.worker.fill(1)
    agent, word = source.mover.agent, source.bound.regions[0].address
    reader.mover.send(LoadRemote(agent=agent, metadata=source.bound.metadata, word=word))
    assert (await reader.read(source, [1, 2], [3, 4])).delivered
    assert (reader.worker.blocks([1, 2]) == source.worker.blocks([3, 4])).all()
