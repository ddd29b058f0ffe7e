"""What a mover says of memory that it cannot take."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Iterator

import pytest

from kvxferd.errors import Code
from kvxferd.ids import RegionId, SessionId
from kvxferd.memory import SealedMemory
from kvxferd.memory.fence import FencePage
from kvxferd.wire.limits import FENCE_PAGE_BYTES
from kvxferd.wire.mover import Bind, BindRefused, Bound, FenceMapped, FenceRefused, MapFence, UnmapFence
from kvxferd.wire.worker import RegionExport
from tests.support.mover_harness import Node
from tests.support.nodes.processes import lives

SIZE = 1 << 16
F_SEAL_FUTURE_WRITE = 0x10  # Python names it from 3.13 on


@pytest.fixture
def worker_fds() -> Iterator[tuple[int, int]]:
    """Its socket for deliveries and its pidfd: this process stands for the worker."""
    fd = os.pidfd_open(os.getpid())
    for_worker, for_mover = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with for_worker, for_mover:
        yield for_mover.fileno(), fd
    os.close(fd)


def export(size: int = SIZE, *, fd_index: int = 0, offset: int = 0, kind: str = "memfd") -> RegionExport:
    return RegionExport(
        region=RegionId("kv"), size_bytes=size, fd_index=fd_index, fd_offset=offset, kind=kind
    )


def maps_of(pid: int, name: str) -> int:
    with open(f"/proc/{pid}/maps") as lines:
        return sum(f"/memfd:{name} " in line for line in lines)


@pytest.mark.parametrize(
    ("region", "code"),
    [
        (export(2 * SIZE), Code.REGION_TOO_SMALL),
        (export(offset=mmap.PAGESIZE), Code.REGION_TOO_SMALL),
        (export(4096, offset=-1), Code.REGION_INVALID),
        (export(0), Code.REGION_INVALID),
        (export(fd_index=1), Code.REGION_INVALID),
        (export(fd_index=-1), Code.REGION_INVALID),
        (export(kind="cuda-ipc"), Code.REGION_INVALID),
    ],
)
async def test_regions_that_cannot_be_mapped(
    node: Node, worker_fds: tuple[int, int], region: RegionExport, code: Code
) -> None:
    mover = await node.acquire()
    with SealedMemory.create(SIZE, "kvxferd-binding") as memory:
        good = RegionExport(region=RegionId("other"), size_bytes=SIZE, fd_index=0)
        mover.send(Bind(regions=(good, region)), (memory.fd, *worker_fds))
        refused = await node.received(mover, BindRefused)
        assert refused.code is code
        assert "kv" in refused.message
        assert maps_of(mover.pid, "kvxferd-binding") == 0, "nothing stays mapped"
    assert lives(mover.pid)


async def test_a_bind_without_regions_or_without_a_worker(node: Node, worker_fds: tuple[int, int]) -> None:
    mover = await node.acquire()
    mover.send(Bind(regions=()), worker_fds)
    assert (await node.received(mover, BindRefused)).code is Code.REGION_INVALID
    mover.send(Bind(regions=(export(),)))
    assert (await node.received(mover, BindRefused)).code is Code.BAD_FRAME


async def test_several_regions_of_one_descriptor(node: Node, worker_fds: tuple[int, int]) -> None:
    mover = await node.acquire()
    with SealedMemory.create(3 * SIZE, "kvxferd-binding") as memory:
        regions = tuple(
            RegionExport(region=RegionId(f"r{n}"), size_bytes=SIZE, fd_index=0, fd_offset=n * SIZE)
            for n in range(3)
        )
        mover.send(Bind(regions=regions), (memory.fd, *worker_fds))
        bound = await node.received(mover, Bound)
        assert [(r.region, r.size_bytes, r.mem_type) for r in bound.regions] == [
            (f"r{n}", SIZE, "DRAM") for n in range(3)
        ]
        assert len({r.address for r in bound.regions}) == 3
        kept = [os.readlink(f"/proc/{mover.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{mover.pid}/fd")]
        assert not [name for name in kept if "memfd:kvxferd-binding" in name], (
            "descriptors are closed once mapped"
        )


async def test_a_fence_page_that_cannot_be_mapped_is_refused_and_the_mover_serves_others(node: Node) -> None:
    """Its owner may seal it against writing after the daemon has looked at it."""
    mover = await node.acquire()
    with SealedMemory.create(SIZE) as bad, SealedMemory.create(SIZE) as good:
        fcntl.fcntl(bad.fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
        mover.send(MapFence(session=SessionId(1), size_bytes=SIZE), (bad.fd,))
        refused = await node.received(mover, FenceRefused)
        assert (refused.session, refused.code) == (1, Code.REGION_INVALID)
        mover.send(MapFence(session=SessionId(1), size_bytes=SIZE), (good.fd,))
        assert (await node.received(mover, FenceMapped)).session == 1


async def test_a_session_that_is_over_costs_no_mapping_and_no_memory(node: Node) -> None:
    """Its page's address stays taken for ever; neighbours are one mapping."""
    mover = await node.acquire()

    async def serve_pages(first: int, count: int) -> None:
        """Sessions that come and go, eight at a time."""
        for number in range(first, first + count):
            page = FencePage.create()
            mover.send(MapFence(session=SessionId(number), size_bytes=FENCE_PAGE_BYTES), (page.fd,))
            await node.received(mover, FenceMapped)
            page.close()
            mover.send(UnmapFence(session=SessionId(number - 8)))

    await serve_pages(1, 50)
    before = num_mappings(mover.pid)
    await serve_pages(51, 400)
    assert num_mappings(mover.pid) - before < 40


def num_mappings(pid: int) -> int:
    with open(f"/proc/{pid}/maps") as lines:
        return sum(1 for _ in lines)
