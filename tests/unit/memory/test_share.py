"""Tensors become memory to register: each placement, why others were passed over, and who frees what."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from kvxferd.client.memory_export import export_memory
from kvxferd.client.registration import _STILL_IN_USE, RankRole, Registration
from kvxferd.errors import Code, EngineError, LayoutError
from kvxferd.ids import BootId
from kvxferd.layout import EngineSpec, NamedTensor, RankLayout, RegionSpec, from_tensors
from kvxferd.memory import (
    MemoryPlacement,
    SealedMemory,
    SharedMemory,
    map_memfd,
    mapped_files,
    share,
    share_all,
)
from kvxferd.memory.device import DeviceMemory, ResidentMemory
from kvxferd.memory.driver import DRIVER_VARIABLE
from kvxferd.memory.driver_registry import open_driver
from tests.support.devices import Segment
from tests.support.fake_driver import FAKE, FAKE_DEVICES, GRANULARITY, FakeDriver

MIB = 1 << 20
UUID = FAKE_DEVICES[0].uuid

needs_library = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl", "rixl")), reason="no transfer library here"
)


@pytest.fixture
def sealed() -> Iterator[SealedMemory]:
    with SealedMemory.create(3 * MIB) as memory:
        yield memory


def layout_over(shared: dict[str, SharedMemory]) -> RankLayout:
    regions = tuple(RegionSpec(name, one.size_bytes) for name, one in shared.items())
    return RankLayout(0, 1, groups=(), tensors=(), regions=regions)


class TestHostMemory:
    def test_a_tensor_in_sealed_memory(self, sealed: SealedMemory) -> None:
        shared = share(sealed.torch()[5000:])
        assert (shared.memory, shared.offset, shared.placement) == (sealed, 0, MemoryPlacement.MEMFD)
        assert shared.size_bytes == 3 * MIB
        assert not shared.passed_over
        shared.close()
        assert sealed.fd >= 0, "the engine's own memory stays its own"

    def test_a_storage_that_begins_inside_sealed_memory(self, sealed: SealedMemory) -> None:
        held = (ctypes.c_char * (3 * MIB)).from_buffer(sealed.buffer)
        tensor = torch.frombuffer(held, dtype=torch.uint8, offset=9000)
        shared = share(tensor)
        assert (shared.memory, shared.offset) == (sealed, 9000)
        assert shared.size_bytes == 3 * MIB - 9000

    def test_a_file_of_another_device_with_the_same_number_is_not_it(
        self, sealed: SealedMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Inode numbers are counted by device: /dev/shm has a memfd's, too."""
        tensor = sealed.torch()
        entries = [
            entry._replace(device="fe:01") if "kvxferd" in entry.name else entry
            for entry in mapped_files.read_maps()
        ]
        assert any(entry.device == "fe:01" for entry in entries)
        monkeypatch.setattr(mapped_files, "read_maps", lambda: iter(entries))
        with pytest.raises(EngineError, match="memfd: it is in shared memory of another origin"):
            share(tensor, ["memfd"])

    def test_pages_are_adopted_and_found_again(self) -> None:
        tensor = torch.arange(5 * MIB, dtype=torch.int64)
        shared = share(tensor)
        assert shared.placement is MemoryPlacement.ADOPTED
        assert "not in a memfd" in shared.passed_over[MemoryPlacement.MEMFD]
        layout = from_tensors(
            EngineSpec("e", "g", 1),
            {
                "t": NamedTensor(
                    tensor=tensor.view(5, 2**10, 2**10), dims="block token head_dim", components="k"
                )
            },
        )
        assert layout.regions[0].size_bytes == shared.size_bytes
        assert isinstance(shared.memory, SealedMemory)
        other = map_memfd(shared.memory.fd, shared.memory.size_bytes)
        at = other.address + shared.offset + layout.tensors[0].offset
        assert ctypes.string_at(at, 24) == tensor[:3].numpy().tobytes()
        tensor[1] = 77
        assert ctypes.c_int64.from_address(at + 8).value == 77
        other.unmap()
        again = share(tensor)
        assert (again.memory, again.offset, again.placement) == (
            shared.memory,
            shared.offset,
            MemoryPlacement.MEMFD,
        )
        shared.close()

    def test_memory_that_was_freed_is_not_found_by_its_address(self) -> None:
        """The descriptor still exists, and another tensor may get the addresses."""
        tensor = torch.zeros(40 * MIB, dtype=torch.uint8)
        shared = share(tensor, ["adopted"])
        memory, address = shared.memory, tensor.data_ptr()
        del shared, tensor
        gc.collect()
        fresh = torch.zeros(40 * MIB, dtype=torch.uint8)
        if fresh.data_ptr() != address:
            pytest.skip("the addresses are not used again")
        found = share(fresh)
        assert found.memory is not memory
        assert found.placement is MemoryPlacement.ADOPTED
        found.close()
        assert isinstance(memory, SealedMemory)
        memory.close()

    @needs_library
    def test_a_rank_is_resident_as_a_whole(self, sealed: SealedMemory) -> None:
        small = torch.zeros(1000)
        shared = share_all({"small": small, "sealed": sealed.torch()})
        assert [one.is_resident for one in shared.values()] == [True, True]
        assert shared["small"].memory == ResidentMemory(small.data_ptr(), small.nbytes), (
            "from its first byte on"
        )
        assert set(shared["small"].passed_over) == set(MemoryPlacement) - {MemoryPlacement.RESIDENT}
        assert (
            shared["sealed"].passed_over[MemoryPlacement.MEMFD]
            == "another allocation of the rank is resident"
        )
        exports = export_memory(layout_over(shared), shared)
        assert (exports.placement, exports.fds) == ("resident", ())

    def test_a_refusal_lists_each_placement(self) -> None:
        with pytest.raises(EngineError) as refused:
            share_all({"cache": torch.zeros(1000)}, ["memfd", "adopted", "exported"])
        assert refused.value.code is Code.REGION_NOT_EXPORTABLE
        for words in (
            "cannot share tensor 'cache', ",
            "memfd: it is not",
            "adopted: cannot adopt",
            "exported: it is host",
        ):
            assert words in refused.value.message
        with pytest.raises(EngineError, match="'sealed': there are memfd, adopted, exported, resident"):
            share(torch.zeros(1000), ["sealed"])
        with pytest.raises(LayoutError, match="no memory"):
            share(torch.zeros(0))

    def test_what_was_adopted_is_closed_when_a_later_one_is_refused(self) -> None:
        big, small = torch.zeros(40 * MIB, dtype=torch.uint8), torch.zeros(1000)
        with pytest.raises(EngineError, match="'small'"):
            share_all({"big": big, "small": small}, ["adopted"])
        with pytest.raises(EngineError, match="memfd: it is in shared memory of another origin"):
            share(big, ["memfd"])


class DeviceTensor:
    """A tensor over a driver's memory, as torch would give it."""

    dtype, device = "bfloat16", SimpleNamespace(type="cuda")

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address, self.size_bytes = address, size_bytes
        self.shape = (size_bytes // 2,)

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def element_size(self) -> int:
        return 2


class TestDeviceMemory:
    @pytest.fixture(autouse=True)
    def fake(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(DRIVER_VARIABLE, FAKE)

    def test_memory_that_can_be_exported(self) -> None:
        with Segment(open_driver(), UUID, [2 * GRANULARITY, GRANULARITY]) as segment:
            shared = share(DeviceTensor(segment.address + 512, 2 * GRANULARITY))
            assert isinstance(shared.memory, DeviceMemory)
            assert (shared.memory.address, shared.placement) == (
                segment.address + 512,
                MemoryPlacement.EXPORTED,
            )
            exports = export_memory(layout_over({"a": shared}), {"a": shared})
            assert (exports.regions[0].fd_offset, len(exports.fds)) == (512, 2)
            exports.close()

    @needs_library
    def test_memory_that_cannot(self) -> None:
        driver = open_driver()
        assert isinstance(driver, FakeDriver)
        address = driver.allocate_plain(UUID, GRANULARITY)
        shared = share(DeviceTensor(address, GRANULARITY))
        assert shared.memory == ResidentMemory(address, GRANULARITY, UUID)
        assert MemoryPlacement.EXPORTED in shared.passed_over
        driver.free_plain(address)

    def test_without_a_driver_each_reason_is_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(DRIVER_VARIABLE, "none")
        with pytest.raises(EngineError) as refused:
            share(DeviceTensor(1 << 20, 4096))
        assert "memfd: it is on cuda" in refused.value.message
        assert f"exported: cannot use a GPU: {DRIVER_VARIABLE} is set to none" in refused.value.message
        assert "resident: " in refused.value.message


class Mover:
    """A mover of this process that ends when the test lets it."""

    daemon_end, is_quiesced = -1, False

    def fileno(self) -> int:
        return -1

    def close_daemon_end(self) -> None: ...
    def stop(self) -> None: ...
    def wait(self, timeout_s: float) -> bool:
        return self.is_quiesced


@needs_library
@pytest.mark.parametrize("quiesces", [True, False])
def test_a_tensor_that_the_engine_drops_lives_as_long_as_a_mover_may_use_it(quiesces: bool) -> None:
    tensor = torch.zeros(1000)
    kept = tensor.untyped_storage()  # torch's Python object of a storage is one while somebody holds it
    storage = weakref.ref(kept)
    shared = {"a": share(tensor, ["resident"])}
    layout, mover = layout_over(shared), Mover()
    registration = Registration()
    registration.begin(
        RankRole(EngineSpec("e", "g", 1), layout, export_memory(layout, shared)), lambda *_: mover
    )
    registration.version, registration.boot = 2, BootId("b")
    registration.build_request(0)
    del tensor, shared, kept
    gc.collect()
    assert storage() is not None, "registered"
    mover.is_quiesced = quiesces
    registration.close()
    gc.collect()
    assert (storage() is None) == quiesces
    if not quiesces:
        mover.is_quiesced = True
        Registration().close()
        gc.collect()
        assert storage() is None
        assert not _STILL_IN_USE
