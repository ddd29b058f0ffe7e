"""Whoever dies, the others notice, and nothing keeps memory that is not its own."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxferd.errors import Code, MoverError
from kvxferd.mover.backends import Backend
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.mover.ucx_settings import tls_with_cuda
from kvxferd.wire.mover import AbortPull, Bind, Bound, PullDone, ReadWay
from tests.support.mover_harness import (
    DEADLINE_S,
    MARK,
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


def has_exited(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


async def take_again(node: Node) -> MoverHandle:
    """Take a mover as a client registers: again, when it is told that the last one was lost."""
    async with asyncio.timeout(DEADLINE_S):
        while node.pool.decisions.library or node.pool.decisions.num_ready:  # noqa: ASYNC110
            await asyncio.sleep(0)  # the death of the old parent has not been noticed yet
        while True:
            try:
                return await node.pool.acquire()
            except MoverError:
                continue


async def test_a_dead_worker_takes_its_mover_with_it(node: Node, make_worker: Make) -> None:
    rank = make_worker("E")
    mover, _ = await bind(node, rank)
    rank.process.kill()
    await node.gone(mover)
    assert node.exits == [mover.mover_id]
    mover.send(AbortPull(pull=1))  # type: ignore[arg-type]
    mover.kill()


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
    ("environment", "parameters", "is_over"),
    [
        pytest.param({}, {}, True, id="as-logged"),
        pytest.param({"UCX_LOG_LEVEL": "warn"}, {}, False, id="not-logged"),
        pytest.param({"UCX_LOG_LEVEL": "warn", "UCX_TLS": tls_with_cuda("tcp")}, {}, True, id="by-setting"),
        pytest.param(
            {"UCX_TLS": tls_with_cuda("tcp")}, {"ucx_error_handling_mode": "peer"}, False, id="parameters"
        ),
    ],
)
async def test_a_killed_source_leaves_doubt_where_the_transports_are_not_known(
    read_way: str,
    environment: dict[str, str],
    parameters: dict[str, str],
    is_over: bool,
    connect: Connect,
) -> None:
    """The doubt is about what the reads write: the blocks, or a chunk, which is lost and reported."""
    backend = Backend("UCX", parameters)
    async with (
        Node("there", environment=environment, backend=backend) as there,
        Node("here", environment=environment, backend=backend, read_way=ReadWay(read_way)) as here,
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


async def test_movers_go_when_their_parent_is_killed_and_new_ones_come(make_worker: Make) -> None:
    async with Node("here") as node:
        rank = make_worker("E")
        mover, _ = await bind(node, rank)
        os.kill(parent_of(mover.pid), signal.SIGKILL)
        await node.gone(mover)
        again = await take_again(node)
        again.send(Bind(regions=rank.export()), rank.fds)
        await node.received(again, Bound)
        assert again.agent != mover.agent
        assert node.exits == [mover.mover_id]


DAEMON = """
import asyncio, sys
from tests.support.mover_harness import AwaitedPool

async def main():
    lock = open(sys.argv[1])
    import fcntl
    fcntl.flock(lock, fcntl.LOCK_EX)
    pool = AwaitedPool(boot="b", size=2, on_message=print, on_exit=print, lock_fd=lock.fileno())
    await pool.start()
    movers = [await pool.acquire() for _ in range(3)]
    print(*(m.pid for m in movers), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_daemon_leaves_nothing_and_its_lock_tells_when(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(lock)],
        stdout=subprocess.PIPE,
        env={**os.environ, "KVXFERD_TEST": MARK, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert daemon.stdout is not None
    pids = [int(word) for word in daemon.stdout.readline().split()]
    pidfds = [os.pidfd_open(pid) for pid in pids]
    shared_memory = Path(f"/dev/shm/kvxferd-movers-{parent_of(pids[0])}")
    with lock.open() as mine:
        with pytest.raises(BlockingIOError):
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        daemon.kill()
        daemon.wait()
        signal.alarm(int(DEADLINE_S))
        fcntl.flock(mine, fcntl.LOCK_EX)  # granted when the last mover and the parent are gone
        signal.alarm(0)
        assert all(has_exited(pidfd) for pidfd in pidfds)
        assert not shared_memory.exists()
    daemon.stdout.close()
    for pidfd in pidfds:
        os.close(pidfd)


async def test_a_home_that_cannot_be_read_is_no_obstacle(make_worker: Make) -> None:
    async with Node("here", environment={"HOME": "/nonexistent"}) as node:
        _, bound = await bind(node, make_worker("E"))
        assert bound.metadata
