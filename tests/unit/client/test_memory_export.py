"""What a rank's memory becomes on its way to the daemon: GPU memory, over the fake driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxferd.client.memory_export import export_memory
from kvxferd.errors import Code, DeviceError, EngineError
from kvxferd.ids import RegionId
from kvxferd.layout import RankLayout, RegionSpec
from kvxferd.memory import MemoryPlacement, SealedMemory, SharedMemory
from kvxferd.memory.device import DeviceMemory, ResidentMemory
from kvxferd.memory.validate import check_exports
from kvxferd.wire.worker import RegionExport
from tests.support.devices import Segment
from tests.support.fake_driver import FAKE_DEVICES, GRANULARITY, FakeDriver
from tests.support.open_fds import num_open_fds

UNIT = GRANULARITY
UUID = FAKE_DEVICES[0].uuid


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def segment(driver: FakeDriver) -> Iterator[Segment]:
    with Segment(driver, UUID, [2 * UNIT, 2 * UNIT, UNIT]) as made:
        yield made


@pytest.fixture
def host() -> Iterator[SealedMemory]:
    with SealedMemory.create(UNIT) as made:
        yield made


def layout_of(**sizes: int) -> RankLayout:
    regions = tuple(RegionSpec(RegionId(name), size) for name, size in sizes.items())
    return RankLayout(0, 1, groups=(), tensors=(), regions=regions)


def at(memory: SealedMemory, offset: int) -> SharedMemory:
    """What lies there."""
    return SharedMemory(memory, offset, 4096, MemoryPlacement.MEMFD, {})


def memory_of(segment: Segment, offset: int, size: int) -> DeviceMemory:
    return DeviceMemory(segment.address + offset, size, segment.driver)


def test_regions_share_the_allocations_that_they_share(segment: Segment) -> None:
    """Two tensors in one segment: the second begins in the allocation in which the first ends."""
    first, second = memory_of(segment, 512, 2 * UNIT), memory_of(segment, 3 * UNIT, 2 * UNIT)
    exports = export_memory(layout_of(a=2 * UNIT, b=2 * UNIT), {RegionId("a"): first, RegionId("b"): second})
    assert exports.regions == (
        RegionExport(RegionId("a"), 2 * UNIT, 0, 512, "vmm", UUID, (2 * UNIT, 2 * UNIT)),
        RegionExport(RegionId("b"), 2 * UNIT, 1, UNIT, "vmm", UUID, (2 * UNIT, UNIT)),
    )
    assert len(exports.fds) == 3
    assert exports.placement == "child"
    check_exports(exports.regions, exports.fds)
    exports.close()


def test_host_and_gpu_memory_together_and_their_descriptors_are_closed_again(
    segment: Segment, host: SealedMemory
) -> None:
    before = num_open_fds()
    shared = SharedMemory(memory_of(segment, 0, 5 * UNIT), 100, UNIT, MemoryPlacement.EXPORTED, {})
    exports = export_memory(layout_of(gpu=UNIT, host=UNIT), {"gpu": shared, "host": host})
    gpu, memfd = exports.regions
    assert (memfd.kind, memfd.fd_index) == ("memfd", 0)
    assert (gpu.fd_index, gpu.fd_offset, gpu.pieces) == (1, 100, (2 * UNIT,)), "no more than is needed"
    exports.close()
    assert num_open_fds() == before


def test_regions_of_one_memory_share_a_descriptor(host: SealedMemory) -> None:
    shared = {RegionId("b"): at(host, 4096), RegionId("a"): host}
    exports = export_memory(layout_of(a=4096, b=8192), shared)
    assert [(r.region, r.fd_index, r.fd_offset) for r in exports.regions] == [("a", 0, 0), ("b", 0, 4096)]
    assert len(exports.fds) == 1
    exports.close()


@pytest.mark.parametrize(
    ("offsets", "code", "words"),
    [
        ({}, Code.REGION_INVALID, "no memory given for regions"),  # forgotten
        ({"a": 0, "x": 0}, Code.REGION_INVALID, "has no regions"),  # one too many
        ({"a": UNIT}, Code.REGION_TOO_SMALL, f"bytes {UNIT} to"),  # does not fit behind its offset
        ({"a": -1}, Code.REGION_INVALID, "give 0 or more"),
    ],
)
def test_regions_that_cannot_be_exported(
    host: SealedMemory, offsets: dict[str, int], code: Code, words: str
) -> None:
    with pytest.raises(EngineError, match=words) as refused:
        export_memory(layout_of(a=UNIT), {name: at(host, offset) for name, offset in offsets.items()})
    assert refused.value.code is code


def test_a_region_without_memory_is_refused_by_its_name() -> None:
    with pytest.raises(EngineError, match="region 'a' of None") as refused:
        export_memory(layout_of(a=UNIT), {"a": None})  # type: ignore[dict-item]
    assert refused.value.code is Code.REGION_INVALID


def test_plain_memory_leads_to_a_resident_mover(driver: FakeDriver) -> None:
    address = driver.allocate_plain(UUID, UNIT)
    with pytest.raises(DeviceError) as raised:
        DeviceMemory(address, UNIT, driver)
    assert raised.value.code is Code.REGION_NOT_EXPORTABLE
    exports = export_memory(layout_of(a=100), {RegionId("a"): ResidentMemory(address, UNIT, UUID)})
    assert exports.regions == (
        RegionExport(RegionId("a"), 100, kind="resident", device=UUID, address=address),
    )
    assert (exports.fds, exports.placement) == ((), "resident")
    driver.free_plain(address)


@pytest.mark.parametrize(
    "wrong",
    [
        RegionExport(RegionId("a"), 100, 0, 0, "vmm", UUID, ()),  # no allocation
        RegionExport(RegionId("a"), 100, 0, 0, "vmm", "", (UNIT,)),  # no device
        RegionExport(RegionId("a"), 100, 0, UNIT, "vmm", UUID, (UNIT, UNIT)),  # starts behind the first
        RegionExport(RegionId("a"), 100, 0, 0, "vmm", UUID, (UNIT, UNIT)),  # the second is not needed
        RegionExport(RegionId("a"), 3 * UNIT, 0, 0, "vmm", UUID, (UNIT, UNIT)),  # too few
        RegionExport(RegionId("a"), UNIT, 0, 1, "vmm", UUID, (UNIT,)),  # ends behind the last
        RegionExport(RegionId("a"), 100, 0, 0, "vmm", UUID, (UNIT, -UNIT, UNIT)),
        RegionExport(RegionId("a"), 100, 1, 0, "vmm", UUID, (UNIT, UNIT)),  # three descriptors, two came
        RegionExport(RegionId("a"), 100, 0, 0, "resident", UUID),  # no address
        RegionExport(RegionId("a"), 100, 0, 0, "cuda-ipc", UUID),
    ],
)
def test_a_daemon_refuses_places_that_cannot_be(wrong: RegionExport) -> None:
    with pytest.raises(EngineError) as raised:
        check_exports([wrong], [10, 11])
    assert raised.value.code is Code.REGION_INVALID
    assert "region a" in raised.value.message
