"""Where a mover puts a GPU's memory: what the library proves to reach, and copies for the rest."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence

import pytest

from kvxferd.errors import Code, DeviceError, KvxferdError
from kvxferd.ids import AgentName, RegionId
from kvxferd.memory.device import DeviceMemory
from kvxferd.mover.process.binding import Bindings
from kvxferd.mover.transport import probe
from kvxferd.mover.transport.base import HOST, MemoryRange, ReadHandle, ReadKinds, TransportError
from kvxferd.mover.transport.staging import StagedTransport
from kvxferd.plan import Runs
from kvxferd.wire.mover import Bound, DevicePlacement
from kvxferd.wire.worker import RegionExport
from tests.support.devices import Segment
from tests.support.fake_driver import FAKE_DEVICES, GRANULARITY, WRITE_ORDER_VARIABLE, FakeDriver
from tests.support.memory_transport import Fabric, MemoryTransport

ME = AgentName("me")
UUID = FAKE_DEVICES[0].uuid
SIZES = (2 * GRANULARITY, GRANULARITY, 3 * GRANULARITY)


class Refusing(MemoryTransport):
    """Registers one allocation of a GPU and no other."""

    def register(self, span: MemoryRange) -> None:
        if span.size_bytes in SIZES and any(known.size_bytes in SIZES for known in self._spans):
            raise TransportError(f"cannot register {span.size_bytes} bytes: no dma-buf", settled=True)
        super().register(span)


class Lying(MemoryTransport):
    """Reads say that they are done, and bring nothing."""

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
        return super().post(agent, Runs(runs.local, runs.local, runs.length), kinds)


class OverTcp(MemoryTransport):
    """What is read also comes through a TCP connection to itself."""

    def __init__(self, fabric: Fabric, agent: AgentName) -> None:
        super().__init__(fabric, agent)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._sending = socket.create_connection(server.getsockname())
            self._receiving, _ = server.accept()

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
        for length in runs.length.tolist():
            for start in range(0, length, 16 << 10):  # as much as a socket buffers
                self._sending.sendall(piece := bytes(min(length - start, 16 << 10)))
                self._receiving.recv(len(piece), socket.MSG_WAITALL)
        return super().post(agent, runs, kinds)

    def close(self) -> None:
        super().close()
        self._sending.close()
        self._receiving.close()


class Worker:
    """A worker's GPU memory of several allocations, and a mover's bindings in the same process."""

    def __init__(self, transport: type[MemoryTransport]) -> None:
        self.worker, self.driver = FakeDriver(), FakeDriver()
        self.segment = Segment(self.worker, UUID, SIZES)
        self.content = os.urandom(sum(SIZES))
        self.segment.write(self.content)
        self.fabric = Fabric()
        self.inner = transport(self.fabric, ME)
        self.transport = StagedTransport(self.inner, slot_bytes=4096, num_slots=2)
        self.plain = self.driver.allocate_plain(UUID, GRANULARITY)

    def bind(self, device: str = UUID, sizes: Sequence[int] = SIZES, **options: DevicePlacement) -> Bound:
        """Bind all but the first and the last 100 bytes."""
        memory = DeviceMemory(self.segment.address, self.segment.size_bytes, self.worker)
        fds = [memory.export(stretch) for stretch in memory.allocations]
        export = RegionExport(
            region=RegionId("kv"),
            size_bytes=sum(SIZES) - 200,
            fd_offset=100,
            kind="vmm",
            device=device,
            pieces=tuple(sizes),
        )
        self.bindings = Bindings(self.transport, lambda: self.driver)
        try:
            return self.bindings.bind([export], fds, **options)
        finally:
            for fd in fds:
                os.close(fd)

    def bind_own(self) -> Bound:
        """As a resident mover binds what only its own process reaches."""
        export = RegionExport(
            region=RegionId("kv"),
            size_bytes=GRANULARITY,
            kind="resident",
            device=UUID,
            address=self.plain,
        )
        self.bindings = Bindings(self.transport, lambda: self.driver, own_regions=[export])
        return self.bindings.bind([export], [])

    @property
    def registered(self) -> list[int]:
        """Sizes of the GPU's allocations that the library knows."""
        return sorted(span.size_bytes for span in self.inner._spans if span.size_bytes in SIZES)

    def close(self) -> None:
        self.transport.close()
        self.bindings.close()
        assert not self.driver._mapped, "everything is unmapped"
        self.driver.free_plain(self.plain)
        self.segment.close()


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    """Over the transport that the test names."""
    made = Worker(getattr(request, "param", MemoryTransport))
    yield made
    made.close()


def test_what_is_proved_is_direct_an_allocation_at_a_time(worker: Worker) -> None:
    bound = worker.bind()
    assert (bound.placement.kind, bound.placement.why) == ("direct", "")
    assert bound.placement.gigabytes_per_s > 0
    assert worker.registered == sorted(SIZES)
    (region,) = bound.regions
    assert not region.staged
    assert region.pieces == ((1, SIZES[0] - 100), (1, SIZES[1]), (1, SIZES[2] - 100))
    assert worker.segment.read(sum(SIZES)) == worker.content, "nothing was written into it"


AUTO, DIRECT, STAGED = DevicePlacement.AUTO, DevicePlacement.DIRECT, DevicePlacement.STAGED


@pytest.mark.parametrize(
    ("worker", "asked", "kind", "why"),
    [
        (Refusing, AUTO, "staged", "no dma-buf"),
        (Lying, AUTO, "staged", "other than those that lie there"),
        (OverTcp, AUTO, "staged", "over TCP"),
        (OverTcp, DIRECT, "direct", ""),  # the operator wants it so
        (MemoryTransport, STAGED, "staged", "mover.placement is staged"),
    ],
    indirect=["worker"],
)
def test_what_is_not_proved_or_wanted_is_copied_and_says_why(
    worker: Worker, asked: DevicePlacement, kind: str, why: str
) -> None:
    bound = worker.bind(device_placement=asked)
    assert bound.placement.kind == kind
    assert why in bound.placement.why
    assert worker.registered == ([] if kind == "staged" else sorted(SIZES)), "readers reach what is there"
    assert bound.regions[0].staged == (kind == "staged")
    assert worker.segment.read(sum(SIZES)) == worker.content


def test_memory_under_a_read_that_does_not_end_stays_registered(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To deregister what the library still reads is to crash it."""
    monkeypatch.setattr(probe, "DEVICE_LIMIT_S", 0.05)
    worker.fabric.polls_per_read = 1
    worker.fabric.stalled.add(ME)
    bound = worker.bind()
    assert bound.placement.kind == "staged"
    assert "not ended after 0.05 s" in bound.placement.why
    # The probe's own landing is of the driver's smallest size for it, and stays too.
    assert set(SIZES) <= {span.size_bytes for span in worker.inner._spans}
    for address, (size, _) in tuple(worker.driver._mapped.items()):
        if size == probe.TIMED_BYTES:
            worker.driver.unmap(address, size)


@pytest.mark.parametrize("worker", [OverTcp], indirect=True)
def test_what_cannot_be_copied_for_want_of_memory_is_read_over_tcp(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = worker.driver.allocate_host

    def allocate_small(size_bytes: int) -> int:
        """As a node with no room for staging's buffers, but for a proof's samples."""
        if size_bytes > probe.SAMPLE_BYTES:
            raise DeviceError("cannot cuMemHostAlloc: out of memory")
        return allocate(size_bytes)

    monkeypatch.setattr(worker.driver, "allocate_host", allocate_small)
    bound = worker.bind()
    assert bound.placement.kind == "direct"
    assert bound.placement.why.endswith("it cannot be copied: cannot cuMemHostAlloc: out of memory")
    assert worker.registered == sorted(SIZES)


@pytest.mark.parametrize(
    ("worker", "kind"), [(MemoryTransport, "resident"), (Lying, "staged")], indirect=["worker"]
)
def test_memory_of_the_movers_own_process_is_resident_where_that_is_proved(worker: Worker, kind: str) -> None:
    bound = worker.bind_own()
    assert bound.placement.kind == kind
    assert bound.regions[0].staged == (kind == "staged")
    assert (bound.placement.gigabytes_per_s > 0) == (kind == "resident")
    assert bound.regions[0].address == worker.plain


@pytest.mark.parametrize(
    ("device", "sizes"),
    [
        (FAKE_DEVICES[1].uuid, SIZES),  # it is on the other
        ("GPU-elsewhere", SIZES),
        (UUID, (SIZES[0], SIZES[1], 2 * SIZES[2])),  # a lie
    ],
)
def test_what_is_not_as_it_was_said_binds_nothing(
    worker: Worker, device: str, sizes: tuple[int, ...]
) -> None:
    with pytest.raises(KvxferdError) as raised:
        worker.bind(device, sizes)
    assert raised.value.code in (Code.DEVICE_ERROR, Code.DEVICE_UNAVAILABLE, Code.REGION_INVALID)
    assert worker.registered == []
    assert not worker.driver._mapped
    assert not worker.driver._reserved


@pytest.mark.parametrize("method", ["create", "reserve", "map", "set_access"])
def test_a_driver_that_runs_out_in_the_probe_leaves_nothing(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The cache took nearly all of the GPU: there is no room for a landing, and copies need none."""
    real = getattr(worker.driver, method)

    def runs_out(*arguments: object) -> object:
        if probe.TIMED_BYTES in arguments:
            raise DeviceError(f"cannot {method}: out of memory")
        return real(*arguments)

    monkeypatch.setattr(worker.driver, method, runs_out)
    bound = worker.bind()
    assert bound.placement.kind == "staged"
    assert "out of memory" in bound.placement.why
    assert worker.registered == []
    driver = worker.driver
    assert sorted(size for size, _ in driver._mapped.values()) == sorted(SIZES)
    assert list(driver._reserved.values()) == [sum(SIZES)]
    assert not driver._handles
    assert len(driver._host) == 2, "the staging buffers, and no window"


# --- in which order a GPU sees what a network card writes


@pytest.mark.parametrize("how", ["bind", "bind_own"])
@pytest.mark.parametrize(
    ("order", "is_staged", "flushed"),
    [("native", False, {}), ("flush", False, {UUID: 1}), ("none", True, {})],
)
def test_a_gpu_is_flushed_where_it_asks_for_it_and_read_by_copies_where_it_neither_orders_nor_flushes(
    worker: Worker,
    how: str,
    order: str,
    is_staged: bool,
    flushed: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(WRITE_ORDER_VARIABLE, order)
    placement = getattr(worker, how)().placement
    assert (placement.kind == "staged") == is_staged
    assert ("GPU_DIRECT_RDMA_WRITES_ORDERING" in placement.why) == is_staged
    if (flush := worker.bindings.flush) is not None:
        flush()
    assert worker.driver.flushed == flushed
