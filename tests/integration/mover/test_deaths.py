"""Whoever dies, the others notice, and nothing keeps memory that is not its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from kvxferd.errors import Code
from kvxferd.wire.mover import AbortPull, PullDone, ReadWay
from tests.support.mover_harness import (
    DEADLINE_S,
    WORD,
    Connect,
    Node,
    Pools,
    Worker,
    bind,
    serve,
    sink,
)

Make = Callable[..., Worker]


@pytest.fixture(params=["direct", "covering"])
def read_way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_mover_dies_with_its_worker_in_the_middle_of_a_read(
    read_way: str, pair: tuple[Node, Node], make_worker: Make
) -> None:
    there, here = pair
    shape = {"blocks": 8192, "head_dim": 256, "layers": 4}  # 1 GiB
    ours = make_worker("D", **shape)
    source = await serve(there, make_worker("P", **shape))
    source.worker.array[:4096] = 9
    reader = await sink(here, ours, [source])
    reader.start([source], source.place(0, WORD), range(8192), range(8192))
    async with asyncio.timeout(DEADLINE_S):
        while ours.array[0] != 9:  # noqa: ASYNC110
            await asyncio.sleep(0)
    ours.process.kill()
    await here.gone(reader.mover)
    assert [m for _, m in here.said if isinstance(m, PullDone)] == []
    source.close()


async def test_a_killed_mover_is_told_once_and_its_readers_fail(
    read_way: str, pair: tuple[Node, Node], connect: Connect
) -> None:
    there, here = pair
    shape = {"blocks": 4096, "head_dim": 256, "layers": 4}
    source, reader = await connect(there, here, **shape)
    assert (await reader.read(source, [0], [0])).delivered
    number = reader.start([source], source.place(0, WORD), range(4096), range(4096))
    source.mover.kill()
    source.mover.kill()
    await there.gone(source.mover)
    outcome = await reader.outcome(number)
    assert (outcome.delivered, outcome.finished, outcome.code) == (False, True, Code.TRANSPORT)
    assert outcome.agent == source.mover.agent
    # The reader lives on, and a source that replaces the dead one is read by it.
    again = await serve(there, source.worker)
    again.page.write(0, WORD)
    reader.know(again.mover.agent, again.bound.metadata, again.fence.metadata)
    assert (await reader.outcome(reader.start([again], again.place(0, WORD), [0], [0]))).delivered
    assert there.exits == [source.mover.mover_id]
    again.close()


@pytest.mark.parametrize(
    ("environment", "is_over"),
    [pytest.param({}, True, id="as-logged"), pytest.param({"UCX_LOG_LEVEL": "warn"}, False, id="not-logged")],
)
async def test_a_killed_source_leaves_doubt_where_the_transports_are_not_known(
    read_way: str, environment: dict[str, str], is_over: bool, connect: Connect
) -> None:
    """The doubt is about what the reads write: the blocks, or a chunk, which is lost and reported.

    What a setting or a parameter proves: `test_transport_contract`.
    """
    async with (
        Node("there", environment=environment) as there,
        Node("here", environment=environment, read_way=ReadWay(read_way)) as here,
    ):
        shape = {"blocks": 4096, "head_dim": 256, "layers": 4}
        source, reader = await connect(there, here, **shape)
        assert (await reader.read(source, [0], [0])).delivered
        number = reader.start([source], source.place(0, WORD), range(4096), range(4096))
        await asyncio.sleep(0)
        source.mover.kill()
        await there.gone(source.mover)
        outcome = await reader.outcome(number)
        assert (outcome.delivered, outcome.code) == (False, Code.TRANSPORT)
        # A pull that waits for a chunk for long reads the rest directly.
        is_covered = outcome.covered_bytes == outcome.bytes
        is_finished = is_over or is_covered
        assert (outcome.finished, outcome.quiesced_follows) == (is_finished, is_finished)
        if read_way == "covering":
            reports, sink_mover = here.chunk_reports, reader.mover.mover_id
            if not is_over:
                await here.until(lambda: reports[sink_mover].num_lost or None)
            assert (reports[sink_mover].num_lost > 0) == (not is_over)


async def test_an_aborted_pull_waits_for_a_stopped_source_only_where_it_writes_the_blocks(
    read_way: str, pools: Pools, connect: Connect
) -> None:
    """Over TCP the source's process sends the bytes. What it could still send into the blocks counts.

    A covering pull reads into chunks alone, also while its source is late.
    """
    there = await pools.node("there", "tcp", read_way)
    shape = {"blocks": 2048, "head_dim": 256, "layers": 4}
    source, reader = await connect(there, there, **shape)
    assert (await reader.read(source, [0], [0])).delivered
    os.kill(source.mover.pid, signal.SIGSTOP)
    try:
        number = reader.start([source], source.place(0, WORD), range(2048), range(2048))
        follower = reader.start([source], source.place(0, WORD), [0], [0])
        with pytest.raises(TimeoutError):
            await there.received(reader.mover, PullDone, 0.2)
        reader.mover.send(AbortPull(pull=number))
        if read_way == "covering":
            outcomes = {number: await reader.outcome(number)}
        else:
            outcomes = {}
            with pytest.raises(TimeoutError):
                await there.received(reader.mover, PullDone, 0.3)
    finally:
        os.kill(source.mover.pid, signal.SIGCONT)
    done = [await there.received(reader.mover, PullDone) for _ in range(2 - len(outcomes))]
    outcomes |= {d.pull: d.outcome for d in done}
    assert (outcomes[number].code, outcomes[number].finished) == (Code.CANCELLED, True)
    assert outcomes[follower].delivered


async def test_a_home_that_cannot_be_read_is_no_obstacle(make_worker: Make) -> None:
    async with Node("here", environment={"HOME": "/nonexistent"}) as node:
        _, bound = await bind(node, make_worker("E"))
        assert bound.metadata
