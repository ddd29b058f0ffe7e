"""What a driver promises, over the fake one and over CUDA."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvxferd.errors import Code, DeviceError
from kvxferd.memory.device import DeviceMapping, DeviceMemory
from kvxferd.memory.driver import Driver, Rows, WriteOrder
from kvxferd.memory.driver_registry import open_driver
from tests.support.devices import (
    DRIVERS,
    HostBuffer,
    Segment,
    driver_or_skip,
    free_plain,
    read,
    used_bytes,
    write,
)
from tests.support.fake_driver import FAKE, FakeDriver
from tests.support.open_fds import num_open_fds
from tests.support.rows import SHAPES, SIZE_BYTES, addresses, copied


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """A driver whose first device is current."""
    made = driver_or_skip(request.param)
    with made.on(made.devices()[0].uuid):
        yield made


@pytest.fixture
def uuid(driver: Driver) -> str:
    return driver.devices()[0].uuid


@pytest.fixture
def unit(driver: Driver, uuid: str) -> int:
    return driver.granularity(uuid)


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def test_devices_are_named_by_uuid(driver: Driver) -> None:
    devices = driver.devices()
    assert len({device.uuid for device in devices}) == len(devices) > 0
    assert tuple(driver.device(device.uuid) for device in devices) == devices
    assert driver.describe()
    with pytest.raises(DeviceError) as raised:
        driver.device("GPU-nobody")
    assert raised.value.code is Code.DEVICE_UNAVAILABLE


def test_a_device_is_current_inside_on_and_no_longer(driver: Driver, uuid: str) -> None:
    def open_one(found: list[str]) -> None:
        with driver.on(uuid):
            driver.close_stream(driver.open_stream())
        with pytest.raises(DeviceError) as raised:
            driver.open_stream()
        found.append(raised.value.message)

    refusals: list[str] = []
    thread = threading.Thread(target=open_one, args=(refusals,))  # this one has a device current
    thread.start()
    thread.join()
    assert len(refusals) == 1


def test_the_allocations_under_a_range_are_found(driver: Driver, uuid: str, unit: int) -> None:
    with Segment(driver, uuid, [unit, 2 * unit, unit]) as segment:
        memory = DeviceMemory(segment.address + unit + 512, 2 * unit, driver)
        assert memory.device == uuid
        assert [(s.base - segment.address, s.size_bytes) for s in memory.allocations] == [
            (unit, 2 * unit),
            (3 * unit, unit),
        ]
        assert driver.allocation_range(segment.address).size_bytes == unit


def test_exported_memory_is_the_same_memory(driver: Driver, uuid: str, unit: int) -> None:
    sizes = [unit, 3 * unit, unit]
    with Segment(driver, uuid, sizes) as segment:
        memory = DeviceMemory(segment.address, segment.size_bytes, driver)
        fds = [memory.export(stretch) for stretch in memory.allocations]
        mapping = DeviceMapping.map(driver, uuid, list(zip(fds, sizes, strict=True)))
        for fd in fds:
            os.close(fd)
        base = mapping.allocations[0].address
        assert base != segment.address
        assert [(h.address - base, h.size_bytes) for h in mapping.allocations] == [
            (0, unit),
            (unit, 3 * unit),
            (4 * unit, unit),
        ]
        content = noise(5 * unit, 1)
        segment.write(content)
        assert read(driver, base, 5 * unit) == content
        write(driver, base + unit - 8, b"across a boundary")
        assert segment.read(17, unit - 8) == b"across a boundary"
        mapping.unmap()
        mapping.unmap()


def test_memory_lives_until_the_last_mapping_goes(driver: Driver, uuid: str, unit: int) -> None:
    before = used_bytes(driver, uuid)
    size = 32 * unit
    segment = Segment(driver, uuid, [size])
    segment.write(b"kept")
    memory = DeviceMemory(segment.address, size, driver)
    fd = memory.export(memory.allocations[0])
    mapping = DeviceMapping.map(driver, uuid, [(fd, size)])
    os.close(fd)
    segment.close()
    assert read(driver, mapping.allocations[0].address, 4) == b"kept"
    assert used_bytes(driver, uuid) >= before + size
    mapping.unmap()
    assert used_bytes(driver, uuid) < before + size


def test_what_does_not_fit_is_refused(driver: Driver, uuid: str, unit: int) -> None:
    total = next(device.total_bytes for device in driver.devices() if device.uuid == uuid)
    before = used_bytes(driver, uuid)
    with Segment(driver, uuid, [unit]), pytest.raises(DeviceError, match="out of memory"):
        driver.create(uuid, total // unit * unit)
    assert used_bytes(driver, uuid) <= before


def test_plain_memory_cannot_be_exported(driver: Driver, uuid: str, unit: int) -> None:
    address = driver.allocate_plain(uuid, unit)
    with pytest.raises(DeviceError) as raised:
        DeviceMemory(address, unit, driver)
    assert raised.value.code is Code.REGION_NOT_EXPORTABLE
    write(driver, address, b"plain")
    assert read(driver, address, 5) == b"plain"
    free_plain(driver, address)


def test_what_is_no_device_memory_is_refused(driver: Driver, uuid: str, unit: int) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    with pytest.raises(DeviceError):
        DeviceMapping.map(driver, uuid, [(null, unit)])
    os.close(null)
    with pytest.raises(DeviceError):
        driver.allocation_range(0x1000)


def test_a_size_that_is_a_lie_maps_nothing(driver: Driver, uuid: str, unit: int) -> None:
    with Segment(driver, uuid, [unit]) as segment:
        memory = DeviceMemory(segment.address, unit, driver)
        fd = memory.export(memory.allocations[0])
        before = num_open_fds()
        with pytest.raises(DeviceError):
            DeviceMapping.map(driver, uuid, [(fd, unit), (fd, 64 * unit)])
        assert num_open_fds() == before
        os.close(fd)


def test_copies_are_done_when_their_event_is(driver: Driver, uuid: str, unit: int) -> None:
    content = noise(unit, 2)
    with Segment(driver, uuid, [unit]) as segment, HostBuffer(driver, unit) as host:
        segment.write(content)
        stream = driver.open_stream()
        half = unit // 2
        # The halves change places.
        driver.copy(
            [host.address, host.address + half], [segment.address + half, segment.address], [half] * 2, stream
        )
        event = driver.record(stream)
        while not driver.is_done(event):
            os.sched_yield()
        driver.drop_event(event)
        driver.close_stream(stream)
        assert ctypes.string_at(host.address, unit) == content[half:] + content[:half]


@pytest.mark.parametrize(("rows", "pairs"), SHAPES)
@pytest.mark.parametrize(("to_host", "from_host"), [(False, False), (True, False), (False, True)])
def test_copies_of_rows_write_their_rows_and_nothing_else(
    driver: Driver,
    uuid: str,
    unit: int,
    rows: Rows,
    pairs: list[tuple[int, int]],
    to_host: bool,
    from_host: bool,
) -> None:
    before, content = noise(SIZE_BYTES, 3), noise(SIZE_BYTES, 4)
    size = -(-SIZE_BYTES // unit) * unit
    with ExitStack() as stack:
        target, origin = (
            stack.enter_context(HostBuffer(driver, size) if is_host else Segment(driver, uuid, [size]))
            for is_host in (to_host, from_host)
        )
        target.write(before)
        origin.write(content)
        stream = driver.open_stream()
        driver.copy_rows(
            addresses(target.address + to for to, _ in pairs),
            addresses(origin.address + source for _, source in pairs),
            rows,
            stream,
        )
        event = driver.record(stream)
        while not driver.is_done(event):
            os.sched_yield()
        driver.drop_event(event)
        driver.close_stream(stream)
        assert target.read(SIZE_BYTES) == copied(rows, pairs, content, before)


def test_copies_of_rows_and_others_run_in_order(driver: Driver, uuid: str, unit: int) -> None:
    """A scatter is over when an event behind its last copy is done, of whichever kind that is."""
    with Segment(driver, uuid, [unit]) as segment:
        segment.write(b"abc")
        stream = driver.open_stream()
        at = segment.address
        driver.copy_rows(addresses([at + 3]), addresses([at]), Rows(3), stream)
        driver.copy([at + 6], [at + 3], [3], stream)
        driver.copy_rows(addresses([at + 9]), addresses([at + 6]), Rows(3), stream)
        driver.copy_rows(addresses([]), addresses([]), Rows(3), stream)
        driver.synchronize(stream)
        driver.close_stream(stream)
        assert segment.read(12) == b"abcabcabcabc"


def test_the_environment_chooses_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("none", "metal", "pathlib:Metal"):
        with pytest.raises(DeviceError) as raised:
            open_driver(name)
        assert raised.value.code is Code.DEVICE_UNAVAILABLE
        assert name in raised.value.message
    assert isinstance(open_driver(FAKE), FakeDriver)
    assert open_driver(FAKE) is open_driver(FAKE)


def test_writes_of_network_cards_can_be_flushed_where_that_is_asked_for(driver: Driver) -> None:
    uuid = driver.devices()[0].uuid
    assert driver.write_order(uuid) in WriteOrder
    if driver.write_order(uuid) is WriteOrder.FLUSH:
        driver.flush_writes()
    with pytest.raises(DeviceError):
        driver.write_order("GPU-nowhere")
